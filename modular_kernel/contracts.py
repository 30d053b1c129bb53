"""Abstract interfaces of the three parts that form a fused MoE layer.

    PrepareAndFinalize.prepare -> PermuteExpertsUnpermute.apply -> PrepareAndFinalize.finalize

The class body of a part declares its capabilities (`requires = ...`), its constructor binds kernels
or a vendor library, and its methods compute. No state is kept on `self` between prepare and
finalize; the handle carries it, so two batches may be in flight.

`replayable = True` in a part's own class body promises that all device work of a call is launched
through `modular_kernel.replay.launch`, and that the launches depend only on shapes, strides, dtypes
and alignment. A plan then replays them without calling the part. Torch operations and interpreted
Triton kernels are detected and not replayed; launches by other libraries are not detected. A part
over ranks passes its collectives to `modular_kernel.replay.recording.repeat_in_replays`.
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

Choice = Hashable  # the launch configurations of a part; only its Tunable knows their type


@dataclass(frozen=True)
class StageTimes:
    """Time of one call and of its stages (those in `Tunable.stages`), in seconds."""

    seconds: float
    stages: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TunedChoice:
    """The fastest choice for one token count.

    untuned_seconds: time of the untuned choice; None if it could not be timed.
    """

    choice: Choice
    seconds: float
    untuned_seconds: float | None


class Tunable(ABC):
    """Search space over the launches of one part, for one problem and any token count.

    A choice is active inside `using(choice)`, in the current thread. Kernels and plans must be made
    and called there.

    Tuning has two steps. First, every candidate is compiled and screened: its output is checked,
    and a few calls are timed by stage. From those times the part selects a few finalists, which may
    combine the stages of different candidates, so that nothing new is compiled. Whole calls of the
    finalists are then timed against the untuned choice.
    """

    stages: tuple[str, ...] = ()

    def for_prepared_weights(self, device_name: str | None = None) -> "Tunable | None":
        """Return the search space for calls with prepared weights, which is tuned separately.

        None if these experts prepare no weights. device_name: a GPU whose choices the result can
        explain; None means this machine's.
        """
        return None

    @abstractmethod
    def untuned(self, tokens: int) -> Choice:
        """Return the choice that the part uses when nothing was tuned."""

    @abstractmethod
    def candidates(self, tokens: int) -> Sequence[Choice]:
        """Return distinct choices to try, most promising first."""

    @abstractmethod
    def finalists(self, tokens: int, times: Mapping[Choice, StageTimes]) -> Sequence[Choice]:
        """Return the few choices with the best measured times.

        times: times of the candidates and of the untuned choice. Candidates that failed or were
        skipped for lack of time are missing.
        """

    @abstractmethod
    def using(self, choice: Choice) -> AbstractContextManager[None]:
        """Use `choice` inside the block, for every token count."""

    @abstractmethod
    def as_json(self, choice: Choice) -> Mapping[str, object]:
        """Return `choice` as JSON-serializable data."""

    @abstractmethod
    def saved(self, folder: Path) -> Mapping[int, TunedChoice]:
        """Read earlier results for this problem from `folder`, by token count; empty if none.

        Raises ConfigurationError if the stored results cannot be extended.
        """

    @abstractmethod
    def save(self, best: Mapping[int, TunedChoice], folder: Path) -> Path:
        """Write all of `best` atomically to the file that the part reads from `folder`."""

    @abstractmethod
    def explain(self, tokens: int, device_name: str | None = None) -> str:
        """Describe the launch, its source and the reason, for this machine or the named GPU."""


Receiver = Callable[[], tuple[Dispatched, Handle]]  # waits for the dispatch of one call


@dataclass(frozen=True)
class PathInfo:
    """A path of an experts part. origin: the package it comes from. error: why it is unusable."""

    name: str
    origin: str
    error: str = ""


class TopKWeightAndReduce(ABC):
    """Applies router weights and the routed scaling factor, and sums over top-k."""

    kind: ClassVar[Reduce | None]  # None: keeps the top-k dimension

    @abstractmethod
    def apply(self, rows: ExpertRows, out: torch.Tensor) -> None:
        """Write every element of `out`, (T, H) or (T, K, H) in the problem's dtype.

        `out` may be the same tensor as `rows.rows`, for an in-place reduction.
        """


class PartDeclarations:
    """Declarations of PrepareAndFinalize and experts parts, available before construction."""

    replayable: ClassVar[bool] = False

    @classmethod
    def extra_rejections(cls, problem: Problem, machine: Machine) -> tuple[Rejection, ...]:
        """Return rejections by rules that `requires` cannot express.

        Each rule applies to this part alone and is named after it.
        """
        return ()

    @classmethod
    def explained(cls, problem: Problem) -> tuple[str, ...]:
        """Return lines that describe which implementation each call of `problem` uses, if any."""
        return ()

    @classmethod
    def described(cls, machine: Machine) -> AbstractContextManager[None]:
        """Inside the block, in this thread, choose launches as if running on `machine`."""
        return nullcontext()

    @classmethod
    def meta_calls(cls) -> Mapping[str, Callable[[], object]]:
        """Return named calls with meta tensors, for `mk compile`.

        They launch the kernels that a single-rank layer does not reach.
        """
        return {}


class PrepareAndFinalize(PartDeclarations, ABC):
    """Quantizes and dispatches before the experts, and combines after them.

    problem: the problem of the layer. group: the process group of a multi-rank layer.
    """

    requires: ClassVar[PrepareFinalizeRequirements]
    keeps_expert_output: ClassVar[bool] = False  # e.g. in memory that other ranks read
    allocates_output: ClassVar[bool] = False  # see `combined`
    # `prepare` is cheaper than `prepare_no_receive` followed by its receiver.
    prepares_at_once: ClassVar[bool] = False
    capacity_multiple: int = 1  # of rows per expert (batched), if `requires.rounds_capacity`

    def __init__(self, problem: Problem, group: object | None = None) -> None:
        self.problem = problem
        self.group = group

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle and copy.

        Raises UnsupportedError if the part has a process group: connections to other ranks belong
        to the process that opened them.
        """
        if self.group is not None or self.problem.parallel.world_size > 1:
            got = "a part that holds a process group"
            need = "a part constructed in each process with that process's group"
            raise UnsupportedError(f"pickle or copy of {type(self).__name__}", got=got, need=need)
        return self.__dict__

    def round_capacity(self, multiple: int) -> None:
        """Round each expert's capacity to a multiple of `multiple`.

        Called when a kernel is composed, before any buffer is sized, if `requires.rounds_capacity`.
        """
        self.capacity_multiple = math.lcm(self.capacity_multiple, multiple)

    def rounded(self, rows: int) -> int:
        """Return `rows` rounded up to the capacity multiple."""
        return -(-rows // self.capacity_multiple) * self.capacity_multiple

    def check_machine(self, machine: Machine) -> None:  # a no-op unless overridden
        """Raise InputError if the part (for example its process group) cannot run on `machine`."""

    def destroy(self) -> None:  # a no-op unless overridden
        """Free the process group's resources, on all ranks. The part is unusable afterwards."""

    @property
    def activation_format(self) -> ActivationFormat:
        """The activation format that prepare returns and finalize accepts."""
        return self.requires.activation_format

    def topk_indices_dtype(self) -> torch.dtype | None:
        """Return the dtype required of top-k ids; None if int32 and int64 are both accepted.

        It applies where Problem.ids_dtype is unset; another dtype raises DtypeError. If both are
        accepted, the part converts ids as its library needs.
        """
        return self.requires.topk_indices_dtype

    def max_num_tokens_per_rank(self) -> int | None:
        """Return the maximum number of tokens of one call; more raise CapacityError.

        None if only the kernel's own problem.tokens limits a call.
        """
        return self.requires.max_tokens

    def may_replay(self) -> bool:
        """Return whether calls of this instance may be replayed, if its class is `replayable`."""
        return True

    def may_record(self) -> bool:
        """Return whether the next call may be recorded, if `may_replay`.

        It may not if it does work that its replays do not repeat, such as an agreement of ranks.
        """
        return True

    def num_dispatchers(self) -> int:
        """Return the number of ranks that may send tokens to this one."""
        return self.problem.parallel.world_size

    def has_prepare_no_receive(self) -> bool:
        """Return whether `prepare_no_receive` is implemented."""
        return self.requires.asynchronous

    @abstractmethod
    def dispatch_shape(self, tokens: int) -> DispatchShape:
        """Return the largest dispatch that this rank may receive in a call of `tokens` tokens.

        Other ranks may pass up to problem.tokens in that call.
        """

    @abstractmethod
    def workspace_shapes(self, tokens: int) -> Mapping[str, BufferSpec]:
        """Return the workspace buffers of prepare and finalize, by name."""

    @abstractmethod
    def prepare(
        self, x_TH: torch.Tensor, routing: Routing, *, weights: ExpertWeights, call: "Call"
    ) -> tuple[Dispatched, Handle]:
        """Quantize and dispatch x_TH (T, H), which is read only. T may be 0.

        Only expert_map and the static input scales may be read from `weights`.
        """

    def prepare_no_receive(
        self, x_TH: torch.Tensor, routing: Routing, *, weights: ExpertWeights, call: "Call"
    ) -> Receiver:
        """Start `prepare` and return its receiver.

        Raises UnsupportedError unless the part is declared asynchronous.
        """
        name = type(self).__name__
        raise UnsupportedError("prepare_no_receive", got=name, need="a part declared asynchronous")

    def expert_output(self, handle: Handle) -> torch.Tensor:
        """Return the buffer that this call's experts write, if `keeps_expert_output`."""
        name = type(self).__name__
        need = "a part that keeps the experts' output"
        raise UnsupportedError("expert_output", got=name, need=need)

    def refuse(self, error: Exception) -> None:  # a no-op in single-rank parts
        """Notify the other ranks, without waiting, that this rank refuses its call with `error`.

        Called before the call has exchanged anything. The other ranks raise CommunicationError, and
        all ranks stay usable.
        """

    def abandon(self, error: Exception) -> None:  # a no-op in single-rank parts
        """Shut down, and notify the other ranks that a started call failed with `error`.

        Not called for a CommunicationError, which all ranks detect.
        """

    def check(self) -> None:  # a no-op in parts that raise synchronously
        """Synchronize, and raise device-side errors of calls that have already returned."""

    @abstractmethod
    def finalize(
        self,
        expert_output: torch.Tensor,
        *,
        handle: Handle,
        reduce: TopKWeightAndReduce,
        out: torch.Tensor,
    ) -> None:
        """Combine into `out`, (T, H) or (T, K, H), applying `reduce`.

        A part applies its own reduction if `reduce` delegates. `handle` must come from the prepare
        of the same call.
        """

    def combined(
        self, expert_output: torch.Tensor, *, handle: Handle, reduce: TopKWeightAndReduce
    ) -> torch.Tensor:
        """Combine as `finalize` does, but return a newly allocated tensor.

        Called for parts with `allocates_output`, whose library allocates its results, if the caller
        passes no `out`. This saves a copy.
        """
        need = "a part that allocates its output"
        raise UnsupportedError("combined", got=type(self).__name__, need=need)


class PermuteExpertsUnpermute(PartDeclarations, ABC):
    """Permute, GEMM 1, activation, GEMM 2, unpermute; optionally weight and reduce."""

    requires: ClassVar[ExpertsRequirements]
    # The staged part that this fused part must match; the test harness compares the two.
    unfused: ClassVar["type[PermuteExpertsUnpermute] | None"] = None

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    @classmethod
    def tunable(cls, problem: Problem) -> Tunable | None:
        """Return the launch search space for `mk tune`; None if there is nothing to tune."""
        return None

    @classmethod
    def paths(cls) -> tuple[PathInfo, ...]:
        """Return the paths from tokens to output, for `mk list`; () for a part with a single path.

        Paths of other packages are included, also those that cannot be used.
        """
        return ()

    @property
    def activation_formats(self) -> tuple[ActivationFormat, ActivationFormat]:
        """Input and output activation formats."""
        return self.requires.activation_format, self.requires.activation_format

    def supports_chunking(self) -> bool:
        """Return whether a call may be split along its tokens."""
        return self.requires.chunking

    def supports_expert_map(self) -> bool:
        """Return whether `apply` supports ExpertWeights.expert_map."""
        return self.requires.expert_map

    def takes_unquantized(self, shape: DispatchShape) -> bool:
        """Return whether these experts may quantize a dispatch of at most `shape` themselves.

        The dispatch is then unquantized. `apply` must also accept quantized input, unless
        `requires.quantizes_input` is set.
        """
        return self.requires.quantizes_input

    @abstractmethod
    def workspace_shapes(self, shape: DispatchShape) -> WorkspaceShapes:
        """Return buffers and output for a dispatch of at most `shape`; monotone in `shape`."""

    @abstractmethod
    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        """Return the reduction that finalize must apply to the output; NoOp if none is left."""

    def prepared_specs(self) -> Mapping[str, BufferSpec]:
        """Return specs of what `prepare` derives from weights, by ExpertWeights field."""
        return {}

    def prepare(self, weights: ExpertWeights, out: Mapping[str, torch.Tensor]) -> None:
        """Derive prepared weights: write every element of `out`, as `prepared_specs` declares.

        weights: checked, and read only. `apply` then receives `out` in its weights. Its output
        without them must be as accurate, but may differ bitwise.
        """

    def roundings(self, x_TH: torch.Tensor, weights: ExpertWeights) -> Roundings | None:
        """Return the values that a call with these tensors rounds; None if this is not declared.

        x_TH: (T, H) tokens of one call, or of one chunk of it. `mk test` verifies the declaration:
        an additional or missing rounding changes the output.
        """
        return None

    def is_overridden(self) -> bool:
        """Return whether a `with` block currently overrides the launches (tiles).

        Calls inside such a block allocate their own workspace, because shared workspaces were sized
        without the override.
        """
        return False

    def path_name(self, x_TH: torch.Tensor, weights: ExpertWeights) -> str:
        """Return the name of the path that a call with these tensors takes; "" for a single path.

        x_TH: (T, H) tokens of one call, or of one chunk of it. A part with several paths calls
        `path_log.log_path` on each; `mk test` compares the paths its cases enter with the reachable
        ones.
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
        """Write `output`, of the shape declared for this dispatch. Inputs are read only.

        Never called with zero rows. `requires.invalid_rows` defines the rows of skipped pairs. If
        the part declares inplace, `output` may alias the memory of `tokens`; it may then be written
        only after the last token was read.
        """


class PickledByProblem:
    """Mixin that pickles and copies an experts part as its class and problem.

    For parts whose constructor binds kernels or a library, which cannot be pickled. A subclass with
    other constructor arguments, or with more state, overrides `__reduce__`.
    """

    problem: Problem

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.problem,)


class Call:
    """State of one kernel call besides the caller's tensors.

    workspace: buffers declared by both parts. invalid_ids: int32 (1,) count of ids outside [-1, E),
    shared by all calls of a kernel and only incremented. defer_quant: dispatch activations
    unquantized, because the experts quantize them. pairing: names of the kernel's parts, which must
    agree across ranks. peers_notified: set by a part once other ranks may have learned of the call.
    """

    __slots__ = ("defer_quant", "invalid_ids", "pairing", "peers_notified", "workspace")

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
        self.peers_notified = False
