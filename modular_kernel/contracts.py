"""The three abstract parts a fused MoE layer is composed from.

    PrepareAndFinalize.prepare -> PermuteExpertsUnpermute.apply -> PrepareAndFinalize.finalize

The class body of a part declares (`requires = ...`), its constructor binds kernels or a vendor
library, its methods compute. Nothing is kept on `self` between prepare and finalize: the handle
carries it, so two batches in flight are safe.

`replayable = True` in a part's own class body promises that whatever it does on the device in a
call are launches through `modular_kernel.replay.launch`, and that it chooses them by shapes,
strides, dtypes and alignment alone: a plan then repeats them without asking the part. torch
operations and kernels of Triton's interpreter are noticed, and are not replayed; another library's
are not.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from modular_kernel.compatibility.support import (
    ExpertsRequirements,
    PrepareFinalizeRequirements,
    Rejection,
)
from modular_kernel.errors import UnsupportedError
from modular_kernel.spec.problem import ActivationFormat, Machine, Problem, Reduce
from modular_kernel.spec.rounding import Roundings
from modular_kernel.tensors import (
    Dispatched,
    DispatchShape,
    ExpertRows,
    ExpertWeights,
    Handle,
    Routing,
)
from modular_kernel.workspace import BufferSpec, Workspace, WorkspaceShapes

Choice = Hashable


@dataclass(frozen=True)
class Took:
    """Seconds of one call, and of those of its stages that `Tunable.stages` names."""

    seconds: float
    stages: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Best:
    """The fastest choice for some number of tokens.

    untuned_seconds: of the untuned choice, None if that could not be timed.
    """

    choice: Choice
    seconds: float
    untuned_seconds: float | None


class Tunable(ABC):
    """The launches of one part for one problem, whose number of tokens plays no role.

    A choice is in force inside `using(choice)`, in this thread: kernels and plans are made and
    called there.

    Tuned in two steps. Every candidate is compiled ahead and screened: its output is checked, and
    a few calls are timed stage by stage. By those times the part names a few finalists, of code
    that the candidates have compiled (one stage's launch of this one, another's of that), whose
    whole calls are then timed beside the untuned choice.
    """

    stages: tuple[str, ...] = ()

    def of_prepared(self, device_name: str | None = None) -> "Tunable | None":
        """Return those of calls with prepared weights, kept apart; None where none can be prepared.

        device_name: on this GPU, of which the result can explain; None means this machine's.
        """
        return None

    @abstractmethod
    def untuned(self, tokens: int) -> Choice:
        """Return what the part launches where nothing was tuned."""

    @abstractmethod
    def candidates(self, tokens: int) -> Sequence[Choice]:
        """Return choices worth a try, all different, the likeliest first."""

    @abstractmethod
    def finalists(self, tokens: int, took: Mapping[Choice, Took]) -> Sequence[Choice]:
        """Return the few choices that are fastest by what was measured.

        took: what the candidates and the untuned choice took. Candidates that did not run, or had
        no time to, are not in it.
        """

    @abstractmethod
    def using(self, choice: Choice) -> AbstractContextManager[None]:
        """Launch `choice` inside the block, whatever the number of tokens."""

    @abstractmethod
    def as_json(self, choice: Choice) -> Mapping[str, object]:
        """Return `choice` as a record keeps it."""

    @abstractmethod
    def saved(self, folder: Path) -> Mapping[int, Best]:
        """Read what a former run left in `folder` for this problem, by tokens; empty if nothing.

        ConfigurationError if what is there cannot be continued.
        """

    @abstractmethod
    def save(self, best: Mapping[int, Best], folder: Path) -> Path:
        """Write all of `best` where the part finds it if `folder` is its user's; whole or not."""

    @abstractmethod
    def explain(self, tokens: int, device_name: str | None = None) -> str:
        """Say what is launched, where that comes from, and why: on this machine, or on that GPU."""


Receiver = Callable[[], tuple[Dispatched, Handle]]


