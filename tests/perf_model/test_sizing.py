"""The performance model agrees with counted loads and with measured times."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from run_mk import CommandResult, run_mk

from modular_kernel import perf_model
from modular_kernel.errors import ConfigurationError
from modular_kernel.measure.routing_patterns import RoutingKind, draw_routing
from modular_kernel.perf_model.compare import (
    MAX_ACCURATE_ERROR,
    compare,
    read_measurements,
    summarize,
)
from modular_kernel.perf_model.error_tables import (
    compute_experts_errors,
    compute_model_errors,
    format_error_tables,
)
from modular_kernel.perf_model.estimate import (
    distribute_over_ranks,
    estimate_pairings,
    machines_with_all_packages,
)
from modular_kernel.perf_model.exchange_time import (
    DEEPEP_HT,
    DEEPEP_LL,
    DEEPEP_V2,
    TRAFFIC_BY_PART,
    DirectionModel,
    Traffic,
    exchange_time,
    network_rows,
    row_bytes,
)
from modular_kernel.perf_model.experts_time import experts_time
from modular_kernel.perf_model.hardware import Cluster, Gpu, Link
from modular_kernel.perf_model.load import (
    ONE_GROUP,
    EstimatedLoad,
    Groups,
    compute_inclusion_probabilities,
    rank_load,
)
from modular_kernel.perf_model.recommend import TYPICAL_ERROR_RATIO
from modular_kernel.spec.problem import Problem

ROOT = Path(__file__).parents[2]
DATA = Path(perf_model.__file__).with_name("data")
LAYERS_FILE = DATA / "h200-layers.json"
EXCHANGE_FILE = DATA / "h200-exchange.json"
LIBRARY_EXCHANGE_FILE = DATA / "h200-exchange-libraries.json"
PUBLISHED_EXCHANGE_FILE = DATA / "published-exchange.json"
DEEPSEEK = Problem(128, 7168, 2048, 256, 8)
ROUTING_KINDS = ["uniform", "zipf0.6", "zipf1.2", "hot1", "hot3"]


@pytest.mark.parametrize("kind", ROUTING_KINDS)
def test_inclusion_probabilities_match_drawn_routing(kind: str) -> None:
    experts, top_k = 32, 4
    routing_kind = RoutingKind.parse(kind)
    probabilities = compute_inclusion_probabilities(experts, top_k, routing_kind)
    assert math.isclose(sum(probabilities), top_k, rel_tol=1e-6)
    assert list(probabilities) == sorted(probabilities, reverse=True)
    generator = torch.Generator().manual_seed(0)
    problem = Problem(20_000, 1, 1, experts, top_k)
    ids = draw_routing(problem, routing_kind, generator).topk_ids_TK.long()
    frequencies = (
        torch.bincount(ids.flatten(), minlength=experts).sort(descending=True).values / 20_000
    )
    assert (frequencies - torch.tensor(probabilities)).abs().max() < 0.04


@pytest.mark.parametrize(("world", "tokens"), [(1, 5), (2, 16), (4, 3), (8, 64)])
def test_uniform_loads_match_counted_loads(world: int, tokens: int) -> None:
    experts, top_k, trials = 64, 4, 200
    kind = RoutingKind("uniform")
    load = rank_load(experts=experts, top_k=top_k, world_size=world, tokens=tokens, kind=kind)
    generator = torch.Generator().manual_seed(0)
    problem = Problem(tokens * world, 1, 1, experts, top_k)
    fullest, touched, hit_rate = 0.0, 0.0, 0.0
    for _ in range(trials):
        ids = draw_routing(problem, kind, generator).topk_ids_TK.long()
        ranks = ids // (experts // world)
        fullest += float(torch.bincount(ranks.flatten(), minlength=world).max()) / trials
        touched += float(len(ids[ranks == 0].unique())) / trials
        hit_rate += float((ranks == 0).any(1).float().mean()) / trials
    assert load.pairs == pytest.approx(fullest, rel=0.05)
    assert load.touched == pytest.approx(touched, rel=0.06)
    assert load.rank_probability == pytest.approx(hit_rate, rel=0.05)


@given(
    st.sampled_from(ROUTING_KINDS),
    st.sampled_from([1, 2, 4, 16]),
    st.integers(1, 500),
    st.integers(1, 8),
)
@settings(deadline=None, max_examples=40)
def test_loads_are_within_their_bounds(kind: str, world: int, tokens: int, top_k: int) -> None:
    routing_kind = RoutingKind.parse(kind)
    load = rank_load(experts=32, top_k=top_k, world_size=world, tokens=tokens, kind=routing_kind)
    assert 0 < load.touched <= 32 / world + 1e-9
    assert load.touched <= load.pairs + 1e-9
    assert tokens * top_k - 1e-6 <= load.pairs
    assert 0 < load.rank_probability <= load.fullest_rank_probability <= 1
    assert load.tokens <= tokens * world


def test_skew_increases_the_maximum_load() -> None:
    def compute_pairs(kind: str) -> float:
        routing_kind = RoutingKind.parse(kind)
        return rank_load(experts=256, top_k=8, world_size=8, tokens=256, kind=routing_kind).pairs

    assert compute_pairs("uniform") < compute_pairs("zipf0.6") < compute_pairs("zipf1.2")
    assert (
        compute_pairs("hot1") > 8 * 256 + 7 * 256 * 0.9
    )  # the hot expert of every token is on one rank


def test_the_slowest_link_determines_the_time_of_an_exchange() -> None:
    part = Traffic(
        "all", DirectionModel(10e-6, 0.5), DirectionModel(20e-6, 0.25), "by hand", between=0.5
    )
    cluster = Cluster(Gpu(), Link(100e9, 1e-6), Link(10e9, 5e-6), per_host=2)
    problem = replace(distribute_over_ranks(DEEPSEEK, 2), tokens=1000, hidden=1000)
    load = rank_load(experts=256, top_k=8, world_size=2, tokens=1000, kind=RoutingKind("uniform"))
    two_ranks = exchange_time(problem, part, load, cluster)
    # A rank sends 1000 rows of 2000 bytes to the other rank of its host.
    assert two_ranks.dispatch == pytest.approx(10e-6 + 1e-6 + 2e6 / (100e9 * 0.5))
    assert two_ranks.combine == pytest.approx(20e-6 + 1e-6 + 2e6 / (100e9 * 0.25))
    four_ranks = exchange_time(distribute_over_ranks(problem, 4), part, load, cluster)
    # A rank sends rows to one rank of its host, and to two ranks of the other host. The link to the
    # other host has a tenth of the bandwidth.
    assert four_ranks.dispatch == pytest.approx(10e-6 + 5e-6 + 2 * 2e6 / (10e9 * 0.5))
    # With a fast link between hosts, the link inside the host determines the time.
    fast_network = replace(cluster, between=Link(1e15, 5e-6))
    four_ranks = exchange_time(distribute_over_ranks(problem, 4), part, load, fast_network)
    assert four_ranks.dispatch == pytest.approx(10e-6 + 5e-6 + 2e6 / (100e9 * 0.5))
    assert exchange_time(distribute_over_ranks(problem, 1), part, load, cluster).dispatch == 0


def test_two_hop_exchange_equals_a_manual_computation() -> None:
    """There are two hosts of two ranks. A rank needs half of the tokens, a host three quarters."""
    problem = distribute_over_ranks(Problem(1000, 500, 64, 8, 2), 4)
    load = EstimatedLoad(0, 0, 0, 0.5, 0.5, 0.75)
    cluster = Cluster(inside=Link(100e9, 1e-6), between=Link(10e9, 5e-6), per_host=2)
    part = Traffic(
        "host",
        DirectionModel(10e-6, 0.5),
        DirectionModel(20e-6, 0.25),
        "by hand",
        between=0.5,
        max_pieces=4,
    )
    small = exchange_time(problem, part, load, cluster)
    between, inside = 1000 * 0.75 * 1000, 4000 * 0.5 / 2 * 1000
    assert small.dispatch_bytes == small.combine_bytes == between
    network_seconds = between / (10e9 * 0.5)
    assert small.dispatch == pytest.approx(10e-6 + 5e-6 + network_seconds + inside / (100e9 * 0.5))
    # The tokens are divided into two pieces. While one piece makes its second hop, the other piece
    # makes its first hop. Only half of the shorter hop is not hidden.
    large = exchange_time(problem.with_tokens(2000), part, load, cluster)
    hops = 2 * network_seconds, 2 * inside / (100e9 * 0.5)
    assert large.dispatch == pytest.approx(10e-6 + 5e-6 + max(hops) + min(hops) / 2)
    one_host = exchange_time(problem, part, load, replace(cluster, per_host=4))
    assert one_host.dispatch == pytest.approx(
        10e-6 + 1e-6 + 4000 * 0.5 * 3 / 4 * 1000 / (100e9 * 0.5)
    )


def test_row_bytes_follow_the_scheme() -> None:
    part = TRAFFIC_BY_PART["SymmMemPrepareAndFinalize"]
    assert row_bytes(DEEPSEEK, part) == 14336
    assert row_bytes(replace(DEEPSEEK, quant="fp8_w8a8_block"), part) == 7168 + 56 * 4
    assert row_bytes(replace(DEEPSEEK, quant="fp8_w8a8_channel"), part) == 7168 + 4
    assert row_bytes(replace(DEEPSEEK, quant="mxfp4_w4a16"), part) == 14336


def test_experts_time_is_at_least_the_roofline() -> None:
    for tokens in (1, 16, 1024, 16384):
        load = rank_load(
            experts=256, top_k=8, world_size=1, tokens=tokens, kind=RoutingKind("uniform")
        )
        time = experts_time(DEEPSEEK.with_tokens(tokens), load, Gpu())
        weights = load.touched * 3 * 7168 * 2048 * 2 / 4.8e12
        products = 2 * tokens * 8 * 3 * 7168 * 2048 / 791.6e12
        assert time.seconds > max(weights, products)
        assert time.bound == ("compute" if tokens > 4096 else "memory")


def test_the_model_is_within_a_quarter_of_every_measured_time() -> None:
    files = LAYERS_FILE, EXCHANGE_FILE, LIBRARY_EXCHANGE_FILE, PUBLISHED_EXCHANGE_FILE
    comparisons = compare([time for file in files for time in read_measurements(file)])
    worlds = {c.measured.problem.parallel.world_size for c in comparisons if not c.measured.fitted}
    assert {1, 2, 4, 32, 64, 128} <= worlds
    predicted = [c for c in comparisons if not (c.measured.fitted or c.measured.eager)]
    assert len(predicted) >= 90
    assert [(c.measured.label, c.error) for c in predicted if not c.is_accurate] == []
    summaries = {summary.group: summary for summary in summarize(comparisons)}
    assert summaries["  1 GPU, predicted"].count == 54
    assert summaries["  1 GPU, predicted"].mean < 0.1
    counts = summaries["  2 GPUs, predicted"].count, summaries["  4 GPUs, predicted"].count
    assert counts == (16 + 38, 16 + 28)
    eager = [c for c in comparisons if c.measured.eager]
    assert sum(c.is_accurate for c in eager) >= 0.75 * len(eager)


@pytest.mark.parametrize("world", [2, 8, 16, 64])
def test_estimates_are_of_valid_pairs(world: int) -> None:
    problem = distribute_over_ranks(
        replace(DEEPSEEK, quant="fp8_w8a8_block"), world, Cluster().per_host
    )
    first, second = (
        estimate_pairings(problem, Cluster(), m) for m in machines_with_all_packages(Cluster())
    )
    names = {estimate.prepare_finalize for estimate in first.estimates}
    assert ("SymmMemPrepareAndFinalize" in names) is (world <= 8)
    assert names >= {"TorchAll2AllPrepareAndFinalize", DEEPEP_LL, DEEPEP_HT}
    assert DEEPEP_V2 not in names
    assert DEEPEP_V2 in {estimate.prepare_finalize for estimate in second.estimates}
    times = [estimate.seconds for estimate in first.estimates]
    assert times == sorted(times)
    weights = pytest.approx(256 / world * 3 * 7168 * 2048)
    assert all(estimate.memory.weights == weights for estimate in first.estimates)
    assert any("no measured exchange" in why for _, why in first.unestimated)


def test_rows_per_rank_are_fewer_than_per_expert() -> None:
    estimates = {
        e.prepare_finalize: e
        for e in estimate_pairings(distribute_over_ranks(DEEPSEEK, 4), Cluster()).estimates
    }
    symm_mem_bytes = estimates["SymmMemPrepareAndFinalize"].exchange.dispatch_bytes
    # 4096 tokens are sent as 11,096 rows to other ranks. 128 tokens are sent as 1/32 of these rows.
    assert symm_mem_bytes == pytest.approx(128 * 11096 / 4096 * 14336, rel=0.001)
    assert estimates[DEEPEP_LL].exchange.dispatch_bytes > 2 * symm_mem_bytes
    assert (
        estimates["AllGatherReduceScatterPrepareAndFinalize"].exchange.dispatch_bytes
        > symm_mem_bytes
    )
    # DeepEP HT also counts the rows that a rank sends to itself.
    deepep_ht_bytes = estimates[DEEPEP_HT].exchange.dispatch_bytes
    assert deepep_ht_bytes == pytest.approx(symm_mem_bytes * 4 / 3)


@pytest.mark.parametrize(
    ("world", "groups", "flat", "by_host"),
    [
        (16, ONE_GROUP, 3.26, 1.00),
        (64, ONE_GROUP, 6.72, 4.63),
        (256, ONE_GROUP, 7.75, 7.04),
        (16, Groups(8, 4), 2.67, 0.96),
        (64, Groups(8, 4), 6.44, 3.18),
        (256, Groups(8, 4), 7.75, 6.39),
    ],
)
def test_network_rows_equal_expected_values(
    world: int, groups: Groups, flat: float, by_host: float
) -> None:
    cluster, problem = Cluster(), distribute_over_ranks(DEEPSEEK, world, 8)
    load = rank_load(experts=256, top_k=8, world_size=world, tokens=128,
                     kind=RoutingKind("uniform"), per_host=8, groups=groups)  # fmt: skip
    rows = [
        network_rows(problem, part, load, cluster)
        for part in (TRAFFIC_BY_PART["TorchAll2AllPrepareAndFinalize"], TRAFFIC_BY_PART[DEEPEP_HT])
    ]
    assert rows == pytest.approx([flat, by_host], abs=0.005)


@pytest.mark.parametrize("groups", [Groups(8, 4), Groups(4, 1), Groups(2, 2), Groups(16, 3)])
def test_group_limited_probabilities_match_drawn_groups(groups: Groups) -> None:
    """There are 8 hosts of 2 ranks. A group covers one, two or four hosts, or half a host."""
    generator, trials = torch.Generator().manual_seed(0), 4000
    experts, top_k, world = 64, 4, 16
    score = torch.rand(trials, experts, generator=generator)
    kept_groups = torch.rand(trials, groups.count, generator=generator).topk(groups.kept).indices
    is_group_kept = torch.zeros(trials, groups.count).scatter(1, kept_groups, 1)
    score *= is_group_kept.repeat_interleave(experts // groups.count, 1)
    ids = score.topk(top_k).indices
    load = rank_load(experts=experts, top_k=top_k, world_size=world, tokens=9,
                     kind=RoutingKind("uniform"), per_host=2, groups=groups)  # fmt: skip
    for probability, size in (
        (load.rank_probability, experts // world),
        (load.host_probability, experts // 8),
    ):
        hits = torch.stack([(ids // size == i).any(1) for i in range(experts // size)])
        assert probability == pytest.approx(float(hits.float().mean()), rel=0.02)


def test_second_hop_of_two_hosts_has_half_of_all_rows() -> None:
    part = Traffic(
        "host", DirectionModel(10e-6, 0.5), DirectionModel(20e-6, 0.25), "by hand", between=0.5
    )
    cluster = Cluster(Gpu(), Link(100e9, 1e-6), Link(10e9, 5e-6), per_host=2)
    problem = replace(distribute_over_ranks(DEEPSEEK, 4, 2), tokens=1000, hidden=1000)
    load = rank_load(experts=256, top_k=8, world_size=4, tokens=1000,
                     kind=RoutingKind("uniform"), per_host=2)  # fmt: skip
    # Between hosts, a rank sends its rows for the other host. Inside a host, a rank sends the rows
    # that the other rank needs, which are half of the rows of all 4 ranks.
    network = 1000 * load.host_probability * 2000 / (10e9 * 0.5)
    inside = 1000 * 4 * load.rank_probability / 2 * 2000 / (100e9 * 0.5)
    times = exchange_time(problem, part, load, cluster)
    assert times.dispatch == pytest.approx(15e-6 + max(network, inside))
    serial = exchange_time(problem, replace(part, max_pieces=1), load, cluster)
    assert serial.dispatch == pytest.approx(15e-6 + network + inside)
    two_ranks = replace(distribute_over_ranks(problem, 2))
    assert network_rows(two_ranks, part, load, cluster) == 0


def test_caveat_of_a_library() -> None:
    problem = distribute_over_ranks(replace(DEEPSEEK, quant="fp8_w8a8_block"), 64, 8)

    def get_caveat(tokens: int) -> str:
        estimates = estimate_pairings(problem.with_tokens(tokens), Cluster()).estimates
        return next(e.caveat for e in estimates if e.prepare_finalize == DEEPEP_LL)

    assert get_caveat(256) == ""
    assert get_caveat(512) == "made for at most 256 tokens on each rank"
    refused = estimate_pairings(distribute_over_ranks(problem, 24, 8), Cluster()).refused
    verdict = next(v for v in refused if v.pairing == f"{DEEPEP_HT} x TritonExperts")
    assert any(r.rule == "world_size" and r.got == "24" for r in verdict.rejections)


@pytest.mark.parametrize(
    ("groups", "kind"),
    [(Groups(3, 1), "uniform"), (Groups(8, 9), "uniform"), (Groups(64, 1), "uniform"),
     (Groups(8, 0), "uniform"), (Groups(8, 4), "zipf")],
    ids=str,
)  # fmt: skip
def test_invalid_groups_are_refused(groups: Groups, kind: str) -> None:
    routing_kind = RoutingKind.parse(kind)
    with pytest.raises(ConfigurationError, match="groups"):
        rank_load(experts=256, top_k=8, world_size=8, tokens=1, kind=routing_kind, groups=groups)


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"schema": "mk-exchange/1"}', '{"schema": "mk-exchange/1", "rows": [{}]}',
     '{"schema": "mk-exchange/1", "rows": [7]}', "[" * 100_000, '{"rows": [{"peer": []}]}'],
    ids=lambda text: text[:40] or "nothing",
)  # fmt: skip
def test_files_in_other_formats_raise(tmp_path: Path, content: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(content)
    with pytest.raises(ConfigurationError, match="measured rows"):
        read_measurements(path)
    with pytest.raises(ConfigurationError, match="measured rows"):
        read_measurements(tmp_path / "none.json")


def test_invalid_world_sizes_are_refused() -> None:
    with pytest.raises(ConfigurationError):
        distribute_over_ranks(DEEPSEEK, 257)  # there are 256 experts, so a rank would have none
    with pytest.raises(ConfigurationError, match="link bandwidth"):
        Link(0)
    with pytest.raises(ConfigurationError, match="link latency"):
        Link(1, float("nan"))
    with pytest.raises(ConfigurationError, match="rows of a traffic"):
        Traffic("some", DirectionModel(0, 1), DirectionModel(0, 1), "")


def run_plan(capsys: pytest.CaptureFixture[str], *options: str) -> CommandResult:
    return run_mk(capsys, "plan", *options)


def test_plan_prints_the_errors_of_the_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, _ = run_plan(
        capsys, "--compare", str(LAYERS_FILE), "--compare", str(EXCHANGE_FILE), "--json"
    )
    assert code == 0
    assert len(json.loads(out)["cells"]) == 90 + 112
    rows = json.loads(PUBLISHED_EXCHANGE_FILE.read_text())
    rows["rows"] = [rows["rows"][2] | {"us": 50.0}]
    (tmp_path / "off.json").write_text(json.dumps(rows))
    code, out, _ = run_plan(capsys, "--compare", str(tmp_path / "off.json"))
    assert code == 1
    assert "0 of 1 within 25%" in out


@pytest.mark.parametrize(
    "options",
    [
        "--groups 3 --machine 8xh200",
        "--machine 0xh200",
        "--machine 8xh200,x",
        "--link 0",
        "--net-latency -1",
        "--local-experts 4",
        "--phase both",
        "--layers 0",
    ],
)
def test_invalid_options_exit_with_2(capsys: pytest.CaptureFixture[str], options: str) -> None:
    code, _, err = run_plan(capsys, "--model", "deepseek-v3", *options.split())
    assert code == 2
    assert "error: " in err


@pytest.mark.parametrize(
    "options",
    ["--model mixtral-8x7b", "--tokens 5", "--machine 8xh200", "--prepared", "--peak 100"],
)
def test_an_option_that_a_comparison_would_ignore_is_refused(
    capsys: pytest.CaptureFixture[str], options: str
) -> None:
    result = run_mk(capsys, "plan", "--compare", str(LAYERS_FILE), *options.split())
    name = options.split()[0]
    assert (result.code, result.out) == (2, "")
    assert (
        result.err == f"error: {name}: got {name} together with --compare, need only one of them\n"
    )


def test_sizing_page_has_the_errors_of_the_model() -> None:
    page = (ROOT / "docs" / "sizing.md").read_text(encoding="utf-8")
    assert f"<!-- errors:begin -->\n\n{format_error_tables()}\n\n<!-- errors:end -->" in page
    typical = {row.part: row.mean for row in compute_experts_errors()}["TritonExperts"]
    assert typical == pytest.approx(TYPICAL_ERROR_RATIO - 1, abs=0.01)
    exchanges = [row for row in compute_model_errors() if row.kind == "predicted"]
    assert max(row.worst for row in exchanges) <= MAX_ACCURATE_ERROR
