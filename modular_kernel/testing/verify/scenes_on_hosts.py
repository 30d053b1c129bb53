"""What ranks are told of the hosts that they are on; a part of the scene "misunderstood".

Ranks of one machine are ranks of several hosts where MK_HOST_ID says so.
"""

import socket
from collections.abc import Iterator
from dataclasses import replace

from modular_kernel.errors import CommunicationError, DtypeError
from modular_kernel.settings import host_called, read_settings
from modular_kernel.testing.cases.scenes import manager_class
from modular_kernel.testing.verify.scene_stage import Stage, said


def on_hosts(on: Stage) -> Iterator[tuple[str, str]]:
    """All ranks on one host, unless they are on several; then each on its own, if the part serves
    several."""
    ranks, requires = on.world_size, on.part.requires
    if on.case.problem.parallel.hosts > 1:
        yield from _apart(_with_hosts_of(on, 1))
        return
    manager = manager_class(on.part)(None)
    name = read_settings().host_id or socket.gethostname()
    yield str(manager.hosts), f"{ranks} ranks on one host, {name}"
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
        manager.destroy()


def _apart(on: Stage) -> Iterator[tuple[str, str]]:
    """Each rank on a host of its own: errors say where a rank is."""
    with host_called(f"host{on.rank}"):
        manager = manager_class(on.part)(None)
    ranks = range(on.world_size)
    where = "; ".join(f"{rank} on host{rank}" for rank in ranks)
    yield str(manager.hosts), f"{len(ranks)} ranks on {len(ranks)} hosts: {where}"
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
