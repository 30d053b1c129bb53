"""The exchange of docs/add-an-exchange.md, installed and verified over two ranks."""

from pathlib import Path

import pytest
from doc_blocks import module_source
from third_party import ROOT, install, mk

SOURCE = module_source(ROOT / "docs/add-an-exchange.md", "my_exchange/__init__.py")
PAIR = ("--pf-type", "MyExchange", "--experts-type", "TorchExperts", "--world-size", "2")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    return tmp_path


def test_exchange_of_the_guide_passes_its_cases(site: Path) -> None:
    install(site, "my_exchange", SOURCE)
    code, report = mk("test", *PAIR, "--level", "smoke")
    (pair,) = report["pairs"]
    assert pair["failures"] == []
    assert pair["cases"] >= 8
    assert code == 0


def test_a_defect_is_reported_in_one_line(site: Path) -> None:
    defective_source = SOURCE.replace("start = sum(counts[: self.manager.rank])", "start = 0")
    assert defective_source != SOURCE
    install(site, "my_exchange", defective_source)
    case = ("--tokens", "6", "--hidden", "48", "--intermediate", "32", "--experts", "4")
    code, report = mk("test", *PAIR, "--one", *case, "--top-k", "2", "--dtype", "float32")
    assert code == 1
    (failure,) = report["pairs"][0]["failures"]
    assert failure["failures"][-1].startswith("rank 1 differs in ")
