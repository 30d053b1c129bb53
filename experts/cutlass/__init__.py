"""Experts over CUTLASS: kernels of our own in CuTe DSL (nvidia-cutlass-dsl), and torch's."""

from experts.cutlass.part import CutlassExpertsFP8
from experts.cutlass.rowwise import BatchedCutlassExpertsFP8, CutlassRowwiseExpertsFP8

__all__ = ["BatchedCutlassExpertsFP8", "CutlassExpertsFP8", "CutlassRowwiseExpertsFP8"]
