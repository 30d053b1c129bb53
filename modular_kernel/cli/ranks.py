"""Runs verification and measurements in this process or on a pool of ranks.

A pool has one process per rank. Either this process starts the others, or a launcher such as
torchrun has started all of them.
"""

import shlex
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from modular_kernel.cli.command import option
from modular_kernel.cli.output import print_note
from modular_kernel.errors import ConfigurationError
from modular_kernel.settings import read_launcher
from modular_kernel.text import format_count

if TYPE_CHECKING:
    from modular_kernel.cli.options import ProblemOptions
    from modular_kernel.spec.problem import Machine
    from modular_kernel.testing.cases.case import Case
    from modular_kernel.testing.cases.lists import Selection
    from modular_kernel.testing.cases.ranks import RankCase, RankSelection
    from modular_kernel.testing.input_mutations.run import CallMutantResult
    from modular_kernel.testing.ranks.external_launcher import AnyRanks
    from modular_kernel.testing.verify.one_process import Proof

OptionsT = TypeVar("OptionsT", bound="ProblemOptions")
Backend = Annotated[
    Literal["nccl", "gloo"] | None,
    option(
        "With --world-size: nccl (one GPU per rank) or gloo (processes on the CPU).  [default: "
        "nccl if there are enough GPUs]"
    ),
]


@dataclass(frozen=True)
class Executor:
    """Selects and runs the cases of a pairing, in this process or on a pool of ranks.

    pool: the ranks. None stands for a single rank, which is this process.
    """

    machine: "Machine"
    pool: "AnyRanks | None" = None

    @property
    def record_fields(self) -> dict[str, object]:
        """The machine, the number of ranks and the backend, for the JSON record."""
        record: dict[str, object] = {"machine": self.machine}
        if self.pool is not None:
            record |= {"world_size": self.pool.world_size, "backend": self.pool.backend}
            record |= {"hosts": self.pool.hosts}
        return record

    def select_cases(
        self, prepare_finalize: str, experts: str, level: Literal["smoke", "full"]
    ) -> "Selection | RankSelection":
        """Return the cases of a pairing for the number of ranks."""
        if self.pool is None:
            from modular_kernel.testing.cases.lists import cases_for

            return cases_for(prepare_finalize, experts, self.machine, level)
        from modular_kernel.testing.cases.ranks import rank_cases_for

        pair = prepare_finalize, experts
        ranks = self.pool.world_size
        ranks_per_host = self.pool.ranks_per_host
        return rank_cases_for(*pair, self.machine, ranks, level, ranks_per_host=ranks_per_host)

    def verify_cases(self, cases: "Sequence[Case]", workers: int) -> "Generator[Proof, None, None]":
        """Verify the cases, and yield their results in order.

        cases: RankCase objects if there is a pool.
        workers: number of processes; ignored if there is a pool.
        """
        if self.pool is None:
            from modular_kernel.testing.verify.parallel_runs import prove_all

            yield from prove_all(cases, self.machine, workers)
            return
        from modular_kernel.testing.cases.ranks import RankCase
        from modular_kernel.testing.verify.over_ranks import prove_ranks

        for case in cases:
            assert isinstance(case, RankCase)
            yield prove_ranks(case, self.pool, self.machine)

    def run_input_mutations(
        self,
        prepare_finalize: str,
        experts: str,
        on_mutant: Callable[[int, int], None] = lambda *_: None,
    ) -> "tuple[CallMutantResult, ...]":
        """Run every mutation of inputs and outputs on a pairing, and return the outcomes.

        A mutation corrupts a tensor that a part receives or returns. It is killed if a check fails.

        on_mutant: called after each mutation, with the numbers of completed and of all mutations.
        """
        if self.pool is None:
            from modular_kernel.testing.input_mutations import run

            return run.sensitivity(prepare_finalize, experts, self.machine, on_mutant=on_mutant)
        from modular_kernel.testing.input_mutations.over_ranks import sensitivity_ranks

        return sensitivity_ranks(prepare_finalize, experts, self.pool, on_mutant=on_mutant)


@contextmanager
def open_executor(
    world_size: int | None, backend: str | None, ranks_per_host: int | None = None
) -> Iterator[Executor]:
    """Yield an executor with `world_size` ranks, whose pool is closed at the end of the context.

    world_size: see `resolve_world_size`.
    backend, ranks_per_host: see `make_pool`. Raises ConfigurationError if one of these is given for
        a single rank.
    """
    world_size = resolve_world_size(world_size)
    if world_size == 1:
        if backend is not None:
            raise ConfigurationError("--backend", got=backend, need="--world-size N in addition")
        if ranks_per_host not in (None, 1):
            need = "--world-size N in addition"
            raise ConfigurationError("--ranks-per-host", got=ranks_per_host, need=need)
        from modular_kernel.catalog import this_machine

        yield Executor(this_machine())
        return
    with make_pool(world_size, backend, ranks_per_host) as pool:
        from modular_kernel.testing.verify.over_ranks import machine_of

        yield Executor(machine_of(pool), pool)


