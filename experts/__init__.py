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
from experts.naive_batched import NaiveBatchedExperts
from experts.torch_experts import TorchExperts
from experts.triton.batched import BatchedTritonExperts
from experts.triton.contiguous import TritonExperts
from experts.triton.permuted import GroupedGemmExperts

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
)

__all__ = [
    "COMPONENTS",
    "BatchedCutlassExpertsFP8",
    "BatchedDeepGemmExperts",
    "BatchedTritonExperts",
    "BatchedTritonOrDeepGemmExperts",
    "CutlassExpertsFP8",
    "CutlassRowwiseExpertsFP8",
    "DeepGemmExperts",
    "GroupedGemmExperts",
    "NaiveBatchedExperts",
    "TorchExperts",
    "TritonExperts",
    "TritonOrDeepGemmExperts",
]
