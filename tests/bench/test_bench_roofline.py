"""Rooflines computed by hand, measured peaks, and the routing patterns of `mk bench`."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from modular_kernel.errors import ConfigurationError
from modular_kernel.measure import roofline
from modular_kernel.measure.cases import operand_types
from modular_kernel.measure.roofline import (
    Peaks,
    Work,
    compute_roofline,
    compute_type,
    compute_work,
    expert_bytes,
    measure_peaks,
)
from modular_kernel.measure.routing_patterns import Load, RoutingKind, count_load, draw_routing
from modular_kernel.spec.problem import Combine, Problem
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.tensors import Routing

CPU = torch.device("cpu")
NONE = QuantScheme.parse("none")
SMALL = Problem(tokens=24, hidden=64, intermediate=96, experts=6, top_k=2)
MIXTRAL = Problem(tokens=16, hidden=4096, intermediate=14336, experts=8, top_k=2)
ELEMENTS_PER_EXPERT = 3 * 4096 * 14336
PEAKS = Peaks(
    flops={"bfloat16": 800e12, "float8_e4m3fn": 1500e12},
    copy=4e12,
    read=4.4e12,
    bandwidth=4.8e12,
    source="given",
)


@pytest.mark.parametrize(
    ("quant", "changes", "nbytes"),
    [
        ("none", {}, ELEMENTS_PER_EXPERT * 2),
        ("none", {"dtype": torch.float32}, ELEMENTS_PER_EXPERT * 4),
        ("none", {"activation": "relu2"}, ELEMENTS_PER_EXPERT / 3 * 2 * 2),
        ("none", {"bias": True}, ELEMENTS_PER_EXPERT * 2 + (2 * 14336 + 4096) * 2),
        ("fp8_w8a8_block", {}, ELEMENTS_PER_EXPERT),
        ("int8_w8a16_group", {}, ELEMENTS_PER_EXPERT * (1 + 2 / 128)),
        ("int4_w4a16_group:group=32", {}, ELEMENTS_PER_EXPERT * (0.5 + 2 / 32)),
        ("mxfp4_w4a16", {}, ELEMENTS_PER_EXPERT * (0.5 + 1 / 32)),
    ],
)
def test_expert_bytes_include_scales_and_biases(
    quant: str, changes: dict[str, Any], nbytes: float
) -> None:
    assert expert_bytes(replace(MIXTRAL, **changes), QuantScheme.parse(quant)) == nbytes


def test_floor_equals_the_value_computed_by_hand() -> None:
    loads = [Load(pairs=32, touched=8, skew=1.0), Load(pairs=32, touched=6, skew=2.0)]
    work = compute_work(MIXTRAL, NONE, loads)
    assert work == Work(
        2 * 32 * ELEMENTS_PER_EXPERT, 7 * ELEMENTS_PER_EXPERT * 2 + 2 * 16 * 4096 * 2, 7
    )
    limit = compute_roofline(work, MIXTRAL, NONE, PEAKS)
    assert limit.bound == "memory"
    assert limit.us == pytest.approx(
        (7 * ELEMENTS_PER_EXPERT * 2 + 2 * 16 * 4096 * 2) / 4.8e12 * 1e6
    )
    large = MIXTRAL.with_tokens(16384)
    limit = compute_roofline(compute_work(large, NONE, [Load(32768, 8, 1.0)]), large, NONE, PEAKS)
    assert limit.bound == "compute"
    assert limit.us == pytest.approx(2 * 32768 * ELEMENTS_PER_EXPERT / 800e12 * 1e6)
    assert limit.us == pytest.approx(14431.1, abs=0.1)


def test_floor_with_kept_top_k_counts_a_larger_output() -> None:
    problem_with_top_k = replace(MIXTRAL, combine=Combine.TOPK_WEIGHTED)
    load = [Load(32, 8, 1.0)]
    extra_bytes = (
        compute_work(problem_with_top_k, NONE, load).bytes - compute_work(MIXTRAL, NONE, load).bytes
    )
    assert extra_bytes == 16 * 4096 * 2  # K = 2 rows for each token instead of one


def test_operands_determine_the_peak() -> None:
    def select_types(quant: str, **changes: Any) -> tuple[str, str]:
        problem, scheme = replace(MIXTRAL, **changes), QuantScheme.parse(quant)
        return compute_type(problem, scheme), operand_types(problem, scheme)

    assert select_types("none") == ("bfloat16", "bfloat16")
    fp32 = {"dtype": torch.float32}
    assert select_types("none", **fp32) == ("float32", "float32")
    assert select_types("none", **fp32, fp32_precision="tf32") == ("tf32", "float32")
    assert (
        select_types("fp8_w8a8_block")
        == select_types("fp8_w8a8_channel")
        == ("float8_e4m3fn", "fp8/fp8")
    )
    assert select_types("int8_w8a8_channel") == ("int8", "int8/int8")
    assert (
        select_types("int8_w8a16_group")
        == select_types("int8_w8a16_channel")
        == ("bfloat16", "int8/bfloat16")
    )
    assert select_types("int4_w4a16_group") == ("bfloat16", "int4/bfloat16")
    fp8, work = QuantScheme.parse("fp8_w8a8_tensor"), Work(1500e6, 1.0, 1)
    assert compute_roofline(work, MIXTRAL, fp8, PEAKS).us == pytest.approx(1.0)
    without_fp8 = replace(PEAKS, flops={"bfloat16": 750e12})
    assert compute_roofline(work, MIXTRAL, fp8, without_fp8).us == pytest.approx(2.0)


def test_peaks_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = measure_peaks(CPU, ["float32", "float32", "bfloat16"], size=64, nbytes=1 << 16)
    assert set(peaks.flops) == {"float32", "bfloat16"}
    assert all(1e6 < rate < 1e16 for rate in (*peaks.flops.values(), peaks.copy, peaks.read))
    assert (peaks.bandwidth, peaks.source) == (max(peaks.copy, peaks.read), "measured")
    with_bandwidth = measure_peaks(CPU, [], bandwidth=4.8e12, nbytes=1 << 12)
    assert (with_bandwidth.bandwidth, with_bandwidth.source, with_bandwidth.flops) == (
        4.8e12,
        "given",
        {},
    )

    def raise_not_implemented(_name: str, _device: torch.device) -> None:
        raise NotImplementedError("no such product on this device")

    monkeypatch.setattr(roofline, "_make_gemm", raise_not_implemented)
    assert measure_peaks(CPU, ["float32"], size=64, nbytes=1 << 12).flops == {}


def test_peaks_count_both_directions_and_multiply_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 1 us per call, a copy of 4096 bytes moves 8192 bytes and a GEMM has 2 * 64^3 flops."""

    class Timing:
        us = us_min = 1.0

    monkeypatch.setattr(roofline, "time_calls", lambda *_args, **_options: Timing)
    peaks = measure_peaks(CPU, ["float32"], size=64, nbytes=1 << 12)
    assert (peaks.copy, peaks.read) == pytest.approx((8192e6, 4096e6))
    assert peaks.flops["float32"] == pytest.approx(2 * 64**3 * 1e6)


