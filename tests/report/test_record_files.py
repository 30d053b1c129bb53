"""Writing records to pipes and through symbolic links."""

import os
from pathlib import Path
from typing import Any

import pytest

from modular_kernel.bench.all2all.records import ExchangeReport
from modular_kernel.measure.records import Report


@pytest.mark.parametrize("report_class", [ExchangeReport, Report])
def test_pipes_and_links_are_not_replaced(
    report_class: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_class, "to_json", lambda _self: "{}")
    report = object.__new__(report_class)
    pipe, file, link = (tmp_path / name for name in ("pipe", "file", "link"))
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    link.symlink_to(file)
    report.write(pipe)
    report.write(link)
    assert pipe.is_fifo()
    assert os.read(reader, 10) == b"{}\n"
    os.close(reader)
    assert link.is_symlink()
    assert file.read_text(encoding="utf-8") == "{}\n"
