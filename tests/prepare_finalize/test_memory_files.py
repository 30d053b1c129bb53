"""Shared memory files: those of killed ranks are removed by later ones, those in use are kept."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from prepare_finalize.rendezvous import memory_files
from prepare_finalize.rendezvous.memory_files import memory_file


def test_files_of_killed_ranks_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_files, "SHARED_MEMORY_DIR", tmp_path)
    ends = (
        "import os, sys; from pathlib import Path; from prepare_finalize.rendezvous import "
        "memory_files as m; m.SHARED_MEMORY_DIR = Path(sys.argv[1]); "
        "kept = [m.memory_file('host'), m.memory_file('block')]; "
        "[each.__enter__() for each in kept]; os._exit(1)"
    )
    subprocess.run([sys.executable, "-c", ends, str(tmp_path)], check=False, timeout=120)
    left = sorted(tmp_path.iterdir())
    assert [path.name.rsplit("-", 1)[0] for path in left] == [
        "modular_kernel-block",
        "modular_kernel-host",
    ]
    other = tmp_path / "modular_kernel-notes"
    other.touch()
    past = time.time() - 3600
    with memory_file("host") as used:
        assert {*left} <= {*tmp_path.iterdir()}  # young: their locks may be still to come
        for path in (*left, other, Path(used.name)):
            os.utime(path, (past, past))
        with memory_file("block") as mine:
            assert {*tmp_path.iterdir()} == {other, Path(used.name), Path(mine.name)}
    assert [*tmp_path.iterdir()] == [other]
