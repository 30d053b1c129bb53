"""State and helpers of a fault scenario on one rank: its case, its calls, and expected errors.

In a fault scenario (files `*scenarios.py`), one rank calls a layer wrongly, and every rank must
raise the expected error. The kernels of several layers share one manager, the object through which
a prepare/finalize class communicates. A manager numbers its layers, the calls of each layer, and
all calls of all layers (steps). Errors name these numbers.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from modular_kernel.catalog import load_catalog, make_kernel
from modular_kernel.contracts import PrepareAndFinalize
from modular_kernel.errors import CommunicationError
from modular_kernel.kernel import FusedMoEModularKernel, Pending
from modular_kernel.spec.problem import Machine
from modular_kernel.testing.cases.case import Case
from modular_kernel.testing.cases.scenario_names import find_manager_class

if TYPE_CHECKING:
    from modular_kernel.testing.verify.sample import Sample

FAULTY_RANK = 1  # the rank at which the fault is injected
CORRECT = "right"  # outcome of a correct call; errors have other texts
# Parts of error messages that differ between runs.
_SECONDS = re.compile(r"\d+\.\d+ s")
_HOST_NAMES = re.compile(r"(; ranks? [\d, ]+: (all of|on) host [^;,]+)+")
_DIGESTS = re.compile(r"[0-9a-f]{8,}")


@dataclass(frozen=True)
class ScenarioContext:
    """A case on one rank, with methods that make its kernels and calls in a fault scenario.

    Attributes:
        case: the case, with the problem of this rank.
        machine: the machine that the parts are made for.
        sample: this rank's inputs and expected output of a correct call.
        build: makes the kernel of a (case, machine, poison) in the process group. poison is whether
            buffers are filled with NaN or other values before each call.
        make_changed_sample: maps changed fields of Problem to this rank's sample for the changed
            layer, or to None if the pairing does not support that layer.
    """

    case: Case
    machine: Machine
    sample: "Sample"
    build: Callable[[Case, Machine, bool], FusedMoEModularKernel]
    make_changed_sample: Callable[[Mapping[str, Any]], "Sample | None"]

    @property
    def rank(self) -> int:
        return self.case.problem.parallel.rank

    @property
    def world_size(self) -> int:
        return self.case.problem.parallel.world_size

    @property
    def is_faulty_rank(self) -> bool:
        return self.rank == FAULTY_RANK

    @property
    def peers(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.world_size) if rank != self.rank)

    @property
    def part(self) -> type[PrepareAndFinalize]:
        return load_catalog().prepare_finalize(self.case.prepare_finalize)

    def make_kernel(self) -> FusedMoEModularKernel:
        """Make a kernel with a new manager."""
        return self.build(self.case, self.machine, True)

    def make_kernel_with_timeout(self, timeout_s: float) -> FusedMoEModularKernel:
        """Make a kernel whose exchanges time out after `timeout_s` seconds."""
        return self.make_kernel_on(find_manager_class(self.part)(None, timeout_s=timeout_s))

    def make_kernel_on_manager_of(
        self, kernel: FusedMoEModularKernel, **changes: Any
    ) -> FusedMoEModularKernel:
        """Make another layer with the manager of `kernel`; `changes` apply on rank 1 only."""
        return self.make_kernel_on(get_manager(kernel.prepare_finalize), **changes)

    def with_changed_problem(self, **changes: Any) -> "ScenarioContext | None":
        """Return the context of a layer whose problem is changed on all ranks.

        Returns None if the pairing refuses that layer. If `parallel` is among the changes, it must
        be the value of rank 0.
        """
        sample = self.make_changed_sample(changes)
        if sample is None:
            return None
        problem = replace(self.case.problem, **changes)
        problem = replace(problem, parallel=replace(problem.parallel, rank=self.rank))
        return replace(self, case=replace(self.case, problem=problem), sample=sample)

    def make_kernel_on(self, manager: object, **changes: Any) -> FusedMoEModularKernel:
        """Make a layer with the given manager; `changes` apply on rank 1 only."""
        problem = self.case.problem
        if changes and self.is_faulty_rank:
            problem = replace(problem, **changes)
        names = self.case.prepare_finalize, self.case.experts
        return make_kernel(*names, problem, group=manager, machine=self.machine)

    def list_supported_changes(
        self, candidates: Sequence[Mapping[str, Any]]
    ) -> list[tuple[Mapping[str, Any], dict[str, Any]]]:
        """Return (changes, tensors) for each of `candidates` that the pairing supports.

        tensors: the arguments of a call of the changed layer. Candidates that do not change the
            problem are left out.
        """
        supported_changes, problem = [], self.case.problem
        for changes in candidates:
            if replace(problem, **changes) == problem:
                continue
            sample = self.make_changed_sample(changes)
            if sample is not None:
                inputs = sample.inputs
                tensors = {
                    "x_TH": inputs.x_TH,
                    "weights": inputs.weights,
                    "routing": inputs.routing,
                }
                supported_changes.append((changes, tensors))
        return supported_changes

    def call(self, kernel: FusedMoEModularKernel, **changes: Any) -> torch.Tensor:
        """Call the kernel; return a copy of its output. `changes` replace arguments on rank 1."""
        inputs = self.sample.inputs
        kwargs: dict[str, Any] = {"x_TH": self.sample.x_TH(), "weights": inputs.weights}
        kwargs["routing"] = inputs.routing
        if self.is_faulty_rank:
            kwargs |= changes
        out = kernel(**kwargs).clone()
        # Parts that report errors asynchronously raise them here.
        getattr(kernel.prepare_finalize, "check", lambda: None)()
        return out

    def start(self, kernel: FusedMoEModularKernel, x_TH: torch.Tensor | None = None) -> Pending:
        """Start a call on `x_TH` (default: the sample's tokens), and leave it in flight."""
        inputs = self.sample.inputs
        return kernel.start(
            self.sample.x_TH() if x_TH is None else x_TH, inputs.weights, inputs.routing
        )

    def make_correct_call(self, kernel: FusedMoEModularKernel) -> tuple[str, str]:
        """Make a correct call on all ranks; return (outcome, expected outcome)."""
        return capture_outcome(lambda: self.compare(self.call(kernel))), CORRECT

    def compare(self, out: torch.Tensor) -> str:
        """Compare the output of the sample's call with the float64 reference.

        Returns "right", or the problems as text.
        """
        return "; ".join(self.sample.compare(out).problems) or CORRECT

    def format_call_number_error(
        self, got: str, need: str, *, layer: int, call: int, step: int
    ) -> str:
        """Return the text of the error expected in the phase that exchanges call numbers.

        The error's `peers` are the ranks to inspect. On rank 1, these are all other ranks. On the
        other ranks, it is rank 1.
        """
        peers = self.peers if self.is_faulty_rank else (FAULTY_RANK,)
        return self.format_expected_error(
            "ranks of one call", got, need, (layer, call, step), peers, "counts"
        )

    def format_expected_error(
        self,
        subject: str,
        got: str,
        need: str,
        position: tuple[int, int, int],
        peers: tuple[int, ...],
        phase: str,
    ) -> str:
        """Return the text of a CommunicationError that this rank is expected to raise.

        position: layer, call and step numbers. Layer 0 means that the error names no layer.
        """
        layer, call, step = position
        full_subject = f"{subject}, call {call} of layer {layer}" if layer else subject
        error = CommunicationError(
            full_subject, got=got, need=need, rank=self.rank, phase=phase, step=step, peers=peers
        )
        error.layer, error.call = layer, call
        return format_error(error)

    def format_by_rank(self, name: str, value: object, faulty_value: object) -> str:
        """Return a text such as "layer 1, 2, 1 by rank", with `faulty_value` on rank 1."""
        ranks = range(self.world_size)
        values = ", ".join(str(faulty_value if rank == FAULTY_RANK else value) for rank in ranks)
        return f"{name} {values} by rank"


def capture_outcome(call: Callable[[], str]) -> str:
    """Run `call` and return its result, or the error that it raises as text."""
    try:
        return call()
    except CommunicationError as error:
        return format_error(error)
    # A faulty part may raise anything.
    except Exception as error:  # noqa: BLE001
        return type(error).__name__


def format_error(error: CommunicationError) -> str:
    """Format an error with its rank, phase, step, layer, call and peers.

    Times, digests and host names are removed.
    """
    fields = error.rank, error.phase, error.step, error.layer, error.call, error.peers
    return _HOST_NAMES.sub("", _DIGESTS.sub("#", _SECONDS.sub("N s", f"{fields} {error}")))


def get_manager(prepare_finalize: PrepareAndFinalize) -> Any:
    return prepare_finalize.manager  # type: ignore[attr-defined]
