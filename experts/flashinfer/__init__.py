"""Experts over FlashInfer's fused layer (cutlass_fused_moe)."""

from experts.flashinfer.part import FlashInferExperts

__all__ = ["FlashInferExperts"]
