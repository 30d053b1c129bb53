"""What ranks are told of the hosts that they are on; a part of the scene "misunderstood".

Ranks of one machine are ranks of several hosts where MK_HOST_ID says so.
"""

import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from modular_kernel.errors import CommunicationError, ConfigurationError, DtypeError
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.settings import host_called, read_settings
from modular_kernel.testing.cases.scenario_names import manager_class
from modular_kernel.testing.verify.scenario_context import RIGHT, Stage, manager_of, said


def on_hosts(on: Stage) -> Iterator[tuple[str, str]]:
    """All ranks on one host, unless they are on several; then each on its own, if the part serves
    several."""
    ranks, requires = on.world_size, on.part.requires
    if on.case.problem.parallel.hosts > 1:
        manager = manager_class(on.part)(None)
        yield _serving(on, manager, -1)
        manager.destroy()
        yield from _apart(_with_hosts_of(on, 1))
        return
    manager = manager_class(on.part)(None)
    name = read_settings().host_id or socket.gethostname()
    yield str(manager.hosts), f"{ranks} ranks on one host, {name}"
    yield _serving(on, manager, -1)
    together, alone = _with_hosts_of(on, ranks), _with_hosts_of(on, 1)
    yield together.goes(together.over(manager))
    judged = requires.one_host or requires.full_hosts
    refused = "IncompatibleError" if judged else "ConfigurationError"
    yield said(lambda: str(alone.over(manager))), refused
    manager.destroy()
    if not judged:
        yield from _apart(alone)
    if requires.one_host:  # whatever the problem says of the hosts
        with host_called(f"host{on.rank}"):
            manager = manager_class(on.part)(None)
        yield said(lambda: str(on.over(manager))), "ConfigurationError"
        yield _serving(on, manager, 1, full_hosts=True, one_host=False)
        manager.destroy()


def journal_of_a_host(on: Stage, kernel: FusedMoEModularKernel) -> Iterator[tuple[str, str]]:
    """Read the records of memory inside a manager, of the ranks of a host; none where it has none.

    Every piece is made outside calls, and is done, or refused because ranks mean another layer.
    """
    inside = getattr(manager_of(kernel.prepare_finalize), "inside", None)
    if inside is None:
        return
    records = [json.loads(line) for line in inside.last_calls.json_lines().splitlines()]
    if not records:
        yield "no record of memory", RIGHT
    for record in records:
        state = record["state"].partition(": got ")[0]
        told = record["rank"], record["step"], record["phase"], record["bytes"] > 0
        good = told == (on.rank, 0, "construct", True)
        good &= state in ("done", "ranks that share buffers")
        yield RIGHT if good else f"record {record}", RIGHT


def _serving(on: Stage, manager: Any, more: int, **also: Any) -> tuple[str, str]:
    """Have the part serve so many ranks more than each host has: every rank is told how many.

    A part that serves eight would need nine ranks to be told so as it is. also: what else it
    declares, such as that its hosts must be full, which these are not.
    """
    most = on.world_size // len(manager.hosts) + more
    requires = replace(on.part.requires, ranks_per_host=most, **also)
    other = type(on.part.__name__, (on.part,), {"requires": requires})
    must = f"{most} on each, in blocks of one size"
    try:
        told = str(other(on.case.problem, manager))
    except ConfigurationError as error:
        told = str(error)
    return (must if must in told else told), must


def _apart(on: Stage) -> Iterator[tuple[str, str]]:
    """Each rank on a host of its own: errors say where a rank is."""
    with host_called(f"host{on.rank}"):
        manager = manager_class(on.part)(None)
    ranks = range(on.world_size)
    where = "; ".join(f"{rank} on host{rank}" for rank in ranks)
    yield str(manager.hosts), f"{len(ranks)} ranks on {len(ranks)} hosts: {where}"
    yield _serving(on, manager, 1, full_hosts=True)
    kernel = on.over(manager)
    yield on.goes(kernel)
    try:
        told = on.judged(on.call(kernel, x_TH=on.sample.inputs.x_TH.double()))
    except (CommunicationError, DtypeError) as error:
        told = str(error)
    must = "rank 1 refused its call 2 of layer 1 with DtypeError; rank 1: all of host host1"
    yield str(on.at_fault or must in told), "True"
    manager.destroy()


def _with_hosts_of(on: Stage, ranks_per_host: int) -> Stage:
    """Return the stage of a problem that says so."""
    problem = on.case.problem
    parallel = replace(problem.parallel, ranks_per_host=ranks_per_host)
    return replace(on, case=replace(on.case, problem=replace(problem, parallel=parallel)))
