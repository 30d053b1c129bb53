"""Ranks that exit without destroying their manager (the communication state of a part) exit
cleanly.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# At exit, a thread of gloo has tensors to free and waits for the GIL, which the main thread holds.
HOLDS_GIL_AT_EXIT = """
import sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
from prepare_finalize import TorchGroup
manager = TorchGroup(timeout_s=5.0)
def exchange():
    out, values = torch.zeros(1 << 20), torch.ones(1 << 20)
    manager.all_gather(out, values, step=1, phase="counts")
exchange()
time.sleep(0.2)
sys.setswitchinterval(1000)
exchange()
deadline = time.perf_counter() + 0.7
while time.perf_counter() < deadline:
    pass
"""


def run_python(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=300
    )


def test_pending_exchanges_do_not_abort_at_exit(tmp_path: Path) -> None:
    for attempt in range(3):
        result = run_python("-c", HOLDS_GIL_AT_EXIT, str(tmp_path / f"store-{attempt}"))
        assert (result.returncode, result.stdout) == (0, ""), result.stderr


def test_ranks_exit_cleanly_without_destroy() -> None:
    result = run_python("tools/rank_exits.py", "--starts", "5", "--lanes", "2")
    assert result.stdout == "5 starts of 2 ranks, 0 findings\n", result.stderr
    assert result.returncode == 0
