"""Experts parts that use DeepGEMM's grouped GEMMs (sm_90)."""

from experts.deepgemm.parts import BatchedDeepGemmExperts, DeepGemmExperts
from experts.deepgemm.triton_or_deepgemm import (
    BatchedTritonOrDeepGemmExperts,
    TritonOrDeepGemmExperts,
)

__all__ = [
    "BatchedDeepGemmExperts",
    "BatchedTritonOrDeepGemmExperts",
    "DeepGemmExperts",
    "TritonOrDeepGemmExperts",
]
