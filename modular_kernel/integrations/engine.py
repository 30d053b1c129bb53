"""Interface to the experts classes of an engine, which `modular_kernel.testing.engines` checks.

An *experts class* is an engine's implementation of the experts of a MoE layer. For each engine, a
module such as `modular_kernel.integrations.vllm.classes` has a function `load_engine` that returns
an `Engine`. Objects of the other types are sent between processes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import torch

from modular_kernel.spec.problem import ActivationSpec, Problem
from modular_kernel.tensors import ExpertWeights, Routing


class Kind(StrEnum):
    """Outcome of a case, or of a class as a whole."""

    WRONG = "wrong"
    CRASHED = "crashed"
    TIMEOUT = "timeout"
    MISSING_KERNEL = "not judged: kernel missing from the library"
    NOT_JUDGED = "not judged"
    RIGHT = "right"
    REFUSED = "refused"
    UNAVAILABLE = "not for this device"


class Promise(StrEnum):
    """A property that our parts guarantee and that an engine may not guarantee.

    An experts class without the property is not wrong.

    NAN: a NaN in a token makes the output of this token NaN, and of no other token.
    UNUSED_WEIGHTS: weights of experts without tokens are not read.
    SKIPPED_IDS: pairs whose id is -1 are skipped.
    WORKSPACE: memory of the workspace is not read before it is written.
    NO_TOKENS: a call may have no tokens.
    """

    NAN = "NaN"
    UNUSED_WEIGHTS = "unused weights"
    SKIPPED_IDS = "ids of -1"
    WORKSPACE = "poisoned workspace"
    NO_TOKENS = "no tokens"


@dataclass(frozen=True)
class EngineCase:
    """One call of an experts class.

    experts: name of the class.
    activation: the engine's name of the activation, a key of `Description.activations`.
    problem: the problem of the call. If `expert_map` is set, this rank has the second block of
        `problem.e` consecutive experts.
    routing: a kind of routing of `cases.inputs.ROUTING_KINDS`.
    promise: the property that the case checks; None if it checks the accuracy of the output.
    """

    experts: str
    activation: str
    problem: Problem
    routing: str = "uniform"
    promise: Promise | None = None

    @property
    def shape(self) -> str:
        """The sizes and the kind of call, such as "T17 H128 I64 E8 K2"."""
        problem = self.problem
        labels = [f"T{problem.tokens}", f"H{problem.hidden}", f"I{problem.intermediate}"]
        labels += [f"E{problem.experts}", f"K{problem.top_k}"]
        if self.routing != "uniform":
            labels.append(self.routing)
        if problem.expert_map:
            labels.append(f"{problem.e} of them here")
        if problem.apply_router_weight_on_input:
            labels.append("router weights on the input")
        return " ".join(labels)


@dataclass(frozen=True)
class Outcome:
    """Result of a case.

    detail: reason or error message; empty if the result is right.
    error, bound: relative RMS error and the largest that is allowed. None if there is no output.
    reproducer: program that shows the error with the engine alone; empty unless the output is
        wrong.
    seconds: durations of the first call, which compiles kernels, and of the last call.
    is_fatal: whether the process cannot make further calls.
    was_run: False for a case that was skipped, for example because of a time limit.
    """

    kind: Kind
    detail: str = ""
    error: float | None = None
    bound: float | None = None
    reproducer: str = ""
    seconds: tuple[float, ...] = ()
    is_fatal: bool = False
    was_run: bool = True


@dataclass(frozen=True)
class ExpertsClass:
    """An experts class of the engine.

    module: full name of its module.
    format: layout of the rows that it receives, in the engine's words.
    unavailable: why no case of the class can run on this machine; empty if some can.
    schemes: names of the quantization schemes to try.
    refused: schemes that the class refuses, and the engine's reasons.
    skips_ids: whether to check ids of -1; False if the code of the engine that skips them cannot
        run here.
    """

    name: str
    module: str
    format: str
    unavailable: str = ""
    schemes: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    skips_ids: bool = True


@dataclass(frozen=True)
class Description:
    """An installed engine.

    device: "cpu" or "cuda".
    device_name: name of the device for the report.
    classes: its experts classes.
    activations: the engine's names of activations, and what they compute.
    notes: lines for the report about code of this run that is not the engine's own.
    """

    engine: str
    version: str
    device: str
    device_name: str
    classes: tuple[ExpertsClass, ...]
    activations: Mapping[str, ActivationSpec]
    notes: tuple[str, ...] = field(default=())


class RefusedError(Exception):
    """The engine's own predicates refuse the case. The message is the engine's reason."""


class UnavailableError(Exception):
    """The class needs a library, an operator or a device that this machine does not have."""


class NotJudgedError(Exception):
    """The check could not build the layer as the engine does."""


# (x (T, H), routing of x, whether to fill the workspace with NaN before the call) -> (T, H)
EngineCall = Callable[[torch.Tensor, Routing, bool], torch.Tensor]


class Engine(Protocol):
    """An engine that is loaded in this process."""

    def describe(self) -> Description:
        """Return the engine, its classes and the activations to try."""

    def check_support(self, case: EngineCase) -> None:
        """Raise RefusedError or UnavailableError if the class does not support the case."""

    def build(self, case: EngineCase, weights: ExpertWeights) -> EngineCall:
        """Return a function that calls a layer of the class with these weights.

        Raises UnavailableError or NotJudgedError if the layer cannot be built here.
        """

    def explain_unavailable(self, error: BaseException) -> str | None:
        """Return the missing requirement that caused the error, or None if it has another cause."""

    def make_reproducer(self, case: EngineCase, bound: float) -> str:
        """Return a program that needs only the engine and torch, and compares the same call.

        The program exits with 1 if the relative RMS error is above `bound`.
        """
