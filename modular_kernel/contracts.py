"""Abstract interfaces of the parts that form a fused MoE layer.

    PrepareAndFinalize.prepare -> PermuteExpertsUnpermute.apply -> PrepareAndFinalize.finalize

The class body of a part declares its capabilities (`requires = ...`), its constructor binds kernels
or a vendor library, and its methods compute. A part keeps no state on `self` between prepare and
finalize. The handle carries the state of a call, so that two batches may be in flight.

`replayable = True` in a part's own class body promises that all device work of a call is launched
through `modular_kernel.replay.launch`, and that the launches depend only on shapes, strides, dtypes
and alignment. A plan then replays the launches without calling the part. Torch operations and
interpreted Triton kernels are detected and are not replayed; launches by other libraries are not
detected. A part over ranks passes its collectives to
`modular_kernel.replay.recording.run_in_replays`.
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

# Launch configurations of one part. Only the part's Tunable interprets them.
Choice = Hashable


@dataclass(frozen=True)
class StageTimes:
    """Time of one call, and of each of its stages (`Tunable.stages`), in seconds."""

    seconds: float
    stages: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TunedChoice:
    """The fastest choice for one token count.

    seconds: time of a call with the choice.
    untuned_seconds: time of a call with the untuned choice; None if it could not be timed.
    """

    choice: Choice
    seconds: float
    untuned_seconds: float | None


class Tunable(ABC):
    """Search space of launch configurations of one part, for one problem and any token count.

    A choice is active inside `using(choice)`, in the current thread. Kernels and plans must be
    created and called there.

    Tuning has two steps. First, every candidate is compiled and screened: its output is checked,
    and the stages of a few calls are timed. From these times, the part selects a few finalists. A
    finalist may combine the stages of different candidates, which does not compile anything new.
    Second, whole calls of the finalists are timed against the untuned choice.
    """

    stages: tuple[str, ...] = ()

    def for_prepared_weights(self, device_name: str | None = None) -> "Tunable | None":
        """Return the search space for calls with prepared weights, which is tuned separately.

        Returns None if the part does not prepare weights.

        device_name: GPU for which `explain` describes launches; None means this machine's GPU.
        """
        return None

    @abstractmethod
    def untuned(self, tokens: int) -> Choice:
        """Return the choice that the part uses without tuned configurations."""

    @abstractmethod
    def candidates(self, tokens: int) -> Sequence[Choice]:
        """Return distinct choices to try, most promising first."""

    @abstractmethod
    def finalists(self, tokens: int, times: Mapping[Choice, StageTimes]) -> Sequence[Choice]:
        """Return a few choices that should be fastest, given the times of the first step.

        times: times of the candidates and of the untuned choice. Candidates that failed, or that
            were skipped for lack of time, are missing.
        """

    @abstractmethod
    def using(self, choice: Choice) -> AbstractContextManager[None]:
        """Return a context manager that makes calls use `choice`, for every token count."""

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
        """Write `best` atomically to the file that the part reads from `folder`.

        best: the fastest choice for each token count.
        """

    @abstractmethod
    def explain(self, tokens: int, device_name: str | None = None) -> str:
        """Describe which launch configuration is used, where it comes from, and why it is used.

        device_name: name of a GPU; None means this machine.
        """


Receiver = Callable[[], tuple[Dispatched, Handle]]  # waits for the dispatch of one call


@dataclass(frozen=True)
class PathInfo:
    """A path of an experts part, that is, one of several implementations in the same part.

    name: name of the path.
    origin: the package that provides it.
    error: why it cannot be used; "" if it can.
    """

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
        """Return a rejection for each violated rule that `requires` cannot express.

        Such a rule applies only to this part, and its name begins with the name of the part.
        """
        return ()

    @classmethod
    def explained(cls, problem: Problem) -> tuple[str, ...]:
        """Return lines of text that say which implementation calls of `problem` use."""
        return ()

    @classmethod
    def described(cls, machine: Machine) -> AbstractContextManager[None]:
        """Return a context manager in which launches are chosen as if running on `machine`.

        The context manager affects only the current thread.
        """
        return nullcontext()

    @classmethod
    def meta_calls(cls) -> Mapping[str, Callable[[], object]]:
        """Return functions that call kernels with meta tensors, by name, for `mk compile`.

        The functions cover the kernels that a single-rank layer does not launch.
        """
        return {}

    @classmethod
    def operation_cases(cls) -> Mapping[str, Callable[[], Mapping[str, torch.Tensor]]]:
        """Return calls of the part's own operations on the CPU, by name, for `mk test`.

        Each call makes its inputs, runs operations that have a kernel and a torch reference, and
        returns the tensors that the operations wrote. Kernels and references must write the same
        bits. A call raises AssertionError if it detects a wrong result.
        """
        return {}


class PrepareAndFinalize(PartDeclarations, ABC):
    """Quantizes and dispatches tokens before the experts, and combines the rows after them.

    problem: the problem of the layer.
    group: the process group of a multi-rank layer.
    """

    requires: ClassVar[PrepareFinalizeRequirements]
    # Whether the part owns the buffer of the experts' output, for example if other ranks read it.
    keeps_expert_output: ClassVar[bool] = False
    # Whether the part can allocate the output of the layer (`finalize_to_new_tensor`).
    allocates_output: ClassVar[bool] = False
    # Whether `prepare` is faster than `prepare_no_receive` followed by a call of its receiver.
    prepares_at_once: ClassVar[bool] = False
    # In the batched format, the number of rows per expert is a multiple of this number.
    # `round_capacity` sets it.
    capacity_multiple: int = 1

    def __init__(self, problem: Problem, group: object | None = None) -> None:
        self.problem = problem
        self.group = group

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle or copy.

        Raises UnsupportedError if the part has a process group, because connections to other ranks
        belong to the process that opened them.
        """
        if self.group is not None or self.problem.parallel.world_size > 1:
            got = "a part that has a process group"
            need = "a part without a process group; construct the part in each process"
            raise UnsupportedError(f"pickle or copy of {type(self).__name__}", got=got, need=need)
        return self.__dict__

    def round_capacity(self, multiple: int) -> None:
        """Round each expert's capacity to a multiple of `multiple`.

        If `requires.rounds_capacity`, this is called when a kernel is composed, before any buffer
        is sized.
        """
        self.capacity_multiple = math.lcm(self.capacity_multiple, multiple)

    def padded_capacity(self, rows: int) -> int:
        """Return `rows` rounded up to a multiple of `capacity_multiple`."""
        return -(-rows // self.capacity_multiple) * self.capacity_multiple

    def check_machine(self, machine: Machine) -> None:  # a no-op unless overridden
        """Raise InputError if the part, for example its process group, cannot run on `machine`."""

    def destroy(self) -> None:  # a no-op unless overridden
        """Free resources that are shared with other ranks. Every rank must call this method.

        The part cannot be used afterwards.
        """

    @property
    def activation_format(self) -> ActivationFormat:
        """The activation format that prepare returns and finalize accepts."""
        return self.requires.activation_format

    def topk_indices_dtype(self) -> torch.dtype | None:
        """Return the only dtype of top-k ids that is accepted, or None for int32 and int64.

        If Problem.ids_dtype is not set, ids of another dtype raise DtypeError. If both dtypes are
        accepted, the part converts ids to the dtype that its library needs.
        """
        return self.requires.topk_indices_dtype

    def max_num_tokens_per_rank(self) -> int | None:
        """Return the maximum number of tokens of a call, or None if only problem.tokens limits it.

        A call with more tokens raises CapacityError.
        """
        return self.requires.max_tokens

    def may_replay(self) -> bool:
        """Return whether calls of this instance may be replayed, if its class is `replayable`."""
        return True

    def may_record(self) -> bool:
        """Return whether the next call may be recorded, if `may_replay`.

        A call must not be recorded if it does work that replays do not repeat, such as an agreement
        between ranks.
        """
        return True

    def compares_calls(self) -> bool:
        """Return whether ranks compare every call, with its `same_on_ranks`, before they send rows.

        If True, CallState.same_on_ranks must be compared. Ranks that pass different values raise
        CommunicationError, and remain usable.
        """
        return self.problem.parallel.world_size == 1  # there is nothing to compare

    def sharable_group(self) -> object | None:
        """Return the `group` with which another part of this class shares this part's connections.

        The part that is created first closes the connections in `destroy`.
        """
        return self.group

    def num_dispatchers(self) -> int:
        """Return the number of ranks that may send tokens to this rank."""
        return self.problem.parallel.world_size

    def has_prepare_no_receive(self) -> bool:
        """Return whether `prepare_no_receive` is implemented."""
        return self.requires.asynchronous

    @abstractmethod
    def dispatch_shape(self, tokens: int) -> DispatchShape:
        """Return the largest dispatch that this rank may receive in a call of `tokens` tokens.

        Other ranks may pass up to problem.tokens tokens in the same call.
        """

    @abstractmethod
    def workspace_shapes(self, tokens: int) -> Mapping[str, BufferSpec]:
        """Return the workspace buffers of prepare and finalize, by name."""

    @abstractmethod
    def prepare(
        self, x_TH: torch.Tensor, routing: Routing, *, weights: ExpertWeights, call: "CallState"
    ) -> tuple[Dispatched, Handle]:
        """Quantize and dispatch x_TH. Returns (dispatched tokens, handle for finalize).

        x_TH: (T, H), which must not be modified. T may be 0.
        weights: only expert_map and the static input scales may be read.
        call: state of the call.
        """

    def prepare_no_receive(
        self, x_TH: torch.Tensor, routing: Routing, *, weights: ExpertWeights, call: "CallState"
    ) -> Receiver:
        """Start `prepare`. Returns a function that waits for the dispatch and returns its result.

        Raises UnsupportedError unless `requires.asynchronous` is True.
        """
        name = type(self).__name__
        need = "a part with requires.asynchronous = True"
        raise UnsupportedError("prepare_no_receive", got=name, need=need)

    def expert_output(self, handle: Handle) -> torch.Tensor:
        """Return the buffer that this call's experts write to, if `keeps_expert_output` is True."""
        name = type(self).__name__
        need = "a part with keeps_expert_output = True"
        raise UnsupportedError("expert_output", got=name, need=need)

    def refuse(self, error: Exception) -> None:  # a no-op in single-rank parts
        """Notify the other ranks, without waiting, that this rank refuses its call with `error`.

        This method is called before the call has exchanged anything. The other ranks raise
        CommunicationError, and all ranks remain usable.
        """

    def abandon(self, error: Exception) -> None:  # a no-op in single-rank parts
        """Shut down, and notify the other ranks that a started call failed with `error`.

        A CommunicationError is not reported, because all ranks detect it.
        """

    def check(self) -> None:  # a no-op in parts whose calls raise their own errors
        """Synchronize, and raise the errors that calls have detected on the device."""

    @abstractmethod
    def finalize(
        self,
        expert_output: torch.Tensor,
        *,
        handle: Handle,
        reduce: TopKWeightAndReduce,
        out: torch.Tensor,
    ) -> None:
        """Combine the experts' output, and write the result to `out`, (T, H) or (T, K, H).

        handle: the handle from `prepare` of the same call.
        reduce: the reduction to apply. If its kind is DELEGATE, the part applies its own reduction.
        """

    def finalize_to_new_tensor(
        self, expert_output: torch.Tensor, *, handle: Handle, reduce: TopKWeightAndReduce
    ) -> torch.Tensor:
        """Combine like `finalize`, but return a newly allocated tensor.

        If `allocates_output` is True and the caller does not pass `out`, this method is called
        instead of `finalize`, which avoids a copy for libraries that allocate their results.
        """
        need = "a part with allocates_output = True"
        raise UnsupportedError("finalize_to_new_tensor", got=type(self).__name__, need=need)


class PermuteExpertsUnpermute(PartDeclarations, ABC):
    """Computes the experts: permute, GEMM 1, activation, GEMM 2, unpermute.

    Some experts also apply the router weights and sum over top-k.
    """

    requires: ClassVar[ExpertsRequirements]
    # The staged part that this fused part replaces. The test harness verifies that the results of
    # both are equal.
    unfused: ClassVar["type[PermuteExpertsUnpermute] | None"] = None

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    @staticmethod
    def load_library() -> Any:
        """Import the optional library whose kernels the part calls, and return its module.

        Return None for a part without such a library. Raises ConfigurationError if the library
        cannot be loaded.
        """
        return None

    @classmethod
    def tunable(cls, problem: Problem) -> Tunable | None:
        """Return the search space for `mk tune`, or None if there is nothing to tune."""
        return None

    @classmethod
    def paths(cls) -> tuple[PathInfo, ...]:
        """Return the part's paths, for `mk list`; () for a part with a single path.

        Paths from other packages are included, even if they cannot be used.
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
        """Return whether the experts should quantize a dispatch of at most `shape` themselves.

        If so, the dispatch is not quantized. `apply` must also accept quantized input, unless
        `requires.quantizes_input` is True.
        """
        return self.requires.quantizes_input

    @abstractmethod
    def workspace_shapes(self, shape: DispatchShape) -> WorkspaceShapes:
        """Return the buffers and the output for a dispatch of at most `shape`.

        A larger `shape` must not need smaller buffers.
        """

    @abstractmethod
    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        """Return the reduction that finalize must apply to the output of the experts."""

    def prepared_specs(self) -> Mapping[str, BufferSpec]:
        """Return the specs of the tensors that `prepare` derives, by field of ExpertWeights."""
        return {}

    def prepare(self, weights: ExpertWeights, out: Mapping[str, torch.Tensor]) -> None:
        """Derive prepared tensors from weights.

        `apply` then gets the prepared tensors in its `weights`. Without prepared tensors, its
        output must be as accurate, but need not be bitwise equal.

        weights: checked weights, which must not be modified.
        out: the tensors that `prepared_specs` declares. `prepare` must write every element.
        """

    def roundings(self, x_TH: torch.Tensor, weights: ExpertWeights) -> Roundings | None:
        """Return which values a call with these tensors rounds, or None to declare nothing.

        `mk test` verifies the declaration.

        x_TH: (T, H) tokens of a call, or of a chunk of a call.
        """
        return None

    def is_overridden(self) -> bool:
        """Return whether a `with` block currently overrides the launch configurations.

        Calls in such a block allocate their own workspaces, because shared workspaces were sized
        without the override.
        """
        return False

    def path_name(self, x_TH: torch.Tensor, weights: ExpertWeights) -> str:
        """Return the name of the path that a call with these tensors takes; "" for a single path.

        A part with several paths also calls `path_log.log_path` on each path. `mk test` compares
        the paths that its cases take with the paths that can be taken.

        x_TH: (T, H) tokens of a call, or of a chunk of a call.
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
        """Compute the experts, and write `output`, whose shape `workspace_shapes` declares.

        Inputs must not be modified. `apply` is never called with zero rows. `requires.invalid_rows`
        defines the content of rows of skipped pairs. If `requires.inplace` is True, `output` may
        share the memory of `tokens`. In this case, `output` must be written only after the last
        token has been read.
        """


class PickledByProblem:
    """Mixin that pickles and copies an experts part as its class and problem.

    Use it for parts that cannot be pickled because their constructors bind kernels or a library. A
    subclass with other constructor arguments, or with more state, must override `__reduce__`.
    """

    problem: Problem

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.problem,)


class CallState:
    """State of one kernel call, in addition to the caller's tensors.

    workspace: the buffers that both parts declare.
    invalid_ids: (1,) int32, number of ids outside [-1, E). All calls of a kernel share this tensor,
        and only increment it.
    defer_quant: whether to dispatch unquantized activations, because the experts quantize them.
    pairing: names of the kernel's parts, which must be the same on all ranks.
    same_on_ranks: text that must also be the same on all ranks, such as the fingerprint of loaded
        adapters (`LoRAManager.fingerprint`). It is compared if the part `compares_calls`.
    peers_notified: whether other ranks may know of the call; set by the part.
    """

    __slots__ = (
        "defer_quant",
        "invalid_ids",
        "pairing",
        "peers_notified",
        "same_on_ranks",
        "workspace",
    )

    def __init__(
        self,
        workspace: Workspace,
        invalid_ids: torch.Tensor,
        *,
        defer_quant: bool = False,
        pairing: str = "",
        same_on_ranks: str = "",
    ) -> None:
        self.workspace = workspace
        self.invalid_ids = invalid_ids
        self.defer_quant = defer_quant
        self.pairing = pairing
        self.same_on_ranks = same_on_ranks
        self.peers_notified = False
