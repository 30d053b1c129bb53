"""Factors of experts parts, from the shipped records, and their errors."""

import math
from dataclasses import replace

import pytest

from modular_kernel.perf_model.experts_records import (
    ARCH,
    RecordedLayer,
    find_factor,
    recorded_layers,
)
from modular_kernel.perf_model.hardware import Gpu
from modular_kernel.spec.problem import Problem

DEEPSEEK = Problem(4096, 7168, 2048, 256, 8, quant="fp8_w8a8_block")


def layer(experts: str, tokens: int, shape: str = "dsv3_256") -> RecordedLayer:
    key = experts, tokens, shape, "fp8_w8a8_block"
    (found,) = [o for o in recorded_layers() if (o.experts, o.tokens, o.shape, o.quant) == key]
    return found


def test_a_recorded_layer_has_its_own_time() -> None:
    """Shapes of equal size and rows per expert have one factor, their mean."""
    measured = layer("DeepGemmExperts", 4096)
    assert (measured.problem.hidden, measured.problem.experts) == (7168, 256)
    assert measured.rows == 128
    found = find_factor("DeepGemmExperts", DEEPSEEK, 128, without_shape="dsv3_ep8")
    assert found is not None
    predicted = measured.predicted_us / 1e6
    assert found.correct(predicted) == pytest.approx(measured.us / 1e6)
    assert found.source == "recorded times of dsv3_256 in fp8_w8a8_block"
    assert 3 * 256 * 7168 * 2048 / Gpu().bandwidth < predicted < 1


def test_factor_is_interpolated_on_log_axes() -> None:
    few, many = layer("DeepGemmExperts", 1024), layer("DeepGemmExperts", 4096)
    found = find_factor("DeepGemmExperts", DEEPSEEK, 64, without_shape="dsv3_ep8")
    assert found is not None
    assert found.start == 0, "no layer of one token was recorded with the part"
    factors = [each.us / each.predicted_us for each in (few, many)]
    assert found.value == pytest.approx(math.sqrt(factors[0] * factors[1]))
    beyond = find_factor("DeepGemmExperts", DEEPSEEK, 1 << 20, without_shape="dsv3_ep8")
    assert beyond is not None
    assert beyond.value == pytest.approx(factors[1]), "not extrapolated"
    below = find_factor("DeepGemmExperts", DEEPSEEK, 1e-3, without_shape="dsv3_ep8")
    assert below is not None
    fewest = layer("DeepGemmExperts", 16)
    assert below.value == pytest.approx(fewest.us / fewest.predicted_us)


def test_a_start_that_all_layers_have_is_not_multiplied() -> None:
    """That of batched parts, which sort the tokens in launches of their own."""
    small = Problem(1, 2048, 768, 128, 8)
    batched = [
        o for o in recorded_layers() if (o.experts, o.quant) == ("BatchedTritonExperts", "none")
    ]
    others = [o for o in batched if o.shape != "qwen3_30b"]
    starts = [o.us - o.predicted_us for o in others if o.tokens == 1]
    found = find_factor("BatchedTritonExperts", small, 1 / 16, without_shape="qwen3_30b")
    assert found is not None
    assert found.start * 1e6 == pytest.approx(min(starts))
    assert 10 < min(starts) < 20
    (measured,) = [o for o in batched if (o.shape, o.tokens) == ("qwen3_30b", 1)]
    error = found.correct(measured.predicted_us / 1e6) * 1e6 / measured.us - 1
    assert abs(error) < 0.35


def test_a_scheme_without_records_takes_those_with_the_same_operands() -> None:
    found = find_factor("CutlassExpertsFP8", replace(DEEPSEEK, quant="fp8_w8a8_tensor"), 100)
    assert found is not None
    assert found.source.endswith(" in fp8_w8a8_block")
    other = find_factor("TritonExperts", replace(DEEPSEEK, quant="fp8_w8a8_block:block=64x64"), 100)
    assert other == find_factor("TritonExperts", DEEPSEEK, 100)
    assert find_factor("DeepGemmExperts", replace(DEEPSEEK, quant="mxfp4_w4a16"), 100) is None
    assert find_factor("FlashInferExperts", DEEPSEEK, 100) is None
    assert (
        find_factor("TritonExperts", replace(DEEPSEEK, dtype="float32", quant="none"), 100) is None
    )


def test_the_nearest_size_is_taken() -> None:
    found = find_factor("DeepGemmExperts", replace(DEEPSEEK, hidden=4096, intermediate=14336), 100)
    assert found is not None
    assert found.source == "recorded times of mixtral in fp8_w8a8_block"


def test_newer_records_replace_older_ones() -> None:
    keys = [(o.shape, o.quant, o.tokens, o.experts) for o in recorded_layers()]
    assert len(keys) == len(set(keys)) > 1000
    names = {o.experts for o in recorded_layers()}
    assert names >= {"DeepGemmExperts", "CutlassExpertsFP8", "TritonKernelsExperts"}
    assert Gpu().arch == ARCH
