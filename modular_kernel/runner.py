"""Registries of the stages and fused operations of MoE runner backends, with SGLang's names.

A backend has three stages: pre-permute makes the input of the core, the core runs the two GEMMs,
and post-permute writes the output.

    @register_core("toy")
    class ToyCore(MoeRunnerCore[ToyState]): ...
    @register_pre_permute("standard", "toy")
    def standard_to_toy(call: RunnerCall[ToyState]) -> ToyInput: ...
    @register_post_permute("toy", "standard")
    def toy_to_standard(result: ToyOutput, call: RunnerCall[ToyState]) -> None: ...

`experts.staged.make_experts("ToyExperts", "toy", "standard", ...)` builds an experts part from the
stages. A fused operation computes all three stages at once, and names the staged part that it
replaces (`unfused`). The test harness verifies that the results of both are equal.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch

from modular_kernel.contracts import PermuteExpertsUnpermute
from modular_kernel.errors import ConfigurationError, DuplicatePartError, UnknownPartError
from modular_kernel.spec.problem import ActivationFormat, Problem
from modular_kernel.tensors import Dispatched, DispatchShape, ExpertWeights
from modular_kernel.utils.argument_checks import expect, format_value
from modular_kernel.workspace import BufferSpec, Workspace

# The activation format of each dispatch format, under the names that SGLang and vLLM use. In
# "deepep_normal", rows have local expert ids; in "deepep_ll", they are grouped by expert.
FORMATS: Mapping[str, ActivationFormat] = {
    "standard": ActivationFormat.STANDARD,
    "deepep_normal": ActivationFormat.STANDARD,
    "deepep_ll": ActivationFormat.BATCHED_EXPERTS,
    "batched_experts": ActivationFormat.BATCHED_EXPERTS,
}

Key = tuple[str, str]
S = TypeVar("S")
T = TypeVar("T")


@dataclass
class NoState:
    """State of a backend whose stages share no data."""


@dataclass(frozen=True)
class RunnerCall(Generic[S]):
    """Arguments of one call, which its stages share. Stages must not keep state between calls.

    tokens: the dispatched tokens, which must not be modified.
    weights: weights of the experts.
    problem: the problem that the part was created for.
    workspace: the buffers that the core declares.
    output: the tensor that post-permute writes, in the shape that the part declares.
    state: an instance of the core's `state` type, created for each call.
    """

    tokens: Dispatched
    weights: ExpertWeights
    problem: Problem
    workspace: Workspace
    output: torch.Tensor
    state: S


class RunnerInput(ABC):
    """Input of a backend's core, which its pre-permute returns."""

    @property
    @abstractmethod
    def runner_backend(self) -> str:
        """Name of the backend whose core takes this input."""


class RunnerOutput(ABC):
    """Output of a backend's core, which is passed to its post-permute."""

    @property
    @abstractmethod
    def runner_backend(self) -> str:
        """Name of the backend whose core made this output."""


class MoeRunnerCore(ABC, Generic[S]):
    """Computes the two GEMMs of a backend.

    state: the class of `RunnerCall.state`.
    """

    state: ClassVar[type[Any]] = NoState

    def __init__(self, problem: Problem) -> None:
        """Bind kernels or a library for `problem`."""
        self.problem = problem

    def workspace_shapes(self, shape: DispatchShape) -> Mapping[str, BufferSpec]:
        """Return the workspace buffers of the stages, by name.

        The buffers of a larger `shape` must be at least as large.
        """
        return {}

    @abstractmethod
    def run(self, runner_input: Any, call: RunnerCall[S]) -> RunnerOutput:
        """Run GEMM 1, the activation and GEMM 2. Output rows have the order of input rows."""


PrePermute = Callable[[RunnerCall[Any]], RunnerInput]
PostPermute = Callable[[Any, RunnerCall[Any]], None]
FusedFunction = Callable[[RunnerCall[Any]], None]
Implementation = FusedFunction | type[PermuteExpertsUnpermute]


