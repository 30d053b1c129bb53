"""`mk exchange` times correct transports, continues after failures, and computes floors."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from modular_kernel.bench.all2all import parts as exchange_parts
from modular_kernel.bench.all2all.cases import (
    BF16_BOUND,
    ExchangeCase,
    ExchangeInputs,
    RankContext,
    TransportLink,
    dequantize,
    load_transports,
    max_row_error,
)
from modular_kernel.bench.all2all.parts import PartTransport
from modular_kernel.bench.all2all.records import ExchangeReport, ExchangeRow, make_row, markdown
from modular_kernel.bench.all2all.run import Repeats, TransportJob, run
from modular_kernel.catalog import this_machine
from modular_kernel.cli import main, output
from modular_kernel.errors import BrokenPartError, ConfigurationError
from modular_kernel.spec.problem import IdSpace, Machine, Reduce
from modular_kernel.tensors import DispatchedRouting, StandardTokens
from modular_kernel.testing.ranks.pool import RankPool

ROOT = Path(__file__).resolve().parents[2]
CELL = ExchangeCase(2, 5, 8, hidden=128, experts=8, top_k=2)
REPEATS = Repeats(2, 2)

PEERS = """
import os, time, torch
import torch.distributed as dist
from modular_kernel.bench.all2all.cases import Transport

class Whole(Transport):
    '''Sends all rows to every rank. Each rank already has the sums for its own rows.'''
    name = "whole"

    def open(self, cell, context):
        self.context = context

    def load(self, given):
        self.x = given.x_TH
        self.all = torch.empty(2 * len(self.x), self.x.shape[1], dtype=self.x.dtype)

    def dispatch(self):
        dist.all_gather_into_tensor(self.all, self.x, group=self.context.group)

    def identity(self):
        start = self.context.rank * len(self.x)
        self.y = self.all[start : start + len(self.x)].clone()

    def combine(self):
        return self.y.clone()

class OneRowLost(Whole):
    name = "one row lost"
    def combine(self):
        self.y[0] *= 1 - (self.context.rank == 1) / 16
        return self.y.clone()

class Raises(Whole):
    name = "raises on one rank"
    def dispatch(self):
        super().dispatch()
        if self.context.rank == 1 and len(self.x) > 2:
            raise ValueError("broken here")

class Hangs(Whole):
    name = "hangs"
    def dispatch(self):
        if len(self.x) > 2:
            time.sleep(60)
        super().dispatch()

class HangsAtOnce(Hangs):
    name = "hangs at once"
    def open(self, cell, context):
        time.sleep(60)

class Dies(Whole):
    name = "dies"
    def open(self, cell, context):
        if context.rank == 1:
            os._exit(7)
        super().open(cell, context)

class Refuses(Whole):
    name = "refuses"
    def refusal(self, cell):
        return "not today"

def transports():
    return [Whole(), OneRowLost(), Raises(), Hangs(), HangsAtOnce(), Dies(), Refuses()]