class TopKWeightAndReduce(ABC):
    """Applies router weights and the routed scaling factor once, and sums over top-k."""

    kind: ClassVar[Reduce | None]  # None: keeps top-k

    @abstractmethod
    def apply(self, rows: ExpertRows, out: torch.Tensor) -> None:
        """Write every element of `out`, (T, H) or (T, K, H) in the problem's dtype.

        `out` may be the very tensor `rows.rows`; then the work is done in place.
        """


class Judged:
    """What both kinds of part that are judged answer about themselves, before one is made."""

    replayable: ClassVar[bool] = False

    @classmethod
    def extra_rejections(cls, problem: Problem, machine: Machine) -> tuple[Rejection, ...]:
        """Return rejections by rules that `requires` has no word for.

        Such a rule is this part's alone, and is named after it.
        """
        return ()

    @classmethod
    def explained(cls, problem: Problem) -> tuple[str, ...]:
        """Return lines that say what calls of `problem` take, of a part that chooses."""
        return ()

    @classmethod
    def described(cls, machine: Machine) -> AbstractContextManager[None]:
        """Have launches chosen inside, in this thread, as on `machine`, which need not be here."""
        return nullcontext()

    @classmethod
    def meta_calls(cls) -> Mapping[str, Callable[[], object]]:
        """Return calls, by name, with tensors that have no memory.

        They launch kernels beyond what a layer of one rank does, so that `mk compile` meets them.
        """
        return {}


