"""PermuteExpertsUnpermute parts: permute, two grouped GEMMs with an activation, unpermute."""

from experts.batched_triton import BatchedTritonExperts
from experts.grouped_gemm import GroupedGemmExperts
from experts.naive_batched import NaiveBatchedExperts
from experts.torch_experts import TorchExperts
from experts.triton_experts import TritonExperts

COMPONENTS = (
    TorchExperts,
    TritonExperts,
    GroupedGemmExperts,
    NaiveBatchedExperts,
    BatchedTritonExperts,
)

__all__ = [
    "COMPONENTS",
    "BatchedTritonExperts",
    "GroupedGemmExperts",
    "NaiveBatchedExperts",
    "TorchExperts",
    "TritonExperts",
]
