"""Test that ranks exit without explicit cleanup: `python tools/rank_exits.py --starts 300`.

Each start forks two processes of a gloo group from this process, which has imported torch. They
create a layer, call it twice, and reach the end of the script. Every second start also begins a
call without finishing it. In every third start, the GIL is held until the end, so that gloo's
threads still have pending work at exit. If a process crashes or hangs, this script prints its
output and exits with 1.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from modular_kernel.settings import hide_gpus
from modular_kernel.testing.mutation import preload
from modular_kernel.testing.stress import fault_matrix as faults
from modular_kernel.testing.stress.faults import FaultContext, Scenario

WORLD_SIZE = 2


@dataclass
class Start:
    """One start of all ranks.

    deadline: value of time.monotonic() at which running ranks are killed.
    running_ranks: ranks by process id.
    codes: exit codes of finished ranks by rank, or "hung".
    """

    number: int
    part: str
    folder: Path
    deadline: float
    running_ranks: dict[int, int] = field(default_factory=dict)
    codes: dict[int, int | str] = field(default_factory=dict)

    def get_output_file(self, rank):
        return self.folder / f"output-{self.number}-{rank}"

    def collect_exits(self):
        """Collect the exit codes of finished ranks, and kill ranks that exceed the time limit."""
        for pid, rank in list(self.running_ranks.items()):
            exited_pid, status = os.waitpid(pid, os.WNOHANG)
            is_late = time.monotonic() > self.deadline
            if not exited_pid and is_late:
                os.kill(pid, 9)
                os.waitpid(pid, 0)
            if exited_pid or is_late:
                self.codes[rank] = os.waitstatus_to_exitcode(status) if exited_pid else "hung"
                del self.running_ranks[pid]

    def findings(self):
        """Yield a line for each rank that did not exit with 0."""
        for rank, code in sorted(self.codes.items()):
            if code != 0:
                output = self.get_output_file(rank).read_text(errors="replace").strip()
                yield f"start {self.number}, {self.part}: rank {rank}: {code}: {output[-400:]}"


def fork_ranks(start):
    """Fork the ranks of a start. Returns None in this process, and the rank in each child."""
    for rank in range(WORLD_SIZE):
        pid = os.fork()
        if pid == 0:
            return rank
        start.running_ranks[pid] = rank
    return None


def run_rank(start, rank):
    """Run a rank up to its exit. Returns the kernel, which must stay alive until then."""
    file = os.open(start.get_output_file(rank), os.O_CREAT | os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    init_method = f"file://{start.folder}/store-{start.number}"
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=WORLD_SIZE)
    context = FaultContext(
        Scenario(start.part, "raises"), rank, WORLD_SIZE, None, str(start.folder), ()
    )
    problem = context.make_problem()
    inputs = context.make_inputs(problem, context.tokens_W)
    kernel = context.make_kernel(problem, context.choose_experts(problem))
    if start.number % 3 == 0:
        sys.setswitchinterval(1000)
    for _ in range(2):
        kernel(inputs.x_TH, inputs.weights, inputs.routing)
    if start.number % 2:
        kernel.start(inputs.x_TH, inputs.weights, inputs.routing)
    return kernel


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--starts", type=int, default=300)
parser.add_argument("--lanes", type=int, default=2, help="number of concurrent starts")
parser.add_argument("--seconds", type=float, default=120, help="time limit of a start")
args = parser.parse_args()
hide_gpus()
torch.set_num_threads(1)
assert preload.load_catalog  # imported for its side effects
parts = faults.list_supported_parts(WORLD_SIZE, "gloo")
# Not a context manager, because forked children would remove the folder at their exit.
folder = Path(tempfile.mkdtemp(prefix="mk-exits-"))
child_rank, running, findings, num_started = None, [], [], 0
start_seconds = time.monotonic()
while child_rank is None and (num_started < args.starts or running):
    for start in running:
        start.collect_exits()
        if not start.running_ranks:
            findings += start.findings()
    running = [start for start in running if start.running_ranks]
    if num_started < args.starts and len(running) < args.lanes:
        part = parts[num_started % len(parts)]
        start = Start(num_started, part, folder, time.monotonic() + args.seconds)
        running.append(start)
        num_started += 1
        child_rank = fork_ranks(start)
    time.sleep(0.002)
if child_rank is not None:
    kernel = run_rank(start, child_rank)  # keep it alive until the interpreter exits
else:
    shutil.rmtree(folder)
    summary = f"{num_started} starts of {WORLD_SIZE} ranks, {len(findings)} findings"
    print("\n".join([*findings, summary]))
    print(f"{time.monotonic() - start_seconds:.0f} s", file=sys.stderr)
    sys.exit(bool(findings))
