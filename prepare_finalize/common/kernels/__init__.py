"""Triton kernels of the exchanges over torch.distributed."""