class PrepareAndFinalize(Judged, ABC):
    """Quantize and dispatch before the experts; combine after them.

    problem: the layer it serves. group: the process group, where ranks take part.
    """

    requires: ClassVar[PrepareFinalizeRequirements]
    keeps_expert_output: ClassVar[bool] = False  # memory that other ranks read, say
    makes_output: ClassVar[bool] = False  # see `combined`
    # `prepare` costs less than `prepare_no_receive` and what waits for it.
    prepares_at_once: ClassVar[bool] = False
    capacity_multiple: int = 1  # of batched rows, if `requires.rounds_capacity`

    def __init__(self, problem: Problem, group: object | None = None) -> None:
        self.problem = problem
        self.group = group

    def __getstate__(self) -> dict[str, Any]:
        """Return what pickle and copy take; UnsupportedError with a process group.

        Connections to other ranks belong to the process that opened them.
        """
        if self.group is not None or self.problem.parallel.world_size > 1:
            got = "a part that holds a process group"
            need = "one made anew in each process, of its problem and that process's group"
            raise UnsupportedError(f"pickle or copy of {type(self).__name__}", got=got, need=need)
        return self.__dict__

    def round_capacity(self, multiple: int) -> None:
        """Make the room of an expert a multiple of this, if `requires.rounds_capacity`.

        Called where a kernel is composed, before anything is sized.
        """
        self.capacity_multiple = math.lcm(self.capacity_multiple, multiple)

    def rounded(self, rows: int) -> int:
        """Return the room for `rows` rows of an expert."""
        return -(-rows // self.capacity_multiple) * self.capacity_multiple

    def check_machine(self, machine: Machine) -> None:  # most have nothing to check
        """Raise the InputError of a part whose group, say, cannot serve `machine`."""

    def destroy(self) -> None:  # most hold nothing
        """Free what it holds for its process group, on all ranks alike; it serves no more then."""

    @property
    def activation_format(self) -> ActivationFormat:
        """The format prepare produces and finalize takes back."""
        return self.requires.activation_format

    def topk_indices_dtype(self) -> torch.dtype | None:
        """Return the dtype that the router must emit; None if int32 and int64 both do.

        It holds whatever Problem.ids_dtype leaves open: DtypeError on another. Where both do, the
        part makes of them what its library takes.
        """
        return self.requires.topk_indices_dtype

    def max_num_tokens_per_rank(self) -> int | None:
        """Return the most tokens one call may pass, CapacityError above.

        None if the part has no bound of its own, so that only the kernel's problem.tokens holds.
        """
        return self.requires.max_tokens

    def num_dispatchers(self) -> int:
        """Return the number of ranks whose tokens may arrive here."""
        return self.problem.parallel.world_size

    def has_prepare_no_receive(self) -> bool:
        """Tell whether `prepare_no_receive` is implemented."""
        return self.requires.asynchronous

    @abstractmethod
    def dispatch_shape(self, tokens: int) -> DispatchShape:
        """Return the most that can arrive in a call that passes `tokens` tokens here.

        Other ranks may pass up to problem.tokens then.
        """

    @abstractmethod
    def workspace_shapes(self, tokens: int) -> Mapping[str, BufferSpec]:
        """Return the buffers that prepare and finalize take from the workspace, by name."""

    @abstractmethod
    def prepare(
        self, x_TH: torch.Tensor, routing: Routing, *, weights: ExpertWeights, call: "Call"
    ) -> tuple[Dispatched, Handle]:
        """Quantize and dispatch x_TH (T, H), read only; T may be 0.

        Of `weights` only expert_map and the static input scales may be read.
        """

    def prepare_no_receive(
        self, x_TH: torch.Tensor, routing: Routing, *, weights: ExpertWeights, call: "Call"
    ) -> Receiver:
        """Start prepare and return what waits for it. Raises UnsupportedError if not declared."""
        name = type(self).__name__
        raise UnsupportedError("prepare_no_receive", got=name, need="a part declared asynchronous")

    def expert_output(self, handle: Handle) -> torch.Tensor:
        """Return where the experts of this call write their sums, if `keeps_expert_output`."""
        name = type(self).__name__
        need = "a part that keeps the experts' output"
        raise UnsupportedError("expert_output", got=name, need=need)

    def refuse(self, error: Exception) -> None:  # most have nobody to tell
        """Tell the other ranks, without waiting for them, that this one refuses its call.

        It does so with `error`: nothing of the call was exchanged. They raise CommunicationError,
        and all serve on.
        """

    def abandon(self, error: Exception) -> None:  # most have nobody to tell
        """Serve no more, and let the other ranks see it.

        A call that was begun with them will not be finished because of `error`. Not for a
        CommunicationError: all ranks know of that.
        """

    def check(self) -> None:  # most have raised already
        """Wait for the device, and raise what went wrong there in calls that have returned."""

    @abstractmethod
    def finalize(
        self,
        expert_output: torch.Tensor,
        *,
        handle: Handle,
        reduce: TopKWeightAndReduce,
        out: torch.Tensor,
    ) -> None:
        """Combine into `out` (T, H) or (T, K, H), applying `reduce`.

        A part applies a substitute if `reduce` delegates. `handle` must come from the prepare of
        the same call.
        """

    def combined(
        self, expert_output: torch.Tensor, *, handle: Handle, reduce: TopKWeightAndReduce
    ) -> torch.Tensor:
        """Combine as `finalize` does, but return a tensor that nobody else has.

        For a part whose library allocates its results: where the caller named no `out`, that spares
        a copy. Only of parts with `makes_output`.
        """
        need = "a part that makes its output"
        raise UnsupportedError("combined", got=type(self).__name__, need=need)


class PermuteExpertsUnpermute(Judged, ABC):
    """Permute, GEMM 1, activation, GEMM 2, unpermute; possibly weight and reduce."""

    requires: ClassVar[ExpertsRequirements]
    # The part of stages that this one, fused, must equal: the harness compares the two.
    twin: ClassVar["type[PermuteExpertsUnpermute] | None"] = None

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    @classmethod
    def tunable(cls, problem: Problem) -> Tunable | None:
        """Return the launches as a search space for `mk tune`; None if nothing is to choose."""
        return None

    @property
    def activation_formats(self) -> tuple[ActivationFormat, ActivationFormat]:
        """Input and output format."""
        return self.requires.activation_format, self.requires.activation_format

    def supports_chunking(self) -> bool:
        """Tell whether a call may be split along its tokens."""
        return self.requires.chunking

    def supports_expert_map(self) -> bool:
        """Tell whether `apply` understands ExpertWeights.expert_map."""
        return self.requires.expert_map

    def takes_unquantized(self, shape: DispatchShape) -> bool:
        """Tell whether these experts may quantize a dispatch of at most `shape` themselves.

        It then comes unquantized. `apply` must also take it quantized unless `requires` says so.
        """
        return self.requires.quantizes_input

    @abstractmethod
    def workspace_shapes(self, shape: DispatchShape) -> WorkspaceShapes:
        """Return the buffers and output for a dispatch of at most `shape`; monotone in it."""

    @abstractmethod
    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        """Return what finalize has to apply to the output; NoOp if nothing is left to do."""

    def prepared_specs(self) -> Mapping[str, BufferSpec]:
        """Return what `prepare` makes of weights, by fields of ExpertWeights (prepared.MADE_OF)."""
        return {}

    def prepare(self, weights: ExpertWeights, out: Mapping[str, torch.Tensor]) -> None:
        """Write every element of `out`, of the tensors that `prepared_specs` declares.

        weights: checked, and read only. `apply` then finds `out` among its weights, and must give
        as right an output without it: the bits may be others.
        """

    def roundings(self, x_TH: torch.Tensor, weights: ExpertWeights) -> Roundings | None:
        """Return where a call of these tensors rounds; None if the part does not say.

        x_TH: (T, H) tokens of one call, or of one chunk of it. What is declared is proven by
        `mk test`: with a rounding more, or less, values differ from the declared recipe's.
        """
        return None

    def is_overridden(self) -> bool:
        """Return whether launches are overridden in the current context, a `with` block of tiles.

        A call inside allocates its own workspace: those that calls share were sized without it.
        """
        return False

    def path_of(self, x_TH: torch.Tensor, weights: ExpertWeights) -> str:
        """Return the name of the path that a call of these tensors takes through this part.

        x_TH: (T, H) tokens of one call, or of one chunk of it. Of a part with one path "". A part
        with several calls `path_log.entered` where it takes one: `mk test` compares the paths that
        its cases enter with those that can be reached.
        """
        return ""

    @abstractmethod
    def apply(
        self,
        tokens: Dispatched,
        *,
        weights: ExpertWeights,
        workspace: Workspace,
        output: torch.Tensor,
    ) -> None:
        """Write `output`, of the declared shape for this dispatch; inputs are read only.

        Never called with zero rows. Rows of skipped pairs are as `requires.invalid_rows` says.
        If the part declares inplace, `output` may be the memory of `tokens`: then nothing is
        written to it before the last token was read.
        """


class PickledByProblem:
    """Pickles and copies an experts part as its class and problem.

    For parts whose constructor binds kernels or a library, which cannot be pickled. A subclass with
    a constructor of other arguments, or more state, overrides `__reduce__`.
    """

    problem: Problem

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.problem,)


class Call:
    """What one call of a kernel owns besides the caller's tensors.

    workspace: the buffers declared by both parts. invalid_ids: int32 (1,) counter of ids outside
    [-1, E), shared by all calls of a kernel and only ever added to. defer_quant: dispatch
    activations unquantized, because these experts quantize them themselves. pairing: the names of
    the kernel's parts, which ranks that take part in one call must have in common. told: set by a
    part as soon as other ranks may know of the call.
    """

    __slots__ = ("defer_quant", "invalid_ids", "pairing", "told", "workspace")

    def __init__(
        self,
        workspace: Workspace,
        invalid_ids: torch.Tensor,
        *,
        defer_quant: bool = False,
        pairing: str = "",
    ) -> None:
        self.workspace = workspace
        self.invalid_ids = invalid_ids
        self.defer_quant = defer_quant
        self.pairing = pairing
        self.told = False