@dataclass(frozen=True)
class FusedOp:
    """An operation that replaces the three stages of a backend.

    implementation: a function that writes call.output, or an experts part.
    unfused: the staged part that the operation replaces.
    """

    a2a_backend: str
    runner_backend: str
    implementation: Implementation
    unfused: type[PermuteExpertsUnpermute]


@dataclass(frozen=True)
class Stages:
    """The three stages of one backend and dispatch format."""

    backend: str
    format: str
    pre: PrePermute
    core: type[MoeRunnerCore[Any]]
    post: PostPermute


@dataclass(frozen=True)
class UnusedRegistration:
    """A registration that no part can use.

    name: name of the backend, followed by the dispatch format if the registration has one.
    origin: where the registered function or class is defined.
    missing: description of the missing registration.
    """

    name: str
    origin: str
    missing: str


class _Registry(Generic[T]):
    """Values that are registered under pairs of names. A pair can be registered only once.

    kind: kind of the values, for error messages.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.entries: dict[Key, T] = {}
        self._sources: dict[Key, object] = {}

    def add(self, key: Key, value: T, source: object) -> None:
        """Register `value`. Raises DuplicatePartError, with both origins, if the key is registered.

        source: the function or class that defines the value. If its module is imported again, the
            new value replaces the old one.
        """
        for name in key:
            expect(f"{self.kind} name", name, str)
            if not name:
                raise ConfigurationError(f"{self.kind} name", got="''", need="a non-empty string")
        previous = self._sources.get(key)
        if previous is not None and not _is_reimport(previous, source):
            got = f"{format_origin(previous)} and {format_origin(source)}"
            need = "a single registration"
            raise DuplicatePartError(f"{self.kind} {format_key(key)}", got=got, need=need)
        self.entries[key], self._sources[key] = value, source

    def get(self, key: Key) -> T:
        """Return the value of a key. Raises UnknownPartError, which lists the registered keys."""
        value = self.entries.get(key)
        if value is None:
            registered = ", ".join(format_key(known_key) for known_key in sorted(self.entries))
            need = f"one of {registered}" if registered else f"a registered {self.kind}"
            raise UnknownPartError(self.kind, got=format_key(key), need=need)
        return value

    def origin(self, key: Key) -> str:
        """Return where the value of a key is defined."""
        return format_origin(self._sources[key])


class FusedOpPool:
    """Registered fused operations, by (all2all backend, runner backend).

    ops: the operations.
    parts: the parts that were built from the operations.
    """

    def __init__(self) -> None:
        self.ops = _Registry[FusedOp]("fused operation")
        self.parts: dict[Key, type[PermuteExpertsUnpermute]] = {}

    def find_fused_op(self, a2a_backend: str, runner_backend: str) -> FusedOp | None:
        """Return the fused operation of two backends, or None if none is registered."""
        return self.ops.entries.get((a2a_backend, runner_backend))


class PermuteMethodPool:
    """Registered stages.

    pre: pre-permutes by (format, backend).
    post: post-permutes by (backend, format).
    cores: cores by (backend, "core").
    parts: the parts that were built from stages, by (backend, format).
    """

    def __init__(self) -> None:
        self.pre = _Registry[PrePermute]("pre-permute")
        self.post = _Registry[PostPermute]("post-permute")
        self.cores = _Registry[type[MoeRunnerCore[Any]]]("core")
        self.parts: dict[Key, type[PermuteExpertsUnpermute]] = {}

    def get_stages(self, backend: str, format: str) -> Stages:
        """Return the three stages. Raises UnknownPartError if one is missing."""
        check_format(format)
        pre = self.pre.get((format, backend))
        core = self.cores.get((backend, "core"))
        return Stages(backend, format, pre, core, self.post.get((backend, format)))

    def find_unused(self) -> Iterable[UnusedRegistration]:
        """Yield every stage whose counterparts are missing."""
        for format, backend in self.pre.entries:
            name, origin = f"{backend} {format}", self.pre.origin((format, backend))
            if (backend, format) not in self.post.entries:
                yield UnusedRegistration(
                    name, origin, f"a pre-permute without post-permute {backend, format}"
                )
            yield from self._find_missing_core(name, origin, backend)
        for backend, format in self.post.entries:
            name, origin = f"{backend} {format}", self.post.origin((backend, format))
            if (format, backend) not in self.pre.entries:
                yield UnusedRegistration(
                    name, origin, f"a post-permute without pre-permute {format, backend}"
                )
                yield from self._find_missing_core(name, origin, backend)
        with_permutes = {backend for _, backend in self.pre.entries}
        with_permutes |= {backend for backend, _ in self.post.entries}
        for key in self.cores.entries:
            if key[0] not in with_permutes:
                yield UnusedRegistration(
                    key[0], self.cores.origin(key), f"a core without permutes of {key[0]!r}"
                )

    def _find_missing_core(
        self, name: str, origin: str, backend: str
    ) -> Iterable[UnusedRegistration]:
        if (backend, "core") not in self.cores.entries:
            yield UnusedRegistration(name, origin, f"a permute without core {backend!r}")


FUSED = FusedOpPool()
PERMUTES = PermuteMethodPool()


def register_pre_permute(
    dispatch_format: str, runner_backend: str
) -> Callable[[PrePermute], PrePermute]:
    """Return a decorator that registers the function which makes the input of a backend's core.

    dispatch_format: a key of FORMATS.
    """
    check_format(dispatch_format)

    def register(pre: PrePermute) -> PrePermute:
        PERMUTES.pre.add((dispatch_format, runner_backend), pre, pre)
        return pre

    return register


def register_post_permute(
    runner_backend: str, combine_format: str
) -> Callable[[PostPermute], PostPermute]:
    """Return a decorator that registers the function which writes the output of a backend's part.

    combine_format: a key of FORMATS.
    """
    check_format(combine_format)

    def register(post: PostPermute) -> PostPermute:
        PERMUTES.post.add((runner_backend, combine_format), post, post)
        return post

    return register


C = TypeVar("C", bound=type[MoeRunnerCore[Any]])


def register_core(runner_backend: str) -> Callable[[C], C]:
    """Return a decorator that registers the core class of a backend."""

    def register(core: C) -> C:
        _check_class(f"core {runner_backend!r}", core, MoeRunnerCore)
        PERMUTES.cores.add((runner_backend, "core"), core, core)
        return core

    return register


F = TypeVar("F", bound=Implementation)


def register_fused_func(
    a2a_backend: str, runner_backend: str, *, unfused: type[PermuteExpertsUnpermute]
) -> Callable[[F], F]:
    """Return a decorator that registers an operation which replaces the stages of `unfused`.

    The operation is a function that takes a RunnerCall and writes call.output, or an experts part
    with the same requirements as `unfused`. It is used for tokens that `a2a_backend` dispatches.
    Raises ConfigurationError if the requirements differ.
    """
    _check_class("unfused", unfused, PermuteExpertsUnpermute)

    def register(implementation: F) -> F:
        if isinstance(implementation, type):
            _check_class("fused operation", implementation, PermuteExpertsUnpermute)
            _check_same_requirements(implementation, unfused)
        op = FusedOp(a2a_backend, runner_backend, implementation, unfused)
        FUSED.ops.add((a2a_backend, runner_backend), op, implementation)
        if isinstance(implementation, type):
            FUSED.parts[a2a_backend, runner_backend] = implementation
        return implementation

    return register


def _check_class(what: str, value: object, base: type) -> None:
    if not isinstance(value, type) or not issubclass(value, base):
        raise ConfigurationError(
            what, got=format_value(value), need=f"a subclass of {base.__name__}"
        )


def _check_same_requirements(
    part: type[PermuteExpertsUnpermute], unfused: type[PermuteExpertsUnpermute]
) -> None:
    actual, expected = vars(part.requires), vars(unfused.requires)
    differences = ", ".join(name for name, value in actual.items() if value != expected.get(name))
    if differences:
        what = f"{part.__name__}.requires"
        raise ConfigurationError(
            what, got=f"different {differences}", need=f"the values of {unfused.__name__}"
        )


def get_stages(backend: str, format: str) -> Stages:
    """Return the stages of a backend. Raises UnknownPartError if one is missing."""
    return PERMUTES.get_stages(backend, format)


def get_fused_op(a2a_backend: str, runner_backend: str) -> FusedOp:
    """Return the fused operation of two backends. Raises UnknownPartError if none is registered."""
    return FUSED.ops.get((a2a_backend, runner_backend))


def register_part(part: type[PermuteExpertsUnpermute], stages: Stages) -> None:
    """Register a part that runs `stages`."""
    PERMUTES.parts[stages.backend, stages.format] = part


def register_fused_part(part: type[PermuteExpertsUnpermute], op: FusedOp) -> None:
    """Register a part that runs the fused function of `op`."""
    FUSED.parts[op.a2a_backend, op.runner_backend] = part


def find_unused_registrations() -> tuple[UnusedRegistration, ...]:
    """Return every registration that no part can use."""
    return tuple(dict.fromkeys(PERMUTES.find_unused()))


def check_format(format: object) -> None:
    """Raise ConfigurationError unless `format` is a key of FORMATS."""
    expect("format", format, str)
    if format not in FORMATS:
        raise ConfigurationError("format", got=repr(format), need=f"one of {', '.join(FORMATS)}")


def check_stage_result(what: str, value: object, kind: type, stages: Stages) -> None:
    """Raise ConfigurationError unless the result of a stage has the right class and backend.

    what: name of the result, for the message.
    kind: the required class.
    """
    if not isinstance(value, kind):
        got = type(value).__name__
        raise ConfigurationError(f"{what} of {stages.backend!r}", got=got, need=kind.__name__)
    backend = value.runner_backend  # type: ignore[attr-defined]
    if backend != stages.backend:
        what = f"{what} of {stages.backend!r}"
        got, need = f"a result of {backend!r}", f"a result of {stages.backend!r}"
        raise ConfigurationError(what, got=got, need=need)


def format_origin(source: Any) -> str:
    """Return where a function or class is defined, as "module:name:line"."""
    code = _get_code(source)
    line = "" if code is None else f":{code.co_firstlineno}"
    name = getattr(source, "__qualname__", type(source).__name__)
    return f"{getattr(source, '__module__', 'unknown')}:{name}{line}"


def format_key(key: Key) -> str:
    """Return a key as text, for a message."""
    return f"({key[0]!r}, {key[1]!r})"


def _get_code(source: Any) -> Any:
    """Return the code object of a function, or of the method `run` or `apply` of a class."""
    if isinstance(source, type):
        source = vars(source).get("run") or vars(source).get("apply")
    return getattr(source, "__code__", None)


def _is_reimport(old: Any, new: Any) -> bool:
    """Return whether `new` is the same function or class as `old`, from a repeated import."""
    names = [(s.__module__, getattr(s, "__qualname__", "")) for s in (old, new)]
    if old is new or names[0] != names[1]:
        return old is new
    codes = _get_code(old), _get_code(new)
    if None in codes:
        return True
    return codes[0].co_firstlineno == codes[1].co_firstlineno or _get_globals(
        old
    ) is not _get_globals(new)


def _get_globals(source: Any) -> object:
    if isinstance(source, type):
        source = vars(source).get("run") or vars(source).get("apply")
    return getattr(source, "__globals__", None)
