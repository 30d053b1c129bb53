"""Program of one rank, which reads a command from each line of stdin and writes a line of JSON.

    make TIMEOUT_S [copies]   make a manager and a layer that uses it
    call                     call the layer once
    until                    call the layer repeatedly until a call fails
    drop                     delete the manager and the layer
    without RANK...          make a manager and a layer over the other ranks

`simulated_hosts` starts this program.
"""

import datetime
import json
import sys
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from ep_layers import ALL2ALL, Layer

from modular_kernel.errors import ModularKernelError
from modular_kernel.reference import float64_reference
from modular_kernel.spec.placement import Placement
from prepare_finalize import TorchGroup

TOKENS = (4, 3, 0, 5)


class RankCommands:
    """The commands of a rank, and the layer and manager on which they operate."""

    def __init__(self, rank: int) -> None:
        self.rank, self.group = rank, dist.group.WORLD
        self.layer = Layer(ALL2ALL, TOKENS)
        self.manager: TorchGroup | None = None
        self.kernel: Any = None
        self.timeout_s = 3.0

    def make(self, timeout_s: str, copies: str = "") -> dict[str, Any]:
        placement = Placement.linear(8, 4)
        if copies:
            placement = placement.with_copies({4: [0], 5: [0], 6: [1], 7: [1]})
        self.layer = replace(self.layer, placement=placement)
        self.timeout_s = float(timeout_s)
        return self._make_layer(self.group)

    def _make_layer(self, group: Any) -> dict[str, Any]:
        self.manager = TorchGroup(group, timeout_s=self.timeout_s)
        self.kernel = self.layer.kernel(self.rank, self.manager)
        return {"hosts": str(self.manager.hosts)}

    def call(self) -> dict[str, Any]:
        inputs = self.layer.inputs_of(self.rank)
        out = self.kernel(inputs.x_TH, inputs.weights, inputs.routing)
        global_inputs = self.layer.inputs()
        exact = float64_reference(
            global_inputs.x_TH,
            global_inputs.weights,
            global_inputs.routing,
            self.layer.global_problem,
        )
        error = (out.double() - exact[self.layer.rows(self.rank)]).abs()
        return {"right": bool((error < 1e-4).all())}

    def until(self) -> dict[str, Any]:
        for _ in range(10_000):
            assert self.call()["right"]
        return {}

    def drop(self) -> dict[str, Any]:
        self.manager = self.kernel = None
        return {}

    def without(self, *ranks: str) -> dict[str, Any]:
        removed = [int(rank) for rank in ranks]
        placement = self.layer.placement.without(removed)
        remaining = [rank for rank in range(len(self.layer.tokens_W)) if rank not in removed]
        group = dist.new_group(remaining, backend="gloo", use_local_synchronization=True)
        tokens = tuple(self.layer.tokens_W[rank] for rank in remaining)
        self.layer = replace(self.layer, tokens_W=tokens, placement=placement)
        self.rank = remaining.index(self.rank)
        return self._make_layer(group)


def run_command(commands: RankCommands, line: str) -> dict[str, Any]:
    """Run one line; return its answer, or the error as `error`, `text` and `peers`."""
    (command, *arguments), start = line.split(), time.monotonic()
    try:
        result = getattr(commands, command)(*arguments)
    except ModularKernelError as error:
        peers = list(getattr(error, "peers", ()))
        result = {"error": type(error).__name__, "text": str(error), "peers": peers}
    return {**result, "seconds": time.monotonic() - start}


def write_answer(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main(rank: int, address: str, join_s: float) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=join_s)
    try:
        dist.init_process_group("gloo", address, timeout, world_size=4, rank=rank)
    except (RuntimeError, dist.DistError) as error:
        write_answer({"error": type(error).__name__, "text": str(error)})
        return
    commands = RankCommands(rank)
    write_answer({"joined": rank})
    for line in sys.stdin:
        write_answer(run_command(commands, line))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
