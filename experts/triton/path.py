"""The interface of the execution paths of TritonExperts.

A path is one implementation of the layer, from tokens and their routing to the output, for example
"aligned" or "gemv". Each path is a subfolder with host code (<path>_path.py), configuration
(<path>_config.py) and kernels, and is used only through `Path`. `experts.triton.paths` lists the
paths, and `TritonExperts` chooses one per call.

    problem        the description of a layer: sizes, dtype, quantization, activation function
    launch         the tile sizes, warps and stages of one GEMM; each path has its own dataclass
    configuration  a `MoEConfig`: the path of a call and the launches of its two GEMMs
    tuned file     a JSON file with measured configurations for some token counts (`configs.files`)
    prepared weights  weights with a copy in a layout that the path reads faster, made at loading
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, ClassVar, TypeVar

import torch

from experts.triton.candidates import CandidateGroups
from experts.triton.launch_config import Device, Gemm, Launch, LaunchConfig, MoEConfig, Violation
from modular_kernel.spec.problem import Combine, Problem
from modular_kernel.spec.rounding import Roundings
from modular_kernel.tensors import ExpertWeights, StandardShape, StandardTokens
from modular_kernel.workspace import BufferSpec, Workspace, WorkspaceShapes

UNBOUNDED_TOKENS = 1 << 62  # larger than the token count of any call
_MAX_ENTRIES = 64  # maximum number of entries of a WorkspaceCache
KindT = TypeVar("KindT", bound=Hashable)


@dataclass(frozen=True)
class PathCall:
    """The arguments of one `PermuteExpertsUnpermute.apply` call, and its launch configuration."""

    tokens: StandardTokens
    weights: ExpertWeights
    workspace: Workspace
    output: torch.Tensor
    config: MoEConfig


class Path(ABC):
    """An execution path of TritonExperts. An instance is bound to a problem and runs its calls.

    name: used in configurations, tuned files and messages.
    launch: the dataclass of integers that describes the launch of one GEMM.
    quantizes_input: whether the path accepts unquantized tokens and quantizes them itself.
    may_reject_tensors: whether `supports_tensors` or `is_fast` can return False.
    transferable: whether launches that were tuned for one layer are also good for similar layers.
    roundings: the points at which the path rounds to the dtype of the layer, from which tests
        derive tolerances; None if they are not declared.
    """

    name: ClassVar[str]
    launch: ClassVar[type[Any]] = LaunchConfig
    quantizes_input: ClassVar[bool] = False
    may_reject_tensors: bool = True
    transferable: ClassVar[bool] = True
    roundings: Roundings | None

    # ------------------------------------------------------------------- applicability

    @classmethod
    @abstractmethod
    def supports(cls, problem: Problem, device: Device) -> bool:
        """Return whether the kernels support `problem` on `device`."""

    @classmethod
    def min_tokens(cls, problem: Problem) -> int:
        """Return the smallest token count for which the path is used without a tuned file."""
        return 0

    @classmethod
    def max_tokens(cls, problem: Problem) -> int | None:
        """Return the largest token count for which the path is used without a tuned file.

        None means that there is no limit. A launch from a tuned file is used up to the same limit,
        or up to the token count for which it was tuned if that is larger.
        """
        return None

    # ------------------------------------------------------------------- launch configurations

    @classmethod
    @abstractmethod
    def default_config(cls, problem: Problem, tokens: int, device: Device) -> MoEConfig:
        """Return the configuration of a call of `tokens` tokens without a tuned file."""

    @classmethod
    def breakpoints(cls, problem: Problem) -> Iterable[int]:
        """Return the token counts, ascending, after which `default_config` changes."""
        return ()

    @classmethod
    @abstractmethod
    def violations(
        cls, config: Launch, gemm: Gemm, problem: Problem, device: Device
    ) -> Iterator[Violation]:
        """Yield every reason why `config` cannot be launched for `gemm` of `problem`."""

    @classmethod
    def candidates(cls, problem: Problem, tokens: int) -> CandidateGroups:
        """Return the launches of both GEMMs that `mk tune` should time, by block_m.

        Both GEMMs of a configuration have the same block_m.
        """
        return {}

    @classmethod
    def replace_foreign_config(
        cls, config: MoEConfig, tokens: int, problem: Problem, device: Device
    ) -> MoEConfig:
        """Return the configuration to use instead of `config` from a file of vLLM or SGLang.

        The launches in these files are for a kernel similar to the kernel of the aligned path.
        Paths that are always faster than the aligned path override this method.
        """
        return config

    # ------------------------------------------------------------------- prepared weights

    @classmethod
    def prepared_configs(cls, problem: Problem) -> tuple[tuple[int, MoEConfig], ...]:
        """Return (minimum tokens, configuration) of calls with prepared weights, ascending.

        Calls with prepared weights use these configurations, unless there is an override or a file
        that was tuned with prepared weights. Return () if the path prepares nothing.
        """
        return ()

    def prepared_specs(self) -> dict[str, BufferSpec]:
        """Return the tensors that `prepare` writes, by name.

        See `PermuteExpertsUnpermute.prepared_specs`.
        """
        return {}

    def is_faster_when_prepared(self, weights: ExpertWeights, tokens: int) -> bool:
        """Return whether prepared weights make a call of `tokens` tokens faster.

        The method is not called if the configuration is overridden, or comes from a file that was
        tuned with prepared weights.
        """
        return True

    def specs_of_prepared(self, tokens: int, block_m: int) -> dict[str, BufferSpec]:
        """Like `specs`, for a call with prepared weights."""
        return self.specs(tokens, block_m)

    def prepare(self, weights: ExpertWeights, out: Mapping[str, torch.Tensor]) -> None:
        """Write every element of the prepared weights, `out`.

        See `PermuteExpertsUnpermute.prepare`.
        """
        assert not out

    # ------------------------------------------------------------------- execution

    @abstractmethod
    def __init__(self, problem: Problem) -> None:
        """Bind the kernels for `problem`, which `supports` has accepted."""

    @abstractmethod
    def supports_tensors(self, weights: ExpertWeights, x_TH: torch.Tensor) -> bool:
        """Return whether the path supports the strides and alignment of these tensors."""

    def is_fast(self, weights: ExpertWeights, tokens: int) -> bool:
        """Return whether the path is a good choice for weights of these strides.

        If not, a call without an override uses another path. The method is called only for
        unquantized weights, if w1 or w2 is contiguous along N.
        """
        return True

    def config_for_strides(
        self, config: MoEConfig, weights: ExpertWeights, device: Device
    ) -> MoEConfig:
        """Return the configuration to use instead of `config` for weights of these strides.

        Heuristics and tuned files are for weights whose K is contiguous. The result has the same
        path and block_m as `config`, so that it fits the same workspace. Like `is_fast`, the method
        is called only for unquantized weights, if w1 or w2 is contiguous along N.
        """
        return config

    @abstractmethod
    def specs(self, tokens: int, block_m: int) -> dict[str, BufferSpec]:
        """Return the buffers, by name, of a call of `tokens` tokens in blocks of block_m rows."""

    @abstractmethod
    def run(self, call: PathCall) -> None:
        """Compute the layer: write every element of call.output."""


class WorkspaceCache:
    """A cache of the workspaces of `merge_workspaces`.

    A key is the maximum shape of a call, and the kinds of calls that the workspace must fit. A kind
    is anything that determines the buffers of a call, such as its path and block_m. Overriding a
    configuration can add kinds. Only the first _MAX_ENTRIES entries are kept, because a server uses
    few shapes.
    """

    def __init__(self) -> None:
        self._shapes: dict[Hashable, WorkspaceShapes] = {}

    def get_or_merge(
        self,
        problem: Problem,
        shape: StandardShape,
        kinds: tuple[KindT, ...],
        specs: Callable[[KindT], Mapping[str, BufferSpec]],
    ) -> WorkspaceShapes:
        """Return a workspace that fits calls of all `kinds`.

        specs(kind) returns the buffers of calls of one kind.
        """
        shapes = self._shapes.get((shape, kinds))
        if shapes is None:
            shapes = merge_workspaces(problem, shape, map(specs, kinds))
            if len(self._shapes) < _MAX_ENTRIES:
                self._shapes[shape, kinds] = shapes
        return shapes


def merge_workspaces(
    problem: Problem, shape: StandardShape, specs_by_kind: Iterable[Mapping[str, BufferSpec]]
) -> WorkspaceShapes:
    """Return a workspace that fits all kinds of calls: for each name, the largest buffer.

    A buffer may reuse the memory of the buffers in `BufferSpec.over`. A merged buffer may reuse the
    memory of the buffers that any kind lists in `over`. After a call of any kind has taken the
    merged buffer, it must not use those buffers.

    specs_by_kind: the buffers of each kind of call, by name.
    """
    largest: dict[str, BufferSpec] = {}
    for specs in specs_by_kind:
        for name, spec in specs.items():
            previous = largest.get(name, spec)
            reused_names = tuple(dict.fromkeys((*previous.over, *spec.over)))
            larger = max(previous, spec, key=attrgetter("nbytes"))
            largest[name] = replace(larger, over=reused_names)
    empty_buffer = BufferSpec((0,), problem.dtype)
    top_k = () if problem.combine is Combine.SUM else (shape.top_k,)
    return WorkspaceShapes(
        workspace13=largest.pop("workspace13", empty_buffer),
        workspace2=largest.pop("workspace2", empty_buffer),
        output=BufferSpec((shape.tokens, *top_k, problem.hidden), problem.dtype),
        extra=largest,
    )
