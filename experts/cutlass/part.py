"""CutlassExpertsFP8: TritonExperts whose products of many fp8 rows are in CuTe DSL."""

import torch

from experts.cutlass.path import CutlassPath
from experts.triton.contiguous import TritonExperts
from experts.triton.grouped_tma.grouped_tma_config import NAME
from modular_kernel.compatibility.support import ExpertsRequirements
from modular_kernel.spec.problem import ActivationFormat, Problem, Reduce

_BLOCK = (128, 128)


class CutlassExpertsFP8(TritonExperts):
    """Contiguous tokens, fp8 by blocks of 128 by 128; weights and sums over top-k itself.

    Calls of few tokens, and weights that TMA does not take, go TritonExperts' other ways. Results
    are bitwise repeatable.
    """

    replayable = False  # the kernel's launch is not triton's
    requires = ExpertsRequirements(
        activation_format=ActivationFormat.STANDARD,
        devices=frozenset({"cuda"}),
        # What it imports is called cutlass, as another package of the index is.
        packages=("triton", "nvidia_cutlass_dsl", "tvm_ffi"),
        packages_extra="cutlass",
        triton=True,
        archs=frozenset({(9, 0)}),  # what the kernel's instructions are of
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
        """Nothing to choose: the kernel has one tile."""