"""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[ExchangeRow, ...]]:
    """Run every transport of PEERS, and then the correct transport again."""
    path = tmp_path_factory.mktemp("peers") / "peers.py"
    path.write_text(PEERS, encoding="utf-8")
    names = [peer.name for peer in load_transports(path)]
    cells = tuple(
        ExchangeCase(2, tokens, 8, hidden=128, experts=8, top_k=2) for tokens in (2, 5, 8)
    )
    cells += (ExchangeCase(2, 1, 4, hidden=128, experts=8, top_k=2),)  # other buffers
    jobs = [
        TransportJob(name, "peer", cells, Machine(), path=path, seconds=1.5)
        for name in [*names, "whole"]
    ]
    results = run(jobs, lambda: RankPool(2, grace=0.5), link=TransportLink(), repeats=REPEATS)
    *first_results, repeated = results
    return {**dict(zip(names, first_results, strict=True)), "again": repeated}


@pytest.mark.parametrize("name", ["whole", "again"])
def test_correct_transports_are_timed(rows: dict[str, tuple[ExchangeRow, ...]], name: str) -> None:
    for row in rows[name]:
        assert row.status == "ok", row
        assert (row.error, row.mode) == (0.0, "cpu")
        assert row.pair_us > row.dispatch_us > 0


def test_wrong_row_on_one_rank_is_detected(
    rows: dict[str, tuple[ExchangeRow, ...]],
) -> None:
    for row in rows["one row lost"]:
        assert row.status == "wrong"
        assert row.error == pytest.approx(1 / 16, rel=0.1)
        assert row.pair_us is None


@pytest.mark.parametrize(
    ("name", "statuses", "reason"),
    [
        ("raises on one rank", ["ok", "failed", "skipped", "ok"], "ValueError: broken here"),
        ("hangs", ["ok", "failed", "skipped", "ok"], "no answer within 1.5 s"),
        ("hangs at once", ["failed", "skipped", "skipped", "skipped"], "no answer within 1.5 s"),
        ("dies", ["failed", "skipped", "skipped", "failed"], "died: exit code 7"),
        ("refuses", ["refused"] * 4, "not today"),
    ],
)
def test_results_before_a_failure_are_kept(
    rows: dict[str, tuple[ExchangeRow, ...]], name: str, statuses: list[str], reason: str
) -> None:
    assert [row.status for row in rows[name]] == statuses
    failed_row = next(row for row in rows[name] if row.status in ("failed", "refused"))
    assert reason in failed_row.note


def test_nothing_starts_after_the_deadline() -> None:
    def make_idle_pool() -> object:
        class Idle:
            world_size = 2

            def close(self) -> None:
                pass

        return Idle()

    job = TransportJob("x", "peer", (CELL,), Machine())
    ((row,),) = run([job], make_idle_pool, link=TransportLink(), repeats=REPEATS, start_limit_s=-1)
    assert (row.status, row.note) == ("skipped", "the deadline had passed")


def test_remote_rows_are_counted_once_per_token_and_rank() -> None:
    cell = ExchangeCase(3, 40, 40, hidden=256, experts=6, top_k=3)
    expected = [[0] * 3 for _ in range(3)]
    for source in range(3):
        for ids in cell.routing(source).topk_ids_TK.tolist():
            for target in {expert // 2 for expert in ids}:
                expected[source][target] += 1
    assert cell.rows_WW == tuple(map(tuple, expected))
    received, sent = cell.remote_rows
    assert sent == max(sum(row) - row[rank] for rank, row in enumerate(expected))
    assert received == max(sum(row[r] for row in expected) - expected[r][r] for r in range(3))
    assert torch.allclose(cell.routing(1).topk_weights_TK.sum(1), torch.ones(40))


@pytest.mark.parametrize("first", [0, 1])
def test_earliest_reason_is_reported(first: int) -> None:
    """If one rank fails, the broken connection is also reported as an error by the other rank."""
    notes = ["RuntimeError: connection closed", "RuntimeError: connection closed"]
    notes[first] = "ValueError: broken here"
    outcomes = [
        {"status": "failed", "note": note, "error": None, "at": 8.0 if rank == first else 8.5}
        for rank, note in enumerate(notes)
    ]
    assert make_row("x", "peer", CELL, outcomes, TransportLink()).note == "ValueError: broken here"
    process_exit = {"status": "failed", "note": "died: exit code 7", "error": None}
    assert (
        make_row("x", "peer", CELL, [*outcomes, process_exit], TransportLink()).note
        == "died: exit code 7"
    )


def test_bytes_and_floors_equal_values_computed_by_hand() -> None:
    fp8 = ExchangeCase(2, 4096, 4096, quant="fp8_w8a8_block")
    assert fp8.row_bytes == 7168 + 4 * 56
    assert ExchangeCase(2, 1, 1).row_bytes == 14336
    assert TransportLink(393e9, 6e-6).floor_us(58_000_000) == pytest.approx(147.6 + 6, abs=0.1)
    common = {"status": "ok", "note": "", "error": 0.0, "mode": "graph", "spread": 0.1}
    outcomes = [
        {**common, "dispatch_us": us, "combine_us": 2.0, "pair_us": 12.0} for us in (10.0, 20.0)
    ]
    row = make_row("x", "peer", CELL, outcomes, TransportLink())
    assert (row.dispatch_us, row.combine_us) == (20.0, 2.0)
    assert row.dispatch_gbs == pytest.approx(CELL.remote_rows[0] * 256 / 20e-6 / 1e9)


def test_max_row_error_is_the_error_of_the_worst_row() -> None:
    x = torch.randn(4, 64).bfloat16()
    out = x.clone()
    out[2] = 0
    assert max_row_error(out, x) == 1.0
    out[2] = float("nan")
    assert max_row_error(out, x) == max_row_error(x[:2], x) == float("inf")


def test_dequantize_applies_scales_of_groups_rows_and_tensors() -> None:
    rows = torch.ones(2, 6)
    by_group = dequantize(rows, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), 4)
    assert by_group.tolist() == [[1, 1, 1, 1, 2, 2], [3, 3, 3, 3, 4, 4]]
    assert dequantize(rows, torch.tensor([[2.0], [3.0]]), 4)[:, 5].tolist() == [2, 3]
    assert dequantize(rows, torch.tensor([2.0]), 4)[1, 5] == 2


@pytest.mark.parametrize(
    ("text", "error"),
    [("raise SystemExit(3)", BrokenPartError), ("def transports(): return 5", ConfigurationError)],
)
def test_errors_name_the_invalid_peer_file(
    text: str, error: type[Exception], tmp_path: Path
) -> None:
    path = tmp_path / "broken.py"
    path.write_text(text)
    with pytest.raises(error, match=r"broken\.py"):
        load_transports(path)


def mk(*arguments: str) -> int:
    """Run `mk exchange` without line wrapping."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "_DEFAULT_WIDTH", 10_000)
        with pytest.raises(SystemExit) as exit_info:
            main.run(["exchange", *arguments])
    assert isinstance(exit_info.value.code, int | None)
    return exit_info.value.code or 0


