"""Parts over torch.distributed collectives, with NCCL or gloo."""
