"""CutlassExpertsFP8: TritonExperts whose products of many fp8 rows are in CuTe DSL."""

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

from experts.cutlass.path import CutlassPath
from experts.triton.contiguous import TritonExperts
from experts.triton.grouped_tma.config import NAME
from modular_kernel.support import ExpertsRequirements, Rejection
from modular_kernel.types import ActivationFormat, Machine, Problem, Reduce

_DISTRIBUTION = "nvidia-cutlass-dsl"
_ARCH = (9, 0)  # what the kernel's instructions are of: later ones have others
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
        packages=("triton", "cutlass"),
        packages_extra="cutlass",
        triton=True,
        min_arch=_ARCH,
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
    )

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        if NAME in self._paths:
            self._paths[NAME] = CutlassPath(problem)

    @classmethod
    def tunable(cls, problem: Problem) -> None:
        """Nothing to choose: the kernel has one tile."""

    @classmethod
    def extra_rejections(cls, problem: Problem, machine: Machine) -> tuple[Rejection, ...]:
        found = list(super().extra_rejections(problem, machine))
        if machine.arch is not None and machine.arch > _ARCH:
            got = f"{machine.arch[0]}.{machine.arch[1]}"
            hint = "its kernel is of sm_90a's instructions; take TritonExperts"
            found.append(Rejection("arch", (cls.__name__, "machine"), got, "9.0", hint))
        group = problem.scheme.group
        if problem.scheme.name in cls.requires.schemes and group != _BLOCK:
            found.append(
                Rejection("quant_block", (cls.__name__, "problem"), f"{group}", f"{_BLOCK}")
            )
        if "cutlass" in machine.packages and _is_another_package():
            hint = f"pip install {_DISTRIBUTION}"
            got = "another package of that name"
            found.append(Rejection("package", (cls.__name__, "machine"), got, _DISTRIBUTION, hint))
        return tuple(found)


def _is_another_package() -> bool:
    """Whether what `import cutlass` would find here is not NVIDIA's."""
    if find_spec("cutlass") is None:  # the machine is not this one
        return False
    try:
        version(_DISTRIBUTION)
    except PackageNotFoundError:
        return True
    return False