# -------------------------------------------------------------------------------------- routing


def make_routing(kind: str, seed: int = 0, **changes: Any) -> Routing:
    problem = replace(SMALL, tokens=4000, experts=16, **changes)
    return draw_routing(problem, RoutingKind.parse(kind), torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", ["uniform", "zipf", "zipf2", "hot1", "hot5"])
def test_routing_is_distinct_and_sums_to_one(kind: str) -> None:
    routing = make_routing(kind, top_k=3)
    ids, weights = routing.topk_ids_TK, routing.topk_weights_TK
    assert ids.dtype is torch.int32
    assert ids.is_contiguous()
    assert int(ids.min()) >= 0
    assert int(ids.max()) < 16
    assert all(len(set(row)) == 3 for row in ids.tolist())
    assert weights.dtype is torch.float32
    torch.testing.assert_close(weights.sum(1), torch.ones(4000))
    assert float(weights.min()) > 0
    assert make_routing(kind, ids_dtype=torch.int64).topk_ids_TK.dtype is torch.int64


def expert_shares(kind: str, seed: int = 0) -> list[float]:
    """Return the fraction of 4000 tokens that each of 16 experts has, in descending order."""
    counts = torch.bincount(make_routing(kind, seed, top_k=2).topk_ids_TK.flatten(), minlength=16)
    return sorted((counts / 4000).tolist(), reverse=True)


def test_load_depends_on_the_kind_of_routing() -> None:
    assert max(expert_shares("uniform")) < 2 / 16 * 1.3
    shares = expert_shares("hot1")
    assert shares[0] == 1.0
    assert shares[1] < 1 / 15 * 1.3
    assert expert_shares("hot3")[:2] == [1.0, 1.0]  # hot3 is limited to top_k = 2 experts
    # With K = 1, the share of the expert with Zipf rank 1 is 1 / sum(rank ** -1.2).
    counts = torch.bincount(make_routing("zipf", top_k=1).topk_ids_TK.flatten(), minlength=16)
    share = 1 / sum(rank**-1.2 for rank in range(1, 17))
    assert float(counts.max()) / 4000 == pytest.approx(share, rel=0.1)
    first_experts = {
        int(make_routing("hot1", seed, top_k=1).topk_ids_TK[0, 0]) for seed in range(8)
    }
    assert len(first_experts) > 2


def test_kinds_are_parsed_and_printed() -> None:
    kinds = [str(RoutingKind.parse(text)) for text in ("uniform", "zipf", "zipf0.5", "hot2")]
    assert kinds == ["uniform", "zipf1.2", "zipf0.5", "hot2"]
    for text in ("", "hot", "zipf-1", "uniform2", "skewed"):
        with pytest.raises(ConfigurationError):
            RoutingKind.parse(text)
    with pytest.raises(ConfigurationError, match="top_k"):
        make_routing("uniform", top_k=17)


def test_load_equals_the_value_counted_by_hand() -> None:
    ids = torch.tensor([[0, 3], [3, -1], [3, 9]], dtype=torch.int32)
    routing = Routing(torch.ones(3, 2), ids)
    assert count_load(routing, SMALL) == Load(pairs=4, touched=2, skew=3 * 6 / 4)
    local_map = torch.tensor([-1, -1, -1, 0, 1, -1], dtype=torch.int32)
    mapped = replace(SMALL, expert_map=True, local_experts=2)
    assert count_load(routing, mapped, local_map) == Load(pairs=3, touched=1, skew=2.0)
    assert count_load(Routing(torch.ones(1, 1), torch.tensor([[-1]])), SMALL) == Load(0, 0, 0.0)
