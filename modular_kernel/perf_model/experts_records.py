"""Corrections of the model's time for each experts part, from times measured on one GPU.

The records in modular_kernel/select/data (`tools/check_choice.py` on an H200) have the times of
whole layers with every experts part, including parts that call vendor libraries. The time of a part
is

    t = start + factor * m

where m is the time that `experts_time` predicts for TritonExperts. `start` is the time of extra
launches, that is, launches that the part needs and TritonExperts does not. `start` does not depend
on the size of the layer. It is the minimum of t - m over the recorded layers of one token with the
same part and scheme, but not less than 0.

`factor` comes from the recorded layers of the same scheme with the nearest H * I. The factor is
interpolated between the nearest numbers of rows per expert, on log2 axes, and not extrapolated.

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
from modular_kernel.spec.quantization import find_scheme
from modular_kernel.utils import json_files

ARCH = (9, 0)  # compute capability of the GPU in the records
_FILES = (  # oldest first
    "h200-choice",
    "h200-choice-vendors",
    "h200-choice-schemes",
    "h200-choice-gptoss",
)
_FOLDER = Path(__file__).parents[1] / "select" / "data"
_SHAPES_FILE = Path(__file__).with_name("data") / "h200-layers.json"
_MAX_BYTES = 1 << 24
_MAX_START_FRACTION = 0.9  # maximum `start`, as a fraction of the shortest time of a part
RECORDED_ITEMSIZE = 2  # bytes; every recorded layer is in bfloat16


@dataclass(frozen=True)
class RecordedLayer:
    """One measured layer.

    shape: name of the layer's sizes in the records.
    experts_part: name of the experts part.
    us: microseconds of the whole layer.
    """

    shape: str
    quant: str
    tokens: int
    experts_part: str
    us: float

    @property
    def scheme(self) -> str:
        return self.quant.partition(":")[0]

    @property
    def problem(self) -> Problem:
        return _predict(self.shape, self.quant, self.tokens)[0]

    @property
    def predicted_us(self) -> float:
        """The model's time for TritonExperts, in microseconds."""
        return _predict(self.shape, self.quant, self.tokens)[1]

    @property
    def rows(self) -> float:
        """Mean number of rows per expert."""
        return self.problem.tokens * self.problem.top_k / self.problem.experts

    @property
    def log2_matrix_size(self) -> float:
        """log2(H * I). The factor comes from the recorded layers with the nearest value."""
        return math.log2(self.problem.hidden * self.problem.intermediate)


@dataclass(frozen=True)
class TimeCorrection:
    """Correction of the model's time: start_seconds + factor * seconds.

    source: description of the records from which the values are computed.
    """

    factor: float
    source: str
    start_seconds: float = 0.0

    def correct(self, seconds: float) -> float:
        """Return the part's time in seconds, for the predicted `seconds`."""
        return self.start_seconds + self.factor * seconds


def find_time_correction(
    experts_part: str, problem: Problem, rows: float, *, ignored_shape: str = ""
) -> TimeCorrection | None:
    """Return the correction for an experts part.

    Returns None if no layer was recorded with the part and the operand types of the problem.

    rows: mean number of rows per expert.
    ignored_shape: name of a shape whose records are ignored, so that its times can be compared with
        the corrected time.
    """
    if problem.dtype.itemsize != RECORDED_ITEMSIZE:
        return None
    layers = [
        r for r in recorded_layers() if r.experts_part == experts_part and r.shape != ignored_shape
    ]
    scheme = problem.scheme.name
    same_scheme = [layer for layer in layers if layer.scheme == scheme]
    similar = same_scheme or [
        r for r in layers if _get_operand_types(r.scheme) == _get_operand_types(scheme)
    ]
    if not similar:
        return None
    size = math.log2(problem.hidden * problem.intermediate)
    nearest_size = min((layer.log2_matrix_size for layer in similar), key=lambda s: abs(s - size))
    nearest = [layer for layer in similar if layer.log2_matrix_size == nearest_size]
    schemes = " and ".join(sorted({layer.scheme for layer in nearest} - {"none"}))
    shapes = " and ".join(sorted({layer.shape for layer in nearest}))
    source = f"recorded times of {shapes} {f'in {schemes}' if schemes else 'in 16 bits'}"
    start_us = _compute_start_us(similar)
    factor = _interpolate(nearest, start_us, math.log2(max(rows, 1e-9)))
    return TimeCorrection(factor, source, start_us / 1e6)


def _compute_start_us(layers: Sequence[RecordedLayer]) -> float:
    """Return `start` in microseconds, less than every recorded time, so that factors are > 0."""
    excess = [layer.us - layer.predicted_us for layer in layers if layer.tokens == 1]
    shortest = min(layer.us for layer in layers)
    return min(max(min(excess, default=0.0), 0.0), _MAX_START_FRACTION * shortest)


def _interpolate(layers: Sequence[RecordedLayer], start_us: float, log2_rows: float) -> float:
    """Return the factor at 2 ** log2_rows rows per expert, by linear interpolation of logarithms.

    Layers with the same number of rows are represented by the geometric mean of their factors.
    """
    log_factors: dict[float, list[float]] = {}
    for layer in layers:
        factor = (layer.us - start_us) / layer.predicted_us
        log_factors.setdefault(math.log2(layer.rows), []).append(math.log(factor))
    points = sorted((x, fmean(values)) for x, values in log_factors.items())
    below = max((point for point in points if point[0] <= log2_rows), default=points[0])
    above = min((point for point in points if point[0] >= log2_rows), default=points[-1])
    if below[0] >= above[0]:
        return math.exp(below[1] if log2_rows >= below[0] else above[1])
    fraction = (log2_rows - below[0]) / (above[0] - below[0])
    return math.exp(below[1] + fraction * (above[1] - below[1]))


def _get_operand_types(scheme: str) -> tuple[str, str]:
    quant_scheme = find_scheme(scheme)
    return quant_scheme.weight, quant_scheme.activation


@cache
def recorded_layers() -> tuple[RecordedLayer, ...]:
    """Return the measured layers of every part. The newest time of a layer is used."""
    times: dict[tuple[str, str, int, str], float] = {}
    for name in _FILES:
        times |= dict(_read_times(_read_json(_FOLDER / f"{name}.json")))
    return tuple(
        RecordedLayer(shape, quant, tokens, pairing.split(" x ")[1], us)
        for (shape, quant, tokens, pairing), us in times.items()
    )


def _read_json(path: Path) -> Any:
    return json_files.parse(json_files.read_file(path, _MAX_BYTES))


def _read_times(record: Any) -> Iterator[tuple[tuple[str, str, int, str], float]]:
    for cell in record["cells"]:
        for pairing, us, *_ in cell["outcomes"]:
            if us:
                yield (cell["shape"], cell["quant"], cell["tokens"], pairing), float(us)


@cache
def _read_shapes() -> Any:
    return _read_json(_SHAPES_FILE)["shapes"]


@cache
def _predict(shape_name: str, quant: str, tokens: int) -> tuple[Problem, float]:
    """Return the problem of a recorded layer, and the model's time in microseconds."""
    shape = _read_shapes()[shape_name]
    problem = Problem(tokens, shape["H"], shape["I"], shape["E"], shape["k"], quant=quant)
    load = rank_load(
        experts=problem.experts,
        top_k=problem.top_k,
        world_size=1,
        tokens=tokens,
        kind=RoutingKind("uniform"),
    )
    return problem, experts_time(problem, load, Gpu()).seconds * 1e6
