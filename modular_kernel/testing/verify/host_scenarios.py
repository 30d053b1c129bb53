"""Checks of the assignment of ranks to hosts, for the "misunderstood" fault scenario.

Each check yields pairs (actual outcome, expected outcome). CORRECT is the outcome of a call without
an error. The environment variable MK_HOST_ID lets ranks on one machine act as if they were on
several hosts.
"""

import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from modular_kernel.errors import CommunicationError, ConfigurationError, DtypeError
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.settings import read_settings, use_host_id
from modular_kernel.testing.cases.scenario_names import find_manager_class
from modular_kernel.testing.verify.scenario_context import (
    CORRECT,
    ScenarioContext,
    capture_outcome,
    get_manager,
)


def check_host_assignment(context: ScenarioContext) -> Iterator[tuple[str, str]]:
    """Check the part with all ranks on one host, and with each rank on a separate host.

    The check with one host is skipped if the problem has several hosts. The check with separate
    hosts is skipped if the part supports only one host.
    """
    ranks, requires = context.world_size, context.part.requires
    if context.case.problem.parallel.hosts > 1:
        manager = find_manager_class(context.part)(None)
        yield _construct_with_changed_requirements(context, manager, -1)
        manager.destroy()
        yield from _use_separate_hosts(_with_ranks_per_host(context, 1))
        return
    manager = find_manager_class(context.part)(None)
    host_name = read_settings().host_id or socket.gethostname()
    yield str(manager.hosts), f"{ranks} ranks on one host, {host_name}"
    yield _construct_with_changed_requirements(context, manager, -1)
    one_host_context, many_hosts_context = (
        _with_ranks_per_host(context, ranks),
        _with_ranks_per_host(context, 1),
    )
    yield one_host_context.make_correct_call(one_host_context.make_kernel_on(manager))
    is_restricted = requires.one_host or requires.full_hosts
    error_name = "IncompatibleError" if is_restricted else "ConfigurationError"
    yield capture_outcome(lambda: str(many_hosts_context.make_kernel_on(manager))), error_name
    manager.destroy()
    if not is_restricted:
        yield from _use_separate_hosts(many_hosts_context)
    if requires.one_host:  # such a part refuses several hosts even if the problem has one
        with use_host_id(f"host{context.rank}"):
            manager = find_manager_class(context.part)(None)
        yield capture_outcome(lambda: str(context.make_kernel_on(manager))), "ConfigurationError"
        yield _construct_with_changed_requirements(
            context, manager, 1, full_hosts=True, one_host=False
        )
        manager.destroy()


def check_host_records(
    context: ScenarioContext, kernel: FusedMoEModularKernel
) -> Iterator[tuple[str, str]]:
    """Check the allocation records of the memory that the manager shares within a host.

    All memory must be allocated outside of calls. The state of each record must be "done", or an
    error whose subject is "ranks that share buffers": the construction failed because its arguments
    differed between ranks. Nothing is checked if the manager shares no memory.
    """
    host_manager = getattr(get_manager(kernel.prepare_finalize), "host_memory", None)
    if host_manager is None:
        return
    records = [json.loads(line) for line in host_manager.last_calls.json_lines().splitlines()]
    if not records:
        yield "the allocation of shared memory was not recorded", CORRECT
    for record in records:
        state = record["state"].partition(": got ")[0]
        actual = record["rank"], record["step"], record["phase"], record["bytes"] > 0
        is_correct = actual == (context.rank, 0, "construct", True)
        is_correct &= state in ("done", "ranks that share buffers")
        yield CORRECT if is_correct else f"unexpected record of shared memory: {record}", CORRECT


def _construct_with_changed_requirements(
    context: ScenarioContext, manager: Any, extra: int, **requirements: Any
) -> tuple[str, str]:
    """Construct the part with changed requirements; every rank must raise a ConfigurationError.

    With unchanged requirements, only a large group would be refused, for example one with 9 ranks
    per host if the part supports 8.

    extra: difference between the `ranks_per_host` of the changed requirements and the actual number
        of ranks per host.
    requirements: other changed fields of PrepareFinalizeRequirements. With `full_hosts`, each host
        must have exactly `ranks_per_host` ranks.
    """
    ranks_per_host = context.world_size // len(manager.hosts) + extra
    requires = replace(context.part.requires, ranks_per_host=ranks_per_host, **requirements)
    part = type(context.part.__name__, (context.part,), {"requires": requires})
    expected = f"{ranks_per_host} consecutive ranks on each host, equally many on all"
    try:
        message = str(part(context.case.problem, manager))
    except ConfigurationError as error:
        message = str(error)
    return (expected if expected in message else message), expected


def _use_separate_hosts(context: ScenarioContext) -> Iterator[tuple[str, str]]:
    """Put each rank on a separate host, and check that errors name the hosts."""
    with use_host_id(f"host{context.rank}"):
        manager = find_manager_class(context.part)(None)
    ranks = range(context.world_size)
    placement = "; ".join(f"{rank} on host{rank}" for rank in ranks)
    yield str(manager.hosts), f"{len(ranks)} ranks on {len(ranks)} hosts: {placement}"
    yield _construct_with_changed_requirements(context, manager, 1, full_hosts=True)
    kernel = context.make_kernel_on(manager)
    yield context.make_correct_call(kernel)
    try:
        message = context.compare(context.call(kernel, x_TH=context.sample.inputs.x_TH.double()))
    except (CommunicationError, DtypeError) as error:
        message = str(error)
    # The error names the host of rank 1. "all of" means that rank 1 is the only rank on this host.
    expected = "rank 1 refused its call 2 of layer 1 with DtypeError; rank 1: all of host host1"
    yield str(context.is_faulty_rank or expected in message), "True"
    manager.destroy()


def _with_ranks_per_host(context: ScenarioContext, ranks_per_host: int) -> ScenarioContext:
    problem = context.case.problem
    parallel = replace(problem.parallel, ranks_per_host=ranks_per_host)
    return replace(context, case=replace(context.case, problem=replace(problem, parallel=parallel)))
