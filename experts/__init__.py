"""PermuteExpertsUnpermute parts: permute, two grouped GEMMs with an activation, unpermute."""

from experts.cutlass import CutlassExpertsFP8
from experts.naive_batched import NaiveBatchedExperts
from experts.torch_experts import TorchExperts
from experts.triton.batched import BatchedTritonExperts
from experts.triton.contiguous import TritonExperts
from experts.triton.permuted import GroupedGemmExperts
from experts.triton.staged import StagedTritonExperts

# StagedTritonExperts is none of them: calls reach it as the staged twin of TritonExperts.
COMPONENTS = (
    TorchExperts,
    TritonExperts,
    GroupedGemmExperts,
    NaiveBatchedExperts,
    BatchedTritonExperts,
    CutlassExpertsFP8,
)

__all__ = [
    "COMPONENTS",
    "BatchedTritonExperts",
    "CutlassExpertsFP8",
    "GroupedGemmExperts",
    "NaiveBatchedExperts",
    "StagedTritonExperts",
    "TorchExperts",
    "TritonExperts",
]
