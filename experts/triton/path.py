"""A path of TritonExperts: one way from arrived tokens to the layer's output.

A path is a folder: its host code, its configuration and its kernels. All that is known of a path
lies there, behind this one interface; `experts.triton.paths` lists them. A configuration, a tuned
file and a workspace name a path by its name alone.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, ClassVar, TypeVar

import torch

from experts.triton.candidates import Groups
from experts.triton.launch_config import Device, Gemm, Launch, LaunchConfig, MoEConfig, Violation
from modular_kernel.spec.problem import Combine, Problem
from modular_kernel.spec.rounding import Roundings
from modular_kernel.tensors import ContiguousShape, ContiguousTokens, ExpertWeights
from modular_kernel.workspace import BufferSpec, Workspace, WorkspaceShapes

ENDLESS = 1 << 62  # more tokens than any call has
_MOST_ROOMS = 64
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class PathCall:
    """One call of the experts: what `PermuteExpertsUnpermute.apply` received, and its launches."""

    tokens: ContiguousTokens
    weights: ExpertWeights
    workspace: Workspace
    output: torch.Tensor
    config: MoEConfig


class Path(ABC):
    """Everything that is known of a path; an instance is bound to a problem and runs its calls.

    name: in configurations, tuned files and messages. former_names: in tuned files of version 1.
    launch: the type of its configuration of one GEMM, a dataclass of numbers. quantizes_input: it
    takes unquantized tokens and quantizes them itself. refuses: there are tensors that it does not
    take. lends: another problem can launch its configurations as they are. replaces: the path under
    whose name files of version 1 meant some of its launches. younger: such a file is older than it,
    and does not stand in its way. roundings: where it rounds; None where that is not declared.
    """

    name: ClassVar[str]
    former_names: ClassVar[tuple[str, ...]] = ()
    launch: ClassVar[type[Any]] = LaunchConfig
    quantizes_input: ClassVar[bool] = False
    refuses: ClassVar[bool] = True
    lends: ClassVar[bool] = True
    replaces: ClassVar[str | None] = None
    younger: ClassVar[bool] = False
    roundings: Roundings | None

    # ------------------------------------------------------------------- which calls take it

    @classmethod
    @abstractmethod
    def serves(cls, problem: Problem, device: Device) -> bool:
        """Return whether its kernels can compute `problem` on `device`."""

    @classmethod
    def least_tokens(cls, problem: Problem) -> int:
        """Return the fewest tokens of a call that takes it without a tuned file."""
        return 0

    @classmethod
    def most_tokens(cls, problem: Problem) -> int | None:
        """Return the most tokens of a call that takes it without a tuned file; None for any number.

        What was tuned for fewer tokens says nothing about a call of more.
        """
        return None

    # ------------------------------------------------------------------- what it launches

    @classmethod
    @abstractmethod
    def default_config(cls, problem: Problem, tokens: int, device: Device) -> MoEConfig:
        """Return what a call of `tokens` tokens launches without a tuned file."""

    @classmethod
    def turns(cls, problem: Problem) -> Iterable[int]:
        """Return numbers of tokens, ascending, behind which `default_config` may change."""
        return ()

    @classmethod
    @abstractmethod
    def violations(
        cls, config: Launch, gemm: Gemm, problem: Problem, device: Device
    ) -> Iterator[Violation]:
        """Yield every reason not to launch `config` for one GEMM of `problem`."""

    @classmethod
    def candidates(cls, problem: Problem, tokens: int) -> Groups:
        """Return launches of either GEMM worth timing, by the block_m that they share."""
        return {}

    @classmethod
    def in_place_of(
        cls, config: MoEConfig, tokens: int, problem: Problem, device: Device
    ) -> MoEConfig:
        """Return what a call launches where a file of version 1 has `config` of `cls.replaces`."""
        return config

    # ------------------------------------------------------------------- prepared weights

    @classmethod
    def turns_of_prepared(cls, problem: Problem) -> tuple[tuple[int, MoEConfig], ...]:
        """Return from how many tokens on calls with prepared weights launch what, ascending.

        Such calls take this path unless a file tuned with prepared weights, or an override, says
        another. () of a path that prepares nothing.
        """
        return ()

    def prepared_specs(self) -> dict[str, BufferSpec]:
        """Return what `prepare` makes: see PermuteExpertsUnpermute."""
        return {}

    def reads_prepared(self, weights: ExpertWeights, tokens: int) -> bool:
        """Return whether so many tokens gain by what was prepared, if nothing is tuned."""
        return True

    def specs_of_prepared(self, tokens: int, block_m: int) -> dict[str, BufferSpec]:
        """Return the buffers of a call with prepared weights, as `specs` does."""
        return self.specs(tokens, block_m)

    def prepare(self, weights: ExpertWeights, out: Mapping[str, torch.Tensor]) -> None:
        """Write every element of `out`: see PermuteExpertsUnpermute."""
        assert not out

    # ------------------------------------------------------------------- a call

    @abstractmethod
    def __init__(self, problem: Problem) -> None:
        """Bind the kernels for `problem`, which it serves."""

    @abstractmethod
    def takes(self, weights: ExpertWeights, x_TH: torch.Tensor) -> bool:
        """Return whether it can work with weights and tokens that lie in memory as these do."""

    @abstractmethod
    def specs(self, tokens: int, block_m: int) -> dict[str, BufferSpec]:
        """Return every buffer of a call of `tokens` tokens in blocks of block_m rows, by name."""

    @abstractmethod
    def run(self, call: PathCall) -> None:
        """Write every element of call.output."""


class Rooms:
    """The room that calls take, remembered: it depends on their shape and kinds alone.

    An override of configurations gives other kinds. The first ones made are kept: serving has few.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, WorkspaceShapes] = {}

    def of(
        self,
        problem: Problem,
        shape: ContiguousShape,
        kinds: tuple[K, ...],
        specs: Callable[[K], Mapping[str, BufferSpec]],
    ) -> WorkspaceShapes:
        """Return room for any of `kinds` of call, whose buffers `specs` returns."""
        room = self._known.get((shape, kinds))
        if room is None:
            room = room_for(problem, shape, map(specs, kinds))
            if len(self._known) < _MOST_ROOMS:
                self._known[shape, kinds] = room
        return room


def room_for(
    problem: Problem, shape: ContiguousShape, kinds: Iterable[Mapping[str, BufferSpec]]
) -> WorkspaceShapes:
    """Return room for any of the kinds of call whose buffers are given: of each name the largest.

    A buffer lies over what it lies over in any of them, so it must be the last in all.
    """
    largest: dict[str, BufferSpec] = {}
    for specs in kinds:
        for name, spec in specs.items():
            known = largest.get(name, spec)
            over = tuple(dict.fromkeys((*known.over, *spec.over)))
            largest[name] = replace(max(known, spec, key=attrgetter("nbytes")), over=over)
    nothing = BufferSpec((0,), problem.dtype)
    top_k = () if problem.combine is Combine.SUM else (shape.top_k,)
    return WorkspaceShapes(
        workspace13=largest.pop("workspace13", nothing),
        workspace2=largest.pop("workspace2", nothing),
        output=BufferSpec((shape.tokens, *top_k, problem.hidden), problem.dtype),
        extra=largest,
    )
