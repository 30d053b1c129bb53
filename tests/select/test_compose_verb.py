"""`mk compose`: refusals, and exit codes over ranks."""

import json
from pathlib import Path

import pytest
from test_compose import SMALL, run_compose


@pytest.mark.cpu
def test_graph_is_refused_on_a_cpu(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MK_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    code, out, _ = run_compose(capsys, *SMALL, "--graph", "--json")
    assert code == 1
    assert json.loads(out)["ok"] is False


def test_invalid_options_of_mk_compose_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MK_CACHE_DIR", str(tmp_path))
    code, _, err = run_compose(capsys, *SMALL, "--replicated")
    assert code == 2
    assert "--world-size" in err
    code, _, err = run_compose(capsys, *SMALL, "--budget", "-1")
    assert code == 2
    assert "budget: got -1" in err


def test_mk_compose_reports_the_choice_of_all_ranks(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MK_CACHE_DIR", str(tmp_path))
    options = ("--world-size", "2", "--backend", "gloo", "--json", "--budget", "60")
    code, out, _ = run_compose(capsys, *SMALL, *options)
    record = json.loads(out)
    assert (code, record["facts"]["world_size"]) == (0, "2")
    assert record["segments"][-1]["last"] == 8
