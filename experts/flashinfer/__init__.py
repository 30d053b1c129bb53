"""Experts part that uses FlashInfer's fused MoE layer (cutlass_fused_moe)."""

from experts.flashinfer.part import FlashInferExperts

__all__ = ["FlashInferExperts"]