SIZES = ("--hidden", "128", "--experts", "8", "--top-k", "2", "--tokens-list", "1,6")
FEW_REPEATS = ("--replays", "2", "--rounds", "2", "--backend", "gloo")


def test_command_times_parts_and_peers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record, merged_record, page = tmp_path / "one.json", tmp_path / "both.json", tmp_path / "doc.md"
    peer = ("--peer", str(ROOT / "tools" / "exchange_peers.py"))
    assert mk(*SIZES, *FEW_REPEATS, *peer, "--json", str(record)) == 0
    captured = capsys.readouterr()
    report = ExchangeReport.from_json(record.read_text())
    by_name: dict[str, list[ExchangeRow]] = {}
    for row in report.rows:
        by_name.setdefault(row.transport, []).append(row)
    assert len(by_name) >= 5
    ours = [name for name, results in by_name.items() if results[0].origin == "ours"]
    running = [name for name in ours if all(row.status == "ok" for row in by_name[name])]
    assert "TorchAll2AllPrepareAndFinalize" in running
    assert {row.status for row in report.rows} <= {"ok", "refused"}
    assert [(r.tokens, r.capacity, r.quant) for r in by_name[running[0]]] == [
        (1, 6, "none"), (6, 6, "none"), (1, 6, "fp8_w8a8_block"), (6, 6, "fp8_w8a8_block"),
    ]  # fmt: skip
    loads = (
        "--load",
        str(record),
        "--load",
        str(record),
        "--json",
        str(merged_record),
        "--markdown",
        str(page),
    )
    assert mk(*loads) == 0
    assert len(json.loads(merged_record.read_text())["rows"]) == 2 * len(report.rows)
    assert page.read_text() == markdown(ExchangeReport.from_json(merged_record.read_text()))
    assert "| 6 | all_to_all_single, one row per rank |" in page.read_text()
    assert "| all_to_all_single, one row per rank | " in page.read_text()
    capsys.readouterr()
    assert mk("--load", str(record)) == 0
    table = capsys.readouterr().out
    interpreted = dict.fromkeys(row.transport for row in report.rows if row.mode == "interpreter")
    assert (
        f"ran in Triton's interpreter, times are meaningless: {', '.join(interpreted)}\n" in table
    ) is bool(interpreted)
    if torch.cuda.is_available():
        return
    assert table == captured.out
    assert "floor" not in table  # a floor needs the link of a GPU
    rows = [line.split()[:2] for line in table.splitlines()]
    for row in report.rows:  # each scheme has a table
        if row.origin == "ours" and row.status == "ok":
            assert rows.count([str(row.tokens), row.transport]) == 2
            assert f"{row.pair_us:.1f}" not in captured.err
    with_link = replace(report, environment={**report.environment, "link_gbs": 10.0})
    record.write_text(with_link.to_json())
    assert mk("--load", str(record)) == 0
    assert "floor" in capsys.readouterr().out


