"""Triton kernels around FlashInfer's fused layer."""
