"""The shipped record: times of all pairings for a few layers, measured on an H200 in advance.

A pairing consists of a PrepareAndFinalize and an experts class. `select.autotune` times only the
pairings that may be faster than the default pairing according to this record. The record is
prior.json, which tools/build_prior.py creates from data/h200-choice*.json:

    {"schema": "mk-prior/1", "device": "NVIDIA H200", "arch": [9, 0],
     "pairs": [["MoEPrepareAndFinalizeNoEP", "TritonExperts"], ...],
     "measurements": [[scheme, rows, size, [ratio or null, ...]], ...]}

A measurement has the times of one layer at one number of tokens:

    scheme   name of the layer's QuantScheme
    rows     tokens * top_k / experts, the mean number of rows per expert
    size     hidden * intermediate
    ratios   time of each of `pairs`, divided by the time of the default pairing; null if not
             measured

The estimate for another layer uses the three measurements of the same scheme that are nearest in
(log2 rows, log2 size). The smallest of the three ratios is the optimistic estimate, and the largest
is the pessimistic estimate.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from modular_kernel.errors import ConfigurationError
from modular_kernel.select.selection import Estimate, Pair
from modular_kernel.spec.problem import ActivationSpec, Machine, Problem
from modular_kernel.spec.quantization import QUANT_SCHEMES, find_scheme
from modular_kernel.utils import json_files

SCHEMA = "mk-prior/1"
FILE = Path(__file__).with_name("prior.json")

_LOG = logging.getLogger("modular_kernel.select")
_NUM_NEAREST = 3
# Estimates from measurements at a larger distance (`_compute_distance`) are not trusted. They can
# exclude a pairing from timing, but cannot select it.
_MAX_DISTANCE = 3.0
_MAX_BYTES = 1 << 20
_MAX_MEASUREMENTS, _MAX_PAIRS = 4096, 64
_RATIO_RANGE = (1e-4, 1e4)
_RECORDED_ACTIVATION = ActivationSpec.parse("silu")  # all recorded layers have this activation


@dataclass(frozen=True)
class LayerTimes:
    """A measurement: the times of one layer at one number of tokens.

    The docstring of this module describes the fields.
    """

    scheme: str
    rows: float
    size: float
    ratios: Mapping[Pair, float]


@dataclass(frozen=True)
class ShippedRecord:
    """The measurements on GPUs of compute capability `arch`, such as (9, 0)."""

    arch: tuple[int, int]
    measurements: tuple[LayerTimes, ...]

    def covers(self, problem: Problem, machine: Machine, *, routing: str) -> bool:
        """Return whether the record has estimates for this kind of problem.

        routing: distribution of tokens over experts, in the syntax of RoutingKind.parse.
        """
        return (
            machine.arch == self.arch
            and problem.parallel.world_size == 1
            and problem.dtype in (torch.bfloat16, torch.float16)
            and problem.adapters is None
            and problem.chunk_tokens is None
            and not problem.batch_invariant
            and routing == "uniform"
        )

    def estimates(
        self, problem: Problem, pairs: Sequence[Pair], default: Pair
    ) -> dict[Pair, Estimate]:
        """Estimate the time of each of `pairs` divided by the time of `default`.

        Pairings without a comparable measurement are omitted.
        """
        is_like_recorded = (
            problem.act == _RECORDED_ACTIVATION and not problem.bias and problem.tokens > 0
        )
        rows = max(problem.tokens, 1) * problem.top_k / problem.experts
        size = float(problem.hidden * problem.intermediate)
        estimates = {}
        for pair in pairs:
            measurements, is_same_scheme = self._select_comparable_measurements(
                problem, pair, default
            )
            nearest = sorted(
                measurements, key=lambda measurement: _compute_distance(measurement, rows, size)
            )[:_NUM_NEAREST]
            if not nearest:
                continue
            ratios = [
                measurement.ratios[pair] / measurement.ratios[default] for measurement in nearest
            ]
            is_near = (
                len(nearest) == _NUM_NEAREST
                and _compute_distance(nearest[-1], rows, size) <= _MAX_DISTANCE
            )
            is_trusted = is_like_recorded and is_same_scheme and is_near
            estimates[pair] = Estimate(min(ratios), max(ratios), is_trusted)
        return estimates

    def _select_comparable_measurements(
        self, problem: Problem, pair: Pair, default: Pair
    ) -> tuple[list[LayerTimes], bool]:
        """Return measurements with times of both pairings, and whether they have the same scheme.

        If no measurement has the problem's scheme, return measurements with other options of the
        scheme, such as the group size. If there are none, return measurements with the same element
        types.
        """
        measurements_of_both = [
            measurement
            for measurement in self.measurements
            if pair in measurement.ratios and default in measurement.ratios
        ]
        for scheme in dict.fromkeys((problem.quant, problem.scheme.name)):
            if measurements := [
                measurement for measurement in measurements_of_both if measurement.scheme == scheme
            ]:
                return measurements, scheme == problem.quant
        types = _get_element_types(problem.scheme.name)
        return [
            measurement
            for measurement in measurements_of_both
            if _get_element_types(measurement.scheme) == types
        ], False


def _compute_distance(measurement: LayerTimes, rows: float, size: float) -> float:
    """Return the Euclidean distance of a measurement from (rows, size) on log2 axes."""
    return math.hypot(math.log2(measurement.rows / rows), math.log2(measurement.size / size))


def _get_element_types(scheme: str) -> tuple[str, str]:
    """Return the types of weights and activations, which determine the speed of a scheme."""
    parsed = find_scheme(scheme)
    return parsed.weight, parsed.activation


@cache
def load_shipped_record() -> ShippedRecord | None:
    """Return the shipped record. If it is unreadable, log a warning and return None."""
    try:
        return parse(json_files.read_file(FILE, _MAX_BYTES))
    except (ConfigurationError, OSError, ValueError) as error:
        _LOG.warning("no shipped record of pairings' times: %s: %s", FILE.name, error)
        return None


def parse(text: str | bytes) -> ShippedRecord:
    """Parse a record. Raises ConfigurationError, with the reason, if it is invalid."""
    try:
        record = json_files.parse(text)
    except ValueError as error:
        raise _make_error(f"no JSON: {str(error)[:100]}") from None
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise _make_error(f"no {SCHEMA}")
    arch = record.get("arch")
    if not (isinstance(arch, list) and len(arch) == 2 and all(type(n) is int for n in arch)):
        raise _make_error("arch that is not two numbers")
    pairs = [_parse_pair(value) for value in _check_list(record.get("pairs"), "pairs", _MAX_PAIRS)]
    if len(set(pairs)) != len(pairs):
        raise _make_error("a pairing twice")
    measurements = _check_list(record.get("measurements"), "measurements", _MAX_MEASUREMENTS)
    return ShippedRecord(
        (arch[0], arch[1]), tuple(_parse_layer_times(value, pairs) for value in measurements)
    )


def _parse_pair(value: Any) -> Pair:
    names = _check_list(value, "a pairing", 2)
    if len(names) != 2 or not all(isinstance(name, str) and name for name in names):
        raise _make_error("a pairing that is not two names")
    return names[0], names[1]


def _parse_layer_times(value: Any, pairs: Sequence[Pair]) -> LayerTimes:
    fields = _check_list(value, "a measurement", 4)
    if len(fields) != 4 or not isinstance(fields[0], str) or fields[0] not in QUANT_SCHEMES:
        raise _make_error("a measurement without a scheme")
    scheme, rows, size, ratios = fields
    ratios = _check_list(ratios, "ratios", len(pairs))
    if len(ratios) != len(pairs):
        raise _make_error(f"{len(ratios)} ratios for {len(pairs)} pairings")
    ratio_by_pair = {
        pair: _parse_number(ratio, "a ratio", *_RATIO_RANGE)
        for pair, ratio in zip(pairs, ratios, strict=True)
        if ratio is not None
    }
    return LayerTimes(
        scheme,
        _parse_number(rows, "rows", 1e-9, 1e9),
        _parse_number(size, "size", 1, 1e15),
        ratio_by_pair,
    )


def _parse_number(value: Any, name: str, minimum: float, maximum: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _make_error(f"{name} that is not a number")
    if not minimum <= value <= maximum:
        raise _make_error(f"{name} out of range")
    return float(value)


def _check_list(value: Any, name: str, maximum: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > maximum:
        raise _make_error(f"{name} that is not a list of at most {maximum}")
    return value


def _make_error(got: str) -> ConfigurationError:
    return ConfigurationError("the shipped record", got=got, need=SCHEMA)
