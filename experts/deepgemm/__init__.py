"""Experts parts that use the grouped GEMMs of DeepGEMM (sm_90)."""

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
