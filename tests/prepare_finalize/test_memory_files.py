"""Later ranks remove the shared memory files of killed ranks, and keep files in use."""

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
    program = (
        "import os, sys; from pathlib import Path; from prepare_finalize.rendezvous import "
        "memory_files as m; m.SHARED_MEMORY_DIR = Path(sys.argv[1]); "
        "files = [m.memory_file('host'), m.memory_file('block')]; "
        "[file.__enter__() for file in files]; os._exit(1)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False, timeout=120)
    remaining = sorted(tmp_path.iterdir())
    assert [path.name.rsplit("-", 1)[0] for path in remaining] == [
        "modular_kernel-block",
        "modular_kernel-host",
    ]
    unrelated_file = tmp_path / "modular_kernel-notes"
    unrelated_file.touch()
    one_hour_ago = time.time() - 3600
    with memory_file("host") as file_in_use:
        # New files are kept, because they may not be locked yet.
        assert {*remaining} <= {*tmp_path.iterdir()}
        for path in (*remaining, unrelated_file, Path(file_in_use.name)):
            os.utime(path, (one_hour_ago, one_hour_ago))
        with memory_file("block") as new_file:
            assert {*tmp_path.iterdir()} == {
                unrelated_file,
                Path(file_in_use.name),
                Path(new_file.name),
            }
    assert [*tmp_path.iterdir()] == [unrelated_file]
