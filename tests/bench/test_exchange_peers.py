"""tools/exchange_peers.py, with stand-ins that have the signatures and shapes of the libraries."""

from pathlib import Path

import pytest

from modular_kernel.bench.all2all.cases import ExchangeCase, TransportLink
from modular_kernel.bench.all2all.records import ExchangeRow
from modular_kernel.bench.all2all.run import Repeats, TransportJob, run
from modular_kernel.spec.problem import Machine
from modular_kernel.testing.ranks.pool import RankPool

ROOT = Path(__file__).resolve().parents[2]
STAND_INS = Path(__file__).parents[1] / "helpers" / "stand_ins"
PEER_FILE = """
import sys
from importlib import import_module
sys.path[:0] = {folders!r}
for name in ("deep_ep", "pplx_kernels", "pplx_kernels.all_to_all", "moved_rows"):
    sys.modules.pop(name, None)
sys.path_importer_cache.clear()
import importlib.util
spec = importlib.util.spec_from_file_location("exchange_peers", {peers!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
transports = module.transports
"""
CASES = tuple(
    ExchangeCase(2, tokens, 6, hidden=256, experts=8, top_k=3, quant=quant)
    for quant in ("none", "fp8_w8a8_block")
    for tokens in (1, 6)
)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], ExchangeRow]:
    """Return the rows by (folder of the stand-in, name of the transport)."""
    results = {}
    folder = tmp_path_factory.mktemp("peers")
    jobs = []
    for library, names in (
        (
            "v1",
            [
                f"DeepEP V1 high throughput, {variant}"
                for variant in ("20 SMs", "20 SMs, quantizing", "96 SMs")
            ],
        ),
        ("v1", ["DeepEP V1 low latency", "DeepEP V2, 64 SMs"]),
        (
            "v2",
            [
                "DeepEP V2, 22 SMs",
                "DeepEP V2, 22 SMs, quantizing",
                "DeepEP V2, 64 SMs",
                "DeepEP V1 low latency",
            ],
        ),
        ("pplx", ["pplx-kernels"]),
    ):
        path = folder / f"{library}.py"
        folders = [str(STAND_INS / library), str(STAND_INS)]
        peers = str(ROOT / "tools" / "exchange_peers.py")
        path.write_text(PEER_FILE.format(folders=folders, peers=peers), encoding="utf-8")
        jobs += [
            (library, TransportJob(name, "peer", CASES, Machine(), path=path)) for name in names
        ]
    outcomes = run(
        [job for _, job in jobs],
        lambda: RankPool(2),
        link=TransportLink(),
        repeats=Repeats(1, 1),
    )
    for (library, job), transport_rows in zip(jobs, outcomes, strict=True):
        results[library, job.name] = transport_rows
    return results


@pytest.mark.parametrize(
    ("library", "name"),
    [
        ("v1", "DeepEP V1 high throughput, 20 SMs"),
        ("v1", "DeepEP V1 high throughput, 96 SMs"),
        ("v1", "DeepEP V1 low latency"),
        ("v2", "DeepEP V2, 22 SMs"),
        ("v2", "DeepEP V2, 64 SMs"),
        ("pplx", "pplx-kernels"),
    ],
)
def test_rows_return_unchanged(library: str, name: str, rows: dict) -> None:
    transport_rows = rows[library, name]
    assert [(row.status, row.note) for row in transport_rows if row.status != "ok"] == []
    assert all(0 <= row.error < (0.07 if row.quant != "none" else 0.008) for row in transport_rows)


@pytest.mark.parametrize(
    ("library", "name", "reason"),
    [
        ("v1", "DeepEP V2, 64 SMs", "this deep_ep is V1"),
        ("v2", "DeepEP V1 low latency", "this deep_ep is V2"),
    ],
)
def test_transports_of_another_version_are_refused(
    library: str, name: str, reason: str, rows: dict
) -> None:
    assert {(row.status, row.note) for row in rows[library, name]} == {("refused", reason)}


@pytest.mark.parametrize(
    ("library", "name"),
    [
        ("v1", "DeepEP V1 high throughput, 20 SMs, quantizing"),
        ("v2", "DeepEP V2, 22 SMs, quantizing"),
    ],
)
def test_quantizing_transports_quantize_in_each_dispatch(
    library: str, name: str, rows: dict
) -> None:
    for row in rows[library, name]:
        if row.quant == "none":
            assert (row.status, row.note) == ("refused", "bfloat16 rows are not quantized")
        else:
            assert row.status == "ok", row.note
            assert 0 < row.error < 0.07
