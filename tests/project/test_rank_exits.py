"""Ranks that end without destroying their manager end cleanly."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# A thread of gloo's has tensors to free, and waits for the GIL until the interpreter ends.
HELD = """
import sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
from prepare_finalize import TorchGroup
manager = TorchGroup(timeout_s=5.0)
def exchange():
    out, given = torch.zeros(1 << 20), torch.ones(1 << 20)
    manager.all_gather(out, given, step=1, phase="counts")
exchange()
time.sleep(0.2)
sys.setswitchinterval(1000)
exchange()
until = time.perf_counter() + 0.7
while time.perf_counter() < until:
    pass
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=300
    )


def test_exchanges_that_nobody_waited_for_do_not_abort_the_process(tmp_path: Path) -> None:
    for attempt in range(3):
        done = run("-c", HELD, str(tmp_path / f"store-{attempt}"))
        assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_ranks_that_destroy_nothing_end_cleanly() -> None:
    done = run("tools/rank_exits.py", "--starts", "5", "--lanes", "2")
    assert done.stdout == "5 starts of 2 ranks, 0 findings\n", done.stderr
    assert done.returncode == 0
