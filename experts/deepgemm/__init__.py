"""Experts over DeepGEMM's grouped products (sm_90)."""

from experts.deepgemm.either import BatchedTritonOrDeepGemmExperts, TritonOrDeepGemmExperts
from experts.deepgemm.parts import BatchedDeepGemmExperts, DeepGemmExperts

__all__ = [
    "BatchedDeepGemmExperts",
    "BatchedTritonOrDeepGemmExperts",
    "DeepGemmExperts",
    "TritonOrDeepGemmExperts",
]