def test_invalid_options_are_bad_usage() -> None:
    assert mk("--world-size", "1") == 2
    assert mk("--only", "nobody", *FEW_REPEATS) == 2
    assert mk("--load", "/nowhere.json") == 2


SINGLE_RANK = RankContext(0, 1, None, torch.device("cpu"))


@pytest.mark.parametrize("quant", ["none", "fp8_w8a8_block", "fp8_w8a8_channel"])
@pytest.mark.parametrize("name", ["BatchedPrepareAndFinalize", "MoEPrepareAndFinalizeNoEP"])
def test_identity_experts_return_the_inputs(name: str, quant: str) -> None:
    cell = ExchangeCase(1, 7, 9, hidden=256, experts=6, top_k=3, quant=quant)
    transport = PartTransport(name, this_machine())
    assert transport.refusal(cell) == ""
    transport.open(cell, SINGLE_RANK)
    inputs = ExchangeInputs.from_case(cell, 0, SINGLE_RANK.device)
    transport.load(inputs)
    transport.dispatch()
    transport.identity()
    assert max_row_error(transport.combine(), inputs.x_TH) <= cell.bound
    transport._output[..., 5] *= 2  # column 5 of every row
    assert max_row_error(transport.combine(), inputs.x_TH) > BF16_BOUND
    transport.close()


def test_rows_without_a_local_expert_are_not_read() -> None:
    routing = DispatchedRouting(
        topk_weights_TK=torch.tensor([[0.25, 0.5], [9.0, 9.0], [0.75, 9.0]]),
        topk_ids_TK=torch.tensor([[0, 3], [-1, -1], [2, 4]]),
        space=IdSpace.LOCAL,
        num_experts=4,
        expert_map=None,
        invalid_ids=torch.zeros(1, dtype=torch.int32),
    )
    x = torch.ones(3, 4).bfloat16()
    x[1] = torch.nan
    tokens = StandardTokens(x, routing)
    assert exchange_parts._compute_identity_output(tokens, 1, Reduce.NOOP)[:, 0].tolist() == [
        0.75,
        0,
        0.75,
    ]
    output = exchange_parts._compute_identity_output(tokens, 1, Reduce.CONTIGUOUS)
    assert output[..., 0].tolist() == [[1, 1], [0, 0], [1, 0]]
    mapped = replace(
        routing, space=IdSpace.GLOBAL, expert_map=torch.tensor([-1, 0, 1, 2], dtype=torch.int32)
    )
    output = exchange_parts._compute_identity_output(
        replace(tokens, routing=mapped), 1, Reduce.CONTIGUOUS
    )
    assert output[..., 0].tolist() == [[0, 1], [0, 0], [1, 0]]


def test_batched_parts_refuse_large_capacities() -> None:
    transport = PartTransport("BatchedPrepareAndFinalize", Machine())
    assert "512 at most" in transport.refusal(ExchangeCase(1, 1, 4096))
    assert transport.refusal(ExchangeCase(1, 1, 512)) == ""


def test_part_without_compatible_experts_is_refused() -> None:
    transport = PartTransport("TorchAll2AllPrepareAndFinalize", Machine())
    assert "[world_size]" in transport.refusal(ExchangeCase(1, 1, 1))
