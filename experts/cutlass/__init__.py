"""Experts over kernels of our own in CuTe DSL (the package nvidia-cutlass-dsl)."""

from experts.cutlass.part import CutlassExpertsFP8

__all__ = ["CutlassExpertsFP8"]