def resolve_world_size(world_size: int | None) -> int:
    """Return the number of ranks: the launcher's, or `world_size` without a launcher, or 1.

    Raises ConfigurationError if `world_size` differs from the launcher's.
    """
    launcher = read_launcher()
    if launcher is None:
        return 1 if world_size is None else world_size
    if world_size not in (None, launcher.world_size):
        need = f"{launcher.world_size}, the WORLD_SIZE of the launcher, or no --world-size"
        raise ConfigurationError("--world-size", got=world_size, need=need)
    return launcher.world_size


def resolve_device(world_size: int | None, backend: str | None) -> Literal["cuda", "cpu"]:
    """Return the device on which `open_executor` runs the ranks, without starting them."""
    import torch

    ranks, gpus = resolve_world_size(world_size), torch.cuda.device_count()
    if backend is None:
        needed = 1 if read_launcher() is not None else ranks
        return "cuda" if gpus >= needed else "cpu"
    return "cuda" if backend == "nccl" else "cpu"


def apply_launcher(options: "OptionsT") -> "OptionsT":
    """Return the options with the launcher's world size and ranks per host.

    Without a launcher, the options are returned unchanged.

    Raises ConfigurationError if the options contradict the launcher.
    """
    launcher = read_launcher()
    if launcher is None:
        return options
    ranks_per_host = launcher.ranks_per_host
    if options.ranks_per_host not in (None, ranks_per_host):
        need = f"{ranks_per_host or 'all'} as in the launcher, or no --ranks-per-host"
        raise ConfigurationError("--ranks-per-host", got=options.ranks_per_host, need=need)
    world_size = resolve_world_size(options.world_size)
    return replace(options, world_size=world_size, ranks_per_host=ranks_per_host)


def make_pool(
    world_size: int, backend: str | None, ranks_per_host: int | None = None
) -> "AnyRanks":
    """Return a pool with the ranks of the launcher, or with processes that it starts.

    backend: "nccl", "gloo" or None. None selects nccl if there are enough GPUs. Otherwise it
        selects gloo and prints a note.
    ranks_per_host: number of consecutive ranks that simulate a host, for started processes. None
        simulates one host with all ranks.
    """
    import torch

    from modular_kernel.testing.ranks.external_launcher import LaunchedRanks
    from modular_kernel.testing.ranks.pool import RankPool

    launcher, gpus = read_launcher(), torch.cuda.device_count()
    if launcher is None:
        if backend == "nccl" or (backend is None and gpus >= world_size):
            return RankPool(world_size, "nccl", ranks_per_host=ranks_per_host)
        if backend is None:
            print_note(
                f"{world_size} ranks on the CPU over gloo; this machine has "
                f"{format_count(gpus, 'GPU')}"
            )
        return RankPool(world_size, ranks_per_host=ranks_per_host)
    selected_backend: Literal["gloo", "nccl"] = "nccl" if backend == "nccl" else "gloo"
    # Do not compare the number of GPUs, which may differ between hosts. All ranks must select the
    # same backend.
    if backend is None and gpus:
        selected_backend = "nccl"
    ranks = LaunchedRanks(
        launcher, selected_backend, command=shlex.join([selected_backend, *sys.argv[1:]])
    )
    hosts = format_count(ranks.hosts, "host")
    print_note(f"{world_size} ranks of {launcher.address} on {hosts}, over {selected_backend}")
    return ranks


def make_rank_case(case: "Case", rank_tokens: str | None, fault: str) -> "RankCase":
    """Convert a case to a RankCase with a number of tokens for each rank and a fault scenario.

    rank_tokens: comma-separated numbers. None stands for the problem's tokens on each rank.
    fault: name of the scenario, or "" for none.

    Raises ConfigurationError if rank_tokens is invalid.
    """
    from modular_kernel.testing.cases.ranks import RankCase

    problem = case.problem
    tokens = (problem.tokens,) * problem.parallel.world_size
    if rank_tokens is not None:
        numbers = rank_tokens.split(",")
        if not all(number.isdecimal() for number in numbers):
            need = "a number for each rank, such as 7,0"
            raise ConfigurationError("--rank-tokens", got=repr(rank_tokens), need=need)
        tokens = tuple(map(int, numbers))
    pair = case.prepare_finalize, case.experts
    rank_case = RankCase(*pair, problem, case.routing, case.seed, tokens=tokens, fault=fault)
    return replace(rank_case, variation=case.variation)
