"""One rank's place in a scene of ranks that do not mean the same call: see `scenes`."""

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
from modular_kernel.testing.cases.scenario_names import manager_class

if TYPE_CHECKING:
    from modular_kernel.testing.verify.sample import Sample

VICTIM = 1  # the rank at fault
RIGHT = "right"
_SECONDS = re.compile(r"\d+\.\d+ s")
_PLACES = re.compile(r"(; ranks? [\d, ]+: (all of|on) host [^;,]+)+")
_DIGITS = re.compile(r"[0-9a-f]{8,}")


@dataclass(frozen=True)
class Stage:
    """One rank's place in a scene. sample: its share of a call that is right.

    build: makes a kernel of a case over the group. meaning: its share where the layer has other
    properties; None where the pairing refuses such a layer.
    """

    case: Case
    machine: Machine
    sample: "Sample"
    build: Callable[[Case, Machine, bool], FusedMoEModularKernel]
    meaning: Callable[[Mapping[str, Any]], "Sample | None"]

    @property
    def rank(self) -> int:
        return self.case.problem.parallel.rank

    @property
    def world_size(self) -> int:
        return self.case.problem.parallel.world_size

    @property
    def at_fault(self) -> bool:
        return self.rank == VICTIM

    @property
    def others(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.world_size) if rank != self.rank)

    @property
    def part(self) -> type[PrepareAndFinalize]:
        return load_catalog().prepare_finalize(self.case.prepare_finalize)

    def kernel(self) -> FusedMoEModularKernel:
        """Make a kernel with a manager of its own."""
        return self.build(self.case, self.machine, True)

    def waiting(self, deadline_s: float) -> FusedMoEModularKernel:
        """Make a kernel whose exchanges take so long at most."""
        return self.over(manager_class(self.part)(None, deadline_s=deadline_s))

    def beside(self, kernel: FusedMoEModularKernel, **changes: Any) -> FusedMoEModularKernel:
        """Make another layer on the manager of `kernel`; with changes, rank 1 means another one."""
        return self.over(manager_of(kernel.prepare_finalize), **changes)

    def of(self, **changes: Any) -> "Stage | None":
        """Return the stage of another layer, which all ranks mean; None where it is refused.

        parallel, if it is among the changes, is rank 0's.
        """
        sample = self.meaning(changes)
        if sample is None:
            return None
        problem = replace(self.case.problem, **changes)
        problem = replace(problem, parallel=replace(problem.parallel, rank=self.rank))
        return replace(self, case=replace(self.case, problem=problem), sample=sample)

    def over(self, manager: object, **changes: Any) -> FusedMoEModularKernel:
        """Make a layer on a manager; with changes, rank 1 means another one."""
        problem = self.case.problem
        if changes and self.at_fault:
            problem = replace(problem, **changes)
        names = self.case.prepare_finalize, self.case.experts
        return make_kernel(*names, problem, group=manager, machine=self.machine)

    def other_problems(
        self, others: Sequence[Mapping[str, Any]]
    ) -> list[tuple[Mapping[str, Any], dict[str, Any]]]:
        """Those of the changes with which the pairing is one; and the tensors of such a call."""
        found = []
        for changes in others:
            sample = self.meaning(changes)
            if sample is not None:
                i = sample.inputs
                given = {"x_TH": i.x_TH, "weights": i.weights, "routing": i.routing}
                found.append((changes, given))
        return found

    def call(self, kernel: FusedMoEModularKernel, **changes: Any) -> torch.Tensor:
        """Call it; rank 1 with other tensors than its own."""
        i = self.sample.inputs
        given: dict[str, Any] = {"x_TH": self.sample.x_TH(), "weights": i.weights}
        given["routing"] = i.routing
        if self.at_fault:
            given |= changes
        out = kernel(**given).clone()
        # A part whose errors come late raises them here.
        getattr(kernel.prepare_finalize, "check", lambda: None)()
        return out

    def begun(self, kernel: FusedMoEModularKernel, x_TH: torch.Tensor | None = None) -> Pending:
        """Start a call, which is in flight then; of the sample's tokens, or of others."""
        i = self.sample.inputs
        return kernel.start(self.sample.x_TH() if x_TH is None else x_TH, i.weights, i.routing)

    def goes(self, kernel: FusedMoEModularKernel) -> tuple[str, str]:
        """All mean the same: the call is right."""
        return said(lambda: self.judged(self.call(kernel))), RIGHT

    def judged(self, out: torch.Tensor) -> str:
        return "; ".join(self.sample.compare(out).problems) or RIGHT

    def told(self, got: str, need: str, *, layer: int, call: int, step: int) -> str:
        """Return what counts tell every rank: those that are not rank 1 are to look at it."""
        peers = self.others if self.at_fault else (VICTIM,)
        return self.error("ranks of one call", got, need, (layer, call, step), peers, "counts")

    def error(
        self,
        what: str,
        got: str,
        need: str,
        at: tuple[int, int, int],
        peers: tuple[int, ...],
        phase: str,
    ) -> str:
        """at: layer, call and step; no layer is named where it is 0."""
        layer, call, step = at
        named = f"{what}, call {call} of layer {layer}" if layer else what
        error = CommunicationError(
            named, got=got, need=need, rank=self.rank, phase=phase, step=step, peers=peers
        )
        error.layer, error.call = layer, call
        return in_words(error)

    def by_rank(self, name: str, all_but_one: object, of_one: object) -> str:
        """`name` of every rank, where rank 1 has another."""
        ranks = range(self.world_size)
        values = ", ".join(str(of_one if rank == VICTIM else all_but_one) for rank in ranks)
        return f"{name} {values} by rank"


def said(call: Callable[[], str]) -> str:
    """Return what a call says, or raises."""
    try:
        return call()
    except CommunicationError as error:
        return in_words(error)
    # A faulty part may raise anything.
    except Exception as error:  # noqa: BLE001
        return type(error).__name__


def in_words(error: CommunicationError) -> str:
    """Return an error as text, layer and call too; without times, digests and names of hosts."""
    facts = error.rank, error.phase, error.step, error.layer, error.call, error.peers
    return _PLACES.sub("", _DIGITS.sub("#", _SECONDS.sub("N s", f"{facts} {error}")))


def manager_of(part: PrepareAndFinalize) -> Any:
    """Return what a part exchanges through."""
    return part.manager  # type: ignore[attr-defined]
