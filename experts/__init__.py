"""PermuteExpertsUnpermute parts: permute, two grouped GEMMs with an activation, unpermute."""

from experts.cutlass import CutlassExpertsFP8
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
)

__all__ = [
    "COMPONENTS",
    "BatchedTritonExperts",
    "CutlassExpertsFP8",
    "GroupedGemmExperts",
    "NaiveBatchedExperts",
    "TorchExperts",
    "TritonExperts",
]
