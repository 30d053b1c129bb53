"""A rank that does as it is told, a line of stdin at a time, and answers each with a line of JSON:

make DEADLINE [copies]   a manager and a layer over it       call    one call
until                    calls until one fails               drop    forget the manager
without RANK...          a layer over the ranks that are left, of a new manager
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
from modular_kernel.reference import oracle
from modular_kernel.spec.placement import Placement
from prepare_finalize import TorchGroup

TOKENS = (4, 3, 0, 5)


class Told:
    """What a rank has made so far."""

    def __init__(self, rank: int) -> None:
        self.rank, self.group = rank, dist.group.WORLD
        self.layer = Layer(ALL2ALL, TOKENS)
        self.manager: TorchGroup | None = None
        self.kernel: Any = None
        self.deadline_s = 3.0

    def make(self, deadline: str, copies: str = "") -> dict[str, Any]:
        placement = Placement.linear(8, 4)
        if copies:
            placement = placement.with_copies({4: [0], 5: [0], 6: [1], 7: [1]})
        self.layer = replace(self.layer, placement=placement)
        self.deadline_s = float(deadline)
        return self._over(self.group)

    def _over(self, group: Any) -> dict[str, Any]:
        self.manager = TorchGroup(group, deadline_s=self.deadline_s)
        self.kernel = self.layer.kernel(self.rank, self.manager)
        return {"hosts": str(self.manager.hosts)}

    def call(self) -> dict[str, Any]:
        given = self.layer.inputs_of(self.rank)
        out = self.kernel(given.x_TH, given.weights, given.routing)
        whole = self.layer.inputs()
        exact = oracle(whole.x_TH, whole.weights, whole.routing, self.layer.global_problem)
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
        lost = [int(rank) for rank in ranks]
        placement = self.layer.placement.without(lost)
        left = [rank for rank in range(len(self.layer.tokens_W)) if rank not in lost]
        group = dist.new_group(left, backend="gloo", use_local_synchronization=True)
        tokens = tuple(self.layer.tokens_W[rank] for rank in left)
        self.layer = replace(self.layer, tokens_W=tokens, placement=placement)
        self.rank = left.index(self.rank)
        return self._over(group)


def answer(told: Told, line: str) -> dict[str, Any]:
    words, started = line.split(), time.monotonic()
    try:
        found = getattr(told, words[0])(*words[1:])
    except ModularKernelError as error:
        peers = list(getattr(error, "peers", ()))
        found = {"error": type(error).__name__, "text": str(error), "peers": peers}
    return {**found, "seconds": time.monotonic() - started}


def say(found: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


def main(rank: int, address: str, join_s: float) -> None:
    torch.set_num_threads(1)
    patience = datetime.timedelta(seconds=join_s)
    try:
        dist.init_process_group("gloo", address, patience, world_size=4, rank=rank)
    except (RuntimeError, dist.DistError) as error:
        say({"error": type(error).__name__, "text": str(error)})
        return
    told = Told(rank)
    say({"joined": rank})
    for line in sys.stdin:
        say(answer(told, line))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
