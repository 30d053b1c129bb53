"""Triton kernels that prepare the routing for FlashInfer's fused MoE layer."""
