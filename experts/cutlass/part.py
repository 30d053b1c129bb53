"""CutlassExpertsFP8: TritonExperts with CuTe DSL kernels for calls with many fp8 rows."""

import torch

from experts.cutlass.path import CutlassPath
from experts.triton.grouped_tma.grouped_tma_config import NAME
from experts.triton.standard import TritonExperts
from modular_kernel.compatibility.support import ExpertsRequirements
from modular_kernel.spec.problem import ActivationFormat, Problem, Reduce

_BLOCK = (128, 128)


class CutlassExpertsFP8(TritonExperts):
    """Experts over contiguous tokens, with fp8 weights scaled in 128 x 128 blocks.

    The part applies the router weights and sums over top-k. Calls with few tokens, or with weights
    that TMA cannot load, use another path of TritonExperts. Results are bitwise reproducible.
    """

    replayable = False  # the kernel is not launched by Triton
    requires = ExpertsRequirements(
        activation_format=ActivationFormat.STANDARD,
        devices=frozenset({"cuda"}),
        # nvidia-cutlass-dsl is imported as `cutlass`, which is also an unrelated package on PyPI.
        packages=("triton", "nvidia_cutlass_dsl", "tvm_ffi"),
        packages_extra="cutlass",
        triton=True,
        archs=frozenset({(9, 0)}),  # the kernel uses wgmma instructions
        dtypes=frozenset({torch.bfloat16}),
        graph_capturable=True,
        reduce=Reduce.NOOP,
        keep_topk=True,
        activations=frozenset({"silu"}),
        interleaved=False,
        bias=False,
        weight_on_input=False,
        expert_map=True,
        chunking=True,
        hidden_multiple=_BLOCK[1],
        intermediate_multiple=_BLOCK[0],
        schemes=frozenset({"fp8_w8a8_block"}),
        blocks=frozenset({_BLOCK}),
    )

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        if NAME in self._paths:
            self._paths[NAME] = CutlassPath(problem)

    @classmethod
    def tunable(cls, problem: Problem) -> None:
        """Return None, because the kernel has a single tile shape."""
