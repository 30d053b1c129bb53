"""Triton kernels that prepare routing for FlashInfer's fused MoE layer."""
