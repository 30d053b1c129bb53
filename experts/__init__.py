"""PermuteExpertsUnpermute parts: permute, two grouped GEMMs with an activation, unpermute."""

from experts.cutlass import (
    BatchedCutlassExpertsFP8,
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
from experts.naive_batched import NaiveBatchedExperts
from experts.torch_experts import TorchExperts
from experts.triton.aligned.staged import StagedTritonExperts
from experts.triton.batched import BatchedTritonExperts
from experts.triton.contiguous import TritonExperts
from experts.triton.permuted import GroupedGemmExperts
from experts.triton_kernels import TritonKernelsExperts
from modular_kernel.support import Planned

# StagedTritonExperts is none of them: calls reach it as the staged twin of TritonExperts.
COMPONENTS = (
    TorchExperts,
    TritonExperts,
    GroupedGemmExperts,
    NaiveBatchedExperts,
    BatchedTritonExperts,
    CutlassExpertsFP8,
    CutlassRowwiseExpertsFP8,
    BatchedCutlassExpertsFP8,
    DeepGemmExperts,
    BatchedDeepGemmExperts,
    TritonOrDeepGemmExperts,
    BatchedTritonOrDeepGemmExperts,
    TritonKernelsExperts,
    FlashInferExperts,
)

_SM_100 = "its nvfp4 products need sm_100, on which nothing here was run yet"
PLANNED = (
    Planned("CutlassExpertsFP4", "experts", _SM_100),
    Planned("BatchedCutlassExpertsFP4", "experts", _SM_100),
)

__all__ = [
    "COMPONENTS",
    "PLANNED",
    "BatchedCutlassExpertsFP8",
    "BatchedDeepGemmExperts",
    "BatchedTritonExperts",
    "BatchedTritonOrDeepGemmExperts",
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
