"""Experts parts that use CUTLASS, in CuTe DSL kernels or through PyTorch's grouped GEMM."""

from experts.cutlass.fp4 import BatchedCutlassExpertsFP4, CutlassExpertsFP4
from experts.cutlass.part import CutlassExpertsFP8
from experts.cutlass.rowwise import BatchedCutlassExpertsFP8, CutlassRowwiseExpertsFP8

__all__ = [
    "BatchedCutlassExpertsFP4",
    "BatchedCutlassExpertsFP8",
    "CutlassExpertsFP4",
    "CutlassExpertsFP8",
    "CutlassRowwiseExpertsFP8",
]
