"""Experts parts, the subclasses of `PermuteExpertsUnpermute`.

An experts part permutes tokens, runs two grouped GEMMs with an activation in between, and
unpermutes the results.
"""

from experts.cutlass import (
    BatchedCutlassExpertsFP4,
    BatchedCutlassExpertsFP8,
    CutlassExpertsFP4,
    CutlassExpertsFP8,
    CutlassRowwiseExpertsFP8,
)
from experts.deepgemm import (
    BatchedDeepGemmExperts,
    BatchedTritonOrDeepGemmExperts,
    DeepGemmExperts,
    TritonOrDeepGemmExperts,
)
from experts.flashinfer import FlashInferExperts
from experts.grouped_gemm import GroupedGemmExperts
from experts.naive_batched import NaiveBatchedExperts
from experts.torch_experts import TorchExperts
from experts.triton.aligned.staged import StagedTritonExperts
from experts.triton.batched import BatchedTritonExperts
from experts.triton.standard import TritonExperts
from experts.triton_kernels import TritonKernelsExperts
from modular_kernel.compatibility.support import PlannedPart

# StagedTritonExperts is the staged form of TritonExperts. It cannot be selected by name.
COMPONENTS = (
    TorchExperts,
    TritonExperts,
    GroupedGemmExperts,
    NaiveBatchedExperts,
    BatchedTritonExperts,
    CutlassExpertsFP8,
    CutlassRowwiseExpertsFP8,
    BatchedCutlassExpertsFP8,
    CutlassExpertsFP4,
    BatchedCutlassExpertsFP4,
    DeepGemmExperts,
    BatchedDeepGemmExperts,
    TritonOrDeepGemmExperts,
    BatchedTritonOrDeepGemmExperts,
    TritonKernelsExperts,
    FlashInferExperts,
)

PLANNED: tuple[PlannedPart, ...] = ()

__all__ = [
    "COMPONENTS",
    "PLANNED",
    "BatchedCutlassExpertsFP4",
    "BatchedCutlassExpertsFP8",
    "BatchedDeepGemmExperts",
    "BatchedTritonExperts",
    "BatchedTritonOrDeepGemmExperts",
    "CutlassExpertsFP4",
    "CutlassExpertsFP8",
    "CutlassRowwiseExpertsFP8",
    "DeepGemmExperts",
    "FlashInferExperts",
    "GroupedGemmExperts",
    "NaiveBatchedExperts",
    "StagedTritonExperts",
    "TorchExperts",
    "TritonExperts",
    "TritonKernelsExperts",
    "TritonOrDeepGemmExperts",
]
