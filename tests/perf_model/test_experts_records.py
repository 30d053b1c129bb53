"""Corrections of predicted times of experts parts, computed from the shipped records."""

import math
from dataclasses import replace

import pytest

from modular_kernel.perf_model.experts_records import (
    ARCH,
    RecordedLayer,
    find_time_correction,
    recorded_layers,
)
from modular_kernel.perf_model.hardware import Gpu
from modular_kernel.spec.problem import Problem

DEEPSEEK = Problem(4096, 7168, 2048, 256, 8, quant="fp8_w8a8_block")


def recorded_layer(experts: str, tokens: int, shape: str = "dsv3_256") -> RecordedLayer:
    key = experts, tokens, shape, "fp8_w8a8_block"
    (match,) = [r for r in recorded_layers() if (r.experts_part, r.tokens, r.shape, r.quant) == key]
    return match


def test_the_corrected_time_of_a_recorded_layer_is_its_measured_time() -> None:
    """dsv3_ep8 has the same size. If it were not ignored, the factor would be a mean over both."""
    measured = recorded_layer("DeepGemmExperts", 4096)
    assert (measured.problem.hidden, measured.problem.experts) == (7168, 256)
    assert measured.rows == 128
    correction = find_time_correction("DeepGemmExperts", DEEPSEEK, 128, ignored_shape="dsv3_ep8")
    assert correction is not None
    predicted = measured.predicted_us / 1e6
    assert correction.correct(predicted) == pytest.approx(measured.us / 1e6)
    assert correction.source == "recorded times of dsv3_256 in fp8_w8a8_block"
    assert 3 * 256 * 7168 * 2048 / Gpu().bandwidth < predicted < 1


def test_factor_is_interpolated_on_log_axes() -> None:
    layer_1024 = recorded_layer("DeepGemmExperts", 1024)
    layer_4096 = recorded_layer("DeepGemmExperts", 4096)
    correction = find_time_correction("DeepGemmExperts", DEEPSEEK, 64, ignored_shape="dsv3_ep8")
    assert correction is not None
    assert correction.start_seconds == 0, "DeepGemmExperts has no recorded layer of one token"
    factors = [r.us / r.predicted_us for r in (layer_1024, layer_4096)]
    assert correction.factor == pytest.approx(math.sqrt(factors[0] * factors[1]))
    above = find_time_correction("DeepGemmExperts", DEEPSEEK, 1 << 20, ignored_shape="dsv3_ep8")
    assert above is not None
    assert above.factor == pytest.approx(factors[1]), "not extrapolated"
    below = find_time_correction("DeepGemmExperts", DEEPSEEK, 1e-3, ignored_shape="dsv3_ep8")
    assert below is not None
    fewest = recorded_layer("DeepGemmExperts", 16)
    assert below.factor == pytest.approx(fewest.us / fewest.predicted_us)


def test_start_is_the_smallest_difference_from_the_prediction() -> None:
    """Batched parts also sort the tokens, in launches that take a constant time."""
    small = Problem(1, 2048, 768, 128, 8)
    batched = [
        r
        for r in recorded_layers()
        if (r.experts_part, r.quant) == ("BatchedTritonExperts", "none")
    ]
    other_shapes = [r for r in batched if r.shape != "qwen3_30b"]
    differences = [r.us - r.predicted_us for r in other_shapes if r.tokens == 1]
    correction = find_time_correction(
        "BatchedTritonExperts", small, 1 / 16, ignored_shape="qwen3_30b"
    )
    assert correction is not None
    assert correction.start_seconds * 1e6 == pytest.approx(min(differences))
    assert 10 < min(differences) < 20
    (measured,) = [r for r in batched if (r.shape, r.tokens) == ("qwen3_30b", 1)]
    error = correction.correct(measured.predicted_us / 1e6) * 1e6 / measured.us - 1
    assert abs(error) < 0.35


def test_a_scheme_without_records_uses_records_with_the_same_operand_types() -> None:
    correction = find_time_correction(
        "CutlassExpertsFP8", replace(DEEPSEEK, quant="fp8_w8a8_tensor"), 100
    )
    assert correction is not None
    assert correction.source.endswith(" in fp8_w8a8_block")
    small_blocks = find_time_correction(
        "TritonExperts", replace(DEEPSEEK, quant="fp8_w8a8_block:block=64x64"), 100
    )
    assert small_blocks == find_time_correction("TritonExperts", DEEPSEEK, 100)
    assert (
        find_time_correction("DeepGemmExperts", replace(DEEPSEEK, quant="mxfp4_w4a16"), 100) is None
    )
    assert find_time_correction("FlashInferExperts", DEEPSEEK, 100) is None
    assert (
        find_time_correction("TritonExperts", replace(DEEPSEEK, dtype="float32", quant="none"), 100)
        is None
    )


def test_records_of_the_nearest_size_are_used() -> None:
    correction = find_time_correction(
        "DeepGemmExperts", replace(DEEPSEEK, hidden=4096, intermediate=14336), 100
    )
    assert correction is not None
    assert correction.source == "recorded times of mixtral in fp8_w8a8_block"


def test_newer_records_replace_older_ones() -> None:
    keys = [(r.shape, r.quant, r.tokens, r.experts_part) for r in recorded_layers()]
    assert len(keys) == len(set(keys)) > 1000
    names = {r.experts_part for r in recorded_layers()}
    assert names >= {"DeepGemmExperts", "CutlassExpertsFP8", "TritonKernelsExperts"}
    assert Gpu().arch == ARCH
