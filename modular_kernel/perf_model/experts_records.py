"""Measured times of experts parts on one GPU, as factors that correct the model's time.

The records in modular_kernel/select/data (`tools/check_choice.py` on an H200) have the times of
whole layers with every experts part, including those over vendor libraries. A part takes

    t = start + factor * m

where m is the time that `experts_time` predicts for TritonExperts. `start` is the smallest t - m of
the part's layers of one token in the same scheme, or 0: the time of launches beyond those of
TritonExperts, which small layers and large ones have alike. The factor comes from the recorded
layers of the same scheme with the nearest H * I. It is interpolated between the nearest numbers of
rows per expert, on log2 axes, and not extrapolated.

Times of batched parts include BatchedPrepareAndFinalize, which sorts the tokens by expert on the
same GPU.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from modular_kernel.measure.routing_patterns import RoutingKind
from modular_kernel.perf_model.experts_time import experts_time
from modular_kernel.perf_model.hardware import Gpu
from modular_kernel.perf_model.load import rank_load
from modular_kernel.spec.problem import Problem
from modular_kernel.spec.quantization import scheme_named
from modular_kernel.utils import json_files

ARCH = (9, 0)  # of the GPU in the records
_FILES = ("h200-choice", "h200-choice-vendors", "h200-choice-schemes")  # oldest first
_FOLDER = Path(__file__).parents[1] / "select" / "data"
_SHAPES_FILE = Path(__file__).with_name("data") / "h200-layers.json"
_MAX_BYTES = 1 << 24
_MAX_START = 0.9  # of the shortest time of a part
_ITEMSIZE = 2  # bytes of the dtype of every recorded layer, bfloat16


@dataclass(frozen=True)
class RecordedLayer:
    """One measured layer.

    shape: name of the layer's sizes in the records. experts: name of the experts part. us:
    microseconds of the whole layer.
    """

    shape: str
    quant: str
    tokens: int
    experts: str
    us: float

    @property
    def scheme(self) -> str:
        return self.quant.partition(":")[0]

    @property
    def problem(self) -> Problem:
        return _prediction(self.shape, self.quant, self.tokens)[0]

    @property
    def predicted_us(self) -> float:
        """The model's time for TritonExperts, in microseconds."""
        return _prediction(self.shape, self.quant, self.tokens)[1]

    @property
    def rows(self) -> float:
        """Mean number of rows per expert."""
        return self.problem.tokens * self.problem.top_k / self.problem.experts

    @property
    def size(self) -> float:
        """log2(H * I), by which layers are compared."""
        return math.log2(self.problem.hidden * self.problem.intermediate)


@dataclass(frozen=True)
class Factor:
    """Correction of the model's time: `start`, in seconds, plus `value` times the model's.

    source: the records that both come from.
    """

    value: float
    source: str
    start: float = 0.0

    def corrected(self, seconds: float) -> float:
        """Return the time of the part, given that of the model."""
        return self.start + self.value * seconds


def factor(
    experts: str, problem: Problem, rows: float, *, without_shape: str = ""
) -> Factor | None:
    """Return the factor of an experts part; None if no record has its time in such a scheme.

    rows: mean number of rows per expert. without_shape: name of a shape whose records are ignored,
    so that they can be compared with the result.
    """
    if problem.dtype.itemsize != _ITEMSIZE:
        return None
    cells = [c for c in recorded_layers() if c.experts == experts and c.shape != without_shape]
    scheme = problem.scheme.name
    same = [cell for cell in cells if cell.scheme == scheme]
    similar = same or [cell for cell in cells if _operands(cell.scheme) == _operands(scheme)]
    if not similar:
        return None
    size = math.log2(problem.hidden * problem.intermediate)
    nearest_size = min((cell.size for cell in similar), key=lambda s: abs(s - size))
    nearest = [cell for cell in similar if cell.size == nearest_size]
    schemes = ", ".join(sorted({cell.scheme for cell in nearest}))
    shapes = ", ".join(sorted({cell.shape for cell in nearest}))
    start_us = _start_us(similar)
    value = _interpolate(nearest, start_us, math.log2(max(rows, 1e-9)))
    return Factor(value, f"recorded times of {shapes} in {schemes}", start_us / 1e6)


def _start_us(cells: Sequence[RecordedLayer]) -> float:
    """Return the smallest time beyond the model's of the layers of one token; 0 if there is none.

    It is less than each cell's time, so that factors are positive.
    """
    excess = [cell.us - cell.predicted_us for cell in cells if cell.tokens == 1]
    shortest = min(cell.us for cell in cells)
    return min(max(min(excess, default=0.0), 0.0), _MAX_START * shortest)


def _interpolate(cells: Sequence[RecordedLayer], start_us: float, rows: float) -> float:
    """Return the factor at 2 ** `rows` rows per expert, by linear interpolation of logarithms.

    Of cells with equal numbers of rows, the geometric mean is used.
    """
    logs: dict[float, list[float]] = {}
    for cell in cells:
        value = (cell.us - start_us) / cell.predicted_us
        logs.setdefault(math.log2(cell.rows), []).append(math.log(value))
    points = sorted((row, fmean(values)) for row, values in logs.items())
    below = max((point for point in points if point[0] <= rows), default=points[0])
    above = min((point for point in points if point[0] >= rows), default=points[-1])
    if below[0] >= above[0]:
        return math.exp(below[1] if rows >= below[0] else above[1])
    share = (rows - below[0]) / (above[0] - below[0])
    return math.exp(below[1] + share * (above[1] - below[1]))


def _operands(scheme: str) -> tuple[str, str]:
    info = scheme_named(scheme)
    return info.weight, info.activation


@cache
def recorded_layers() -> tuple[RecordedLayer, ...]:
    """Return the measured layers of every part. A newer record replaces an older one."""
    times: dict[tuple[str, str, int, str], float] = {}
    for name in _FILES:
        times |= dict(_times(_parse(_FOLDER / f"{name}.json")))
    return tuple(
        RecordedLayer(shape, quant, tokens, pairing.split(" x ")[1], us)
        for (shape, quant, tokens, pairing), us in times.items()
    )


def _parse(path: Path) -> Any:
    return json_files.parse(json_files.read_file(path, _MAX_BYTES))


def _times(record: Any) -> Iterator[tuple[tuple[str, str, int, str], float]]:
    for cell in record["cells"]:
        for pairing, us, *_ in cell["outcomes"]:
            if us:
                yield (cell["shape"], cell["quant"], cell["tokens"], pairing), float(us)


@cache
def _shapes() -> Any:
    return _parse(_SHAPES_FILE)["shapes"]


@cache
def _prediction(shape_name: str, quant: str, tokens: int) -> tuple[Problem, float]:
    """Return the problem of a recorded layer, and the model's time in microseconds."""
    shape = _shapes()[shape_name]
    problem = Problem(tokens, shape["H"], shape["I"], shape["E"], shape["k"], quant=quant)
    load = rank_load(
        experts=problem.experts,
        top_k=problem.top_k,
        world_size=1,
        tokens=tokens,
        kind=RoutingKind("uniform"),
    )
    return problem, experts_time(problem, load, Gpu()).seconds * 1e6
