"""What ranks are told that wait for one which comes late, or not at all."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from modular_kernel.testing.cases.scenario_names import counts_calls, manager_class, shares_memory
from modular_kernel.testing.verify.problem_scenarios import Lines, before
from modular_kernel.testing.verify.scenario_context import RIGHT, VICTIM, Stage, manager_of, said

DEADLINE_S = 1.5  # of a scene in which a rank stays away from others that it knows
_SHORT_S = 0.5  # of one in which ranks do not come to know each other
_IN_TIME_S = 0.6  # how late a rank may be there
_PATIENCE_S = 2.0  # beyond it, until nobody waits any more
_POLLED = "the exchange did not end in time"  # said where a library has to be asked, on a GPU


def late(on: Stage) -> Lines:
    """Rank 1 comes late, but in time: the others wait for it. Then it stays away for longer than
    the deadline: they name it, and so does it them."""
    kernel, counts = on.waiting(DEADLINE_S), counts_calls(on.part)
    yield on.goes(kernel)
    dist.barrier()
    if on.at_fault:
        time.sleep(_IN_TIME_S)
    yield on.goes(kernel)
    dist.barrier()
    wait_for_nobody = _alone(on) if counts else None
    if on.at_fault:
        time.sleep(DEADLINE_S + _PATIENCE_S)
    start = time.monotonic()
    told = said(lambda: on.judged(on.call(kernel)))
    seconds = time.monotonic() - start
    if counts:
        why = "gave up: this rank came at least N s late" if on.at_fault else "no sign of life"
        layer, phase = (1, 3, 3), "counts"
    else:
        why = f"no flag of call 3 from rank {VICTIM}"
        layer, phase = (0, 0, 3), "dispatch"
    peers = on.others if on.at_fault else (VICTIM,)
    if counts or not on.at_fault:
        must = on.error("exchange between ranks", why, "", layer, peers, phase)
        yield before(told, "; after", ", need"), before(must, ", need")
        if counts:
            yield _reason(told), RIGHT
        least = 0.0 if on.at_fault else DEADLINE_S - 0.1
        in_time = least <= seconds < 2 * _PATIENCE_S
        yield ("in time" if in_time else f"{seconds:.1f} s"), "in time"
        again = said(lambda: on.judged(on.call(kernel)))
        earlier = "a manager that failed before: " if counts else ""
        must = on.error("exchange between ranks", earlier + why, "", layer, peers, phase)
        yield before(again, "; after", ", need"), before(must, ", need")
        if not counts:  # whoever asks later is told, too
            told = said(lambda: str(manager_of(kernel.prepare_finalize).check()))
            yield before(told, ", need"), before(must, ", need")
    if wait_for_nobody is not None:
        yield wait_for_nobody()
    dist.barrier()
    if not counts:
        yield from first_stays_away(on, DEADLINE_S)
    yield on.goes(on.kernel())


def _alone(on: Stage) -> Callable[[], tuple[str, str]]:
    """Have rank 0 start an exchange that nobody else does; returns what waits for that.

    To be called when the deadline, and what a rank waits after it for the others' word, are long
    over: they are still asked for it.
    """
    manager = manager_class(on.part)(None, deadline_s=DEADLINE_S)
    if on.rank:
        return lambda: (RIGHT, RIGHT)
    exchange = manager.all_reduce(torch.ones(1), step=manager.next_step(), phase="combine")

    def wait() -> tuple[str, str]:
        told, at = said(lambda: str(exchange.wait())), (0, 0, 1)
        why = "no sign of life"
        must = on.error("exchange between ranks", why, "", at, on.others, "combine")
        return before(told, "; after", ", need"), before(must, ", need")

    return wait


def _reason(told: str) -> str:
    """Say what is wrong with the reason of the library, which an error ends its `got` with."""
    reason = told.partition("; after N s: ")[2].partition(", need")[0]
    if reason == _POLLED:
        return "not the reason of the library, which knows the deadline itself"
    in_words = len(reason.split()) > 2 and not reason.startswith("[")
    return RIGHT if in_words else f"no reason in words: {reason!r}"


def stays_out(on: Stage) -> Lines:
    """Rank 1 makes no kernel where the others do; then all make one together.

    Where ranks share memory, it makes a manager with them first: they look for it a second time.
    """
    if shares_memory(on.part):
        manager = manager_class(on.part)(None, deadline_s=_SHORT_S)
        if not on.at_fault:
            told = said(lambda: str(on.over(manager)))
            must = on.error(
                "ranks that share buffers", "no sign of life", "", (0, 0, 0), (VICTIM,), "construct"
            )
            yield before(told, ", need"), before(must, ", need")
        dist.barrier()
        manager.destroy()
    if not on.at_fault:
        told, counts = said(lambda: str(on.waiting(_SHORT_S))), counts_calls(on.part)
        what = "exchange between ranks" if counts else "ranks that share buffers"
        must = on.error(what, "no sign of life", "", (0, 0, 0), (VICTIM,), "construct")
        yield before(told, "; after", ", need"), before(must, ", need")
    dist.barrier()
    if counts_calls(on.part):
        yield _says_no_host(on)
    yield on.goes(on.kernel())


def _says_no_host(on: Stage) -> tuple[str, str]:
    """Rank 1 connects with the others, and does not tell them what host it is on."""
    made = manager_class(on.part)
    if on.at_fault:
        made = type(made.__name__, (made,), {"_find_hosts": _leaves})
    told = said(lambda: str(made(None, deadline_s=DEADLINE_S)))
    dist.barrier()
    what, why, need = "ranks that share buffers", "no sign of life", "every rank within 1.5 s"
    must = on.error(what, why, need, (0, 0, 0), (VICTIM,), "construct")
    return told, "RuntimeError" if on.at_fault else must


def _leaves(*_: object) -> None:
    raise RuntimeError("this rank goes away")


def first_stays_away(on: Stage, deadline_s: float) -> Lines:
    """Rank 0 makes no call where all others do: they name it, as they name any other rank."""
    kernel = on.waiting(deadline_s)
    yield on.goes(kernel)
    dist.barrier()
    if on.rank:
        must = on.error(
            "exchange between ranks", "no flag of call 2 from rank 0", "", (0, 0, 2), (0,),
            "dispatch",
        )  # fmt: skip
        told = said(lambda: on.judged(on.call(kernel)))
        yield before(told, ", need"), before(must, ", need")
    dist.barrier()
