"""Compares the speed of our pairings and an engine's experts classes, for `mk bench --engine`.

The engine runs in this process. The output of each layer is checked before the layer is timed.
The timed CUDA graph replays of all layers of a case are interleaved
(`modular_kernel.bench.interleaved`).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from modular_kernel.bench.candidates import Candidate, Layer, pairing_candidates
from modular_kernel.bench.interleaved import CaseBlock, CaseCallback, Comparison, run_interleaved
from modular_kernel.errors import ConfigurationError
from modular_kernel.integrations.engine import (
    Description,
    Engine,
    EngineCase,
    RefusedError,
    UnavailableError,
)
from modular_kernel.measure.cases import LayerCase, quantize
from modular_kernel.measure.records import PEER, Report
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.tensors import ExpertWeights, Routing


class EngineLayer(Layer):
    """An experts class of an engine, with weights that the engine has converted."""

    def __init__(self, engine: Engine, description: Description, experts: str, quant: str) -> None:
        self._engine, self._description = engine, description
        self.name, self.quant = experts, quant

    def _make_case(self, problem: Problem) -> EngineCase | None:
        """Return the engine's case, or None if the engine does not have the activation function."""
        problem = replace(problem, quant=self.quant)
        for name, spec in self._description.activations.items():
            if spec == problem.act:
                return EngineCase(self.name, name, problem)
        return None

    def refusal(self, problem: Problem) -> str | None:
        """Return the engine's reason for refusing the problem, or None."""
        case = self._make_case(problem)
        if case is None:
            return f"{self._description.engine} has no activation {problem.act}"
        if self.name not in {c.name for c in self._description.classes if not c.unavailable}:
            return "the class cannot run here"
        try:
            self._engine.check_support(case)
        except (RefusedError, UnavailableError) as error:
            return str(error)
        return None

    def setup(self, problem: Problem, weights: ExpertWeights) -> None:
        """Quantize the weights, and let the engine convert them."""
        case = self._make_case(problem)
        assert case is not None  # `refusal` was called
        self._call = self._engine.build(case, quantize(weights, case.problem))

    def call(self, x_TH: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Run the class on tokens (T, H) and return its output (T, H)."""
        return self._call(x_TH, routing, False)


def can_time(quant: str) -> bool:
    """Return whether the engine's classes and our parts compute the same result in a scheme.

    The results for the same weights differ in three kinds of schemes: engines round the scales of
    int4 and int8 groups to 16 bits, use one static activation scale for all experts, and use one
    NVFP4 global scale for gate and up.
    """
    scheme = QuantScheme.parse(quant)
    has_rounded_scales = scheme.weight in ("uint4", "uint8")
    return not (scheme.static or scheme.matrix_scales or has_rounded_scales)


def make_blocks(
    engine: Engine,
    cases: Sequence[LayerCase],
    schemes: Sequence[str],
    machine: Machine,
    experts: str | None = None,
) -> list[CaseBlock]:
    """Return a block of cases for each shape and scheme, with the layers to time in it.

    The layers are our pairings and the engine's classes. Schemes that `can_time` rejects are
    omitted.

    experts: name of one class; None for all classes that support the scheme.

    Raises ConfigurationError if `experts` is unknown or no class supports any of the schemes.
    """
    description = engine.describe()
    classes = [c for c in description.classes if experts in (None, c.name)]
    if not classes:
        need = f"a class of `mk list --engine {description.engine}`"
        raise ConfigurationError("--experts-type", got=experts, need=need)
    cases_by_shape: dict[str, list[LayerCase]] = {}
    for case in cases:
        cases_by_shape.setdefault(case.shape, []).append(case)
    blocks = []
    for quant in filter(can_time, schemes):
        names = [c.name for c in classes if quant in c.schemes]
        layers = [
            Candidate(
                f"{description.engine} {name}",
                quant,
                PEER,
                partial(EngineLayer, engine, description, name, quant),
                library=description.engine,
            )
            for name in names
        ]
        for shape_cases in cases_by_shape.values() if layers else ():
            graph = machine.device == "cuda"
            problems = [replace(case.problem, quant=quant, graph=graph) for case in shape_cases]
            ours = pairing_candidates(None, None, problems, machine)
            blocks.append(CaseBlock(tuple(shape_cases), (*ours, *layers)))
    if not blocks:
        need = f"a scheme of {description.engine}'s classes that is timed: none, fp8 or int8_w8a8"
        raise ConfigurationError("--quant", got=", ".join(schemes), need=need)
    return blocks


def time_classes(
    comparison: Comparison,
    on_case: CaseCallback = lambda _line: None,
    on_report: Callable[[Report], object] = lambda _report: None,
) -> Report:
    """Time the blocks of `make_blocks` and return the report.

    Everything runs in inference mode, because the outputs of engines are inference tensors.

    on_case, on_report: as in `run_interleaved`.
    """
    with torch.inference_mode():
        return run_interleaved(comparison, on_case, on_report)
