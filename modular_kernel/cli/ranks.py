"""Where proofs run: in this process, or over ranks that it starts."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from modular_kernel.cli.output import note
from modular_kernel.errors import ConfigurationError

if TYPE_CHECKING:
    from modular_kernel.testing.call_mutants.run import Kill
    from modular_kernel.testing.cases.case import Case
    from modular_kernel.testing.cases.lists import Selection
    from modular_kernel.testing.cases.ranks import RankCase, RankSelection
    from modular_kernel.testing.ranks.pool import RankPool
    from modular_kernel.testing.verify.one_process import Proof
    from modular_kernel.types import Machine

Backend = Annotated[
    str | None,
    typer.Option(
        help="With --world-size: nccl (one GPU a rank) or gloo (processes on the CPU).  "
        "[default: nccl where there are GPUs enough]",
        show_default=False,
    ),
]


@dataclass(frozen=True)
class Host:
    """This machine, and the ranks on it; None where there is one rank, this process."""

    machine: "Machine"
    pool: "RankPool | None" = None

    @property
    def facts(self) -> dict[str, object]:
        """For JSON."""
        facts: dict[str, object] = {"machine": self.machine}
        if self.pool is not None:
            facts |= {"world_size": self.pool.world_size, "backend": self.pool.backend}
        return facts

    def cases(
        self, prepare_finalize: str, experts: str, level: Literal["smoke", "full"]
    ) -> "Selection | RankSelection":
        """Those of a pairing for so many ranks."""
        if self.pool is None:
            from modular_kernel.testing.cases.lists import cases_for

            return cases_for(prepare_finalize, experts, self.machine, level)
        from modular_kernel.testing.cases.ranks import rank_cases_for

        return rank_cases_for(prepare_finalize, experts, self.machine, self.pool.world_size, level)

    def prove(self, case: "Case") -> "Proof":
        """One case; a RankCase where there are ranks."""
        if self.pool is None:
            from modular_kernel.testing.verify.one_process import prove

            return prove(case, self.machine)
        from modular_kernel.testing.cases.ranks import RankCase
        from modular_kernel.testing.verify.over_ranks import prove_ranks

        assert isinstance(case, RankCase)
        return prove_ranks(case, self.pool, self.machine)

    def sensitivity(self, prepare_finalize: str, experts: str) -> "tuple[Kill, ...]":
        """Every defect of the battery for so many ranks, put into one pairing."""
        if self.pool is None:
            from modular_kernel.testing.call_mutants import run

            return run.sensitivity(prepare_finalize, experts, self.machine)
        from modular_kernel.testing.call_mutants.over_ranks import sensitivity_ranks

        return sensitivity_ranks(prepare_finalize, experts, self.pool)


@contextmanager
def host_of(world_size: int | None, backend: str | None) -> Iterator[Host]:
    """Have this machine, with a pool of `world_size` ranks if that is more than one; then close it.

    backend: None takes GPUs where there are enough of them, and says so where there are not.
    """
    if world_size is None or world_size == 1:
        if backend is not None:
            raise ConfigurationError("--backend", got=backend, need="--world-size N beside it")
        from modular_kernel.catalog import this_machine

        yield Host(this_machine())
        return
    with pool_of(world_size, backend) as pool:
        from modular_kernel.testing.verify.over_ranks import machine_of

        yield Host(machine_of(pool), pool)


def pool_of(world_size: int, backend: str | None) -> "RankPool":
    """Ranks over `backend`; None takes GPUs, and says so where there are too few."""
    import torch

    from modular_kernel.testing.ranks.pool import RankPool

    if backend == "nccl" or (backend is None and torch.cuda.device_count() >= world_size):
        return RankPool(world_size, "nccl")
    if backend not in ("gloo", None):
        raise ConfigurationError("--backend", got=repr(backend), need="nccl or gloo")
    if backend is None:
        gpus = torch.cuda.device_count()
        note(f"{world_size} ranks on the CPU, over gloo: there are {gpus} GPUs here")
    return RankPool(world_size)


def over_ranks(case: "Case", rank_tokens: str | None, fault: str) -> "RankCase":
    """Give each rank of the case its tokens, and the ranks a fault.

    Tokens are as many as the problem has, or as the text says.
    """
    from modular_kernel.testing.cases.ranks import RankCase

    problem = case.problem
    tokens = (problem.tokens,) * problem.parallel.world_size
    if rank_tokens is not None:
        words = rank_tokens.split(",")
        if not all(word.isdecimal() for word in words):
            need = "a number of each rank, such as 7,0"
            raise ConfigurationError("--rank-tokens", got=repr(rank_tokens), need=need)
        tokens = tuple(map(int, words))
    pair = case.prepare_finalize, case.experts
    given = RankCase(*pair, problem, case.routing, case.seed, tokens=tokens, fault=fault)
    return replace(given, manner=case.manner)
