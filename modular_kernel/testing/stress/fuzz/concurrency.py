"""Threads, forks and interrupts: interleaved calls, adapter pools, and what is left afterwards."""

import contextlib
import os
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from hypothesis import strategies as st

from modular_kernel.errors import ModularKernelError
from modular_kernel.testing.stress.fuzz import samples
from modular_kernel.testing.stress.fuzz.outcome import (
    HANG,
    RAW,
    RIGHT,
    WRONG,
    FuzzOutcome,
    format_error,
)
from modular_kernel.testing.stress.fuzz.samples import PROBLEM
from modular_kernel.testing.stress.fuzz.target import Target, import_name

_PATIENCE_S = 30.0


def _run_threads(functions: list[Callable[[], None]]) -> list[Exception] | None:
    """Run the functions at once; return their exceptions, or None if one does not end."""
    errors: list[Exception] = []
    start = threading.Barrier(len(functions))

    def run(function: Callable[[], None]) -> None:
        try:
            start.wait(_PATIENCE_S)
            function()
        except Exception as error:  # noqa: BLE001 (classified by the caller)
            errors.append(error)

    threads = [threading.Thread(target=run, args=(f,), daemon=True) for f in functions]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _PATIENCE_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return None if any(thread.is_alive() for thread in threads) else errors


def _same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether two outputs differ by rounding alone, as those of two parts do."""
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


@contextlib.contextmanager
def _short_slices() -> Iterator[None]:
    """Switch threads far more often than usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


# --------------------------------------------------------------------------------- adapter pools

# (operation, adapter) of each thread, one after the other
Program = list[tuple[str, int]]


@dataclass(frozen=True)
class PoolCase:
    """Programs of threads that load and evict adapters. manager: of a LoRAManager, else a pool."""

    manager: bool
    programs: list[Program]


def adapter_threads(case: PoolCase) -> FuzzOutcome:
    """Load and evict from several threads: afterwards every slot holds the adapter it names."""
    what = f"{'LoRAManager' if case.manager else 'AdapterPool'}, {case.programs}"
    load: Callable[[int], object]
    evict: Callable[[int], object]
    if case.manager:
        manager: Any = import_name("modular_kernel.layers.lora:LoRAManager")(
            PROBLEM, samples.LORA, [3]
        )
        make = import_name("modular_kernel.layers.lora:MoELoRALayer")
        pool: Any = manager.pools[3]
        load = lambda n: manager.load(str(n), {3: make(samples.adapter(2, n))})  # noqa: E731
        evict = lambda n: manager.evict(str(n))  # noqa: E731
    else:
        problem = replace(PROBLEM, lora=samples.LORA)
        pool = import_name("modular_kernel.layers.adapter_pool:AdapterPool")(problem)
        load = lambda n: pool.load(str(n), samples.adapter(2, n))  # noqa: E731
        evict = lambda n: pool.evict(str(n))  # noqa: E731

    def run(program: Program) -> None:
        for operation, number in program:
            # No free slot, a name loaded twice, a name evicted by another thread
            with contextlib.suppress(ModularKernelError):
                (load if operation == "load" else evict)(number)

    with _short_slices():
        errors = _run_threads([lambda p=program: run(p) for program in case.programs])  # type: ignore[misc]
    if errors is None:
        return FuzzOutcome(HANG, what)
    if errors:
        return FuzzOutcome(RAW, f"{what}: {format_error(errors[0])}")
    fault = _pool_fault(pool)
    return FuzzOutcome(WRONG, f"{what}: {fault}") if fault else FuzzOutcome(RIGHT, what)


def _pool_fault(pool: Any) -> str:
    slots = dict(pool.slots)
    if len(set(slots.values())) != len(slots):
        return f"two names in one slot: {slots}"
    tensors = pool.weights(samples.inputs().weights)
    for name, slot in slots.items():
        expected = samples.adapter(2, int(name))
        if not torch.equal(tensors.lora_b2[slot][..., :2], expected.lora_b2):
            return f"slot {slot} does not hold adapter {name}"
    for slot in set(range(len(tensors.lora_b2))) - set(slots.values()):
        if tensors.lora_b2[slot].any():
            return f"free slot {slot} is not zero"
    return ""


# ------------------------------------------------------------------------------ calls of one kernel

_STEPS = (
    "call", "call out", "plan", "shared plan", "start", "reserve", "layer", "count", "specs",
    "small call",
)  # fmt: skip


@dataclass(frozen=True)
class ThreadCase:
    """Steps of each thread on one kernel, its plan, and a layer. parts: the pairing."""

    parts: tuple[str, str]
    programs: list[list[tuple[str, int]]]


def interleavings(case: ThreadCase) -> FuzzOutcome:  # noqa: C901 (one case for each step)
    """Mix calls, plans, started calls and reservations over threads: every output is right."""
    kernel = samples.kernel(PROBLEM, case.parts)
    shared = kernel.plan()
    given = [samples.inputs(seed) for seed in range(4)]
    expected = [kernel(g.x_TH, g.weights, g.routing).clone() for g in given]
    layer = samples.loaded_layer(given[0].weights)
    wrong: list[str] = []

    def compare(step: str, found: torch.Tensor, number: int, rows: int | None = None) -> None:
        if not _same(found, expected[number][:rows]):
            wrong.append(f"{step} {number}")

    def run_step(step: str, number: int) -> None:
        g = given[number]
        arguments = (g.x_TH, g.weights, g.routing)
        if step == "call":
            compare(step, kernel(*arguments), number)
        elif step == "call out":
            out = torch.full_like(g.x_TH, torch.nan)
            compare(step, kernel(*arguments, out=out), number)
            compare(step, out, number)
        elif step == "plan":
            compare(step, kernel.plan()(*arguments), number)
        elif step == "shared plan":
            out = torch.empty_like(g.x_TH)
            compare(step, shared(*arguments, out=out), number)
        elif step == "start":
            pending = kernel.start(*arguments)
            time.sleep(0)
            compare(step, pending.finish(), number)
        elif step == "reserve":
            kernel.reserve_workspace(1 + number)
        elif step == "layer":
            found = layer(given[0].x_TH, given[0].routing)
            compare(step, found, 0)
        elif step == "count":
            _ = kernel.invalid_ids
        elif step == "specs":
            kernel.workspace_specs(number)
        else:
            rows = 1 + number
            routing = g.routing.of(slice(0, rows))
            compare(step, kernel(g.x_TH[:rows], g.weights, routing), number, rows)

    def run(program: list[tuple[str, int]]) -> None:
        for step, number in program:
            run_step(step, number)

    what = f"{' x '.join(case.parts)}: {case.programs}"
    with _short_slices():
        errors = _run_threads([lambda p=program: run(p) for program in case.programs])  # type: ignore[misc]
    if errors is None:
        return FuzzOutcome(HANG, what)
    if errors:
        return FuzzOutcome(RAW, f"{what}: {format_error(errors[0])}")
    return FuzzOutcome(WRONG, f"{what}: {wrong}") if wrong else FuzzOutcome(RIGHT, what)


# ------------------------------------------------------------------------------------------ forks


def _in_child(function: Callable[[], bytes], patience_s: float) -> bytes | None:
    """Return what `function` returns in a forked child; None if the child hangs."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        answer = b"exit"
        try:
            answer = function()
        except BaseException as error:  # noqa: BLE001 (reported to the parent)
            answer = f"raises {type(error).__name__}: {error}".encode()[:300]
        finally:
            os.write(writer, answer)
            os._exit(0)
    os.close(writer)
    try:
        ready, _, _ = select.select([reader], [], [], patience_s)
        received = os.read(reader, 4096) if ready else None
    finally:
        os.close(reader)
        if child:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return received


@dataclass(frozen=True)
class ForkCase:
    """Forks while threads are in calls. steps: what each repeats. in_child: what the child does."""

    parts: tuple[str, str]
    steps: list[str]
    in_child: str
    pauses_us: list[int]


def forks(case: ForkCase) -> FuzzOutcome:  # noqa: C901 (one action for each step)
    """Fork while threads are in calls: a child's call is right; it never hangs."""
    given = samples.inputs()
    kernel = samples.kernel(PROBLEM, case.parts)
    plan = kernel.plan()
    layer = samples.loaded_layer(given.weights)
    problem = replace(PROBLEM, lora=samples.LORA)
    pool = import_name("modular_kernel.layers.adapter_pool:AdapterPool")(problem)
    arguments = (given.x_TH, given.weights, given.routing)
    expected = plan(*arguments).clone()
    stop = threading.Event()

    def make_and_call() -> torch.Tensor:
        return samples.kernel(PROBLEM, case.parts)(*arguments)

    def load() -> torch.Tensor:
        pool.load("mine", samples.adapter(2, 1))
        pool.evict("mine")
        return expected

    actions: dict[str, Callable[[], torch.Tensor]] = {
        "kernel": lambda: kernel(*arguments),
        "plan": lambda: plan(*arguments),
        "layer": lambda: layer(given.x_TH, given.routing),
        "make": make_and_call,
        "pool": load,
        "start": lambda: kernel.start(*arguments).finish(),
    }

    def busy(step: str) -> None:
        while not stop.is_set():
            # Another thread may have loaded the adapter.
            with contextlib.suppress(ModularKernelError):
                actions[step]()

    def child() -> bytes:
        if case.in_child == "pool":
            for name in list(pool.slots):
                pool.evict(name)
        found = actions[case.in_child]()
        return b"right" if _same(found, expected) else b"wrong"

    what = f"forks of {' x '.join(case.parts)}, during {case.steps}; then {case.in_child}"
    threads = [threading.Thread(target=busy, args=(s,), daemon=True) for s in case.steps]
    for thread in threads:
        thread.start()
    try:
        for pause in case.pauses_us:
            time.sleep(pause / 1e6)
            answer = _in_child(child, 15.0)
            if answer is None:
                return FuzzOutcome(HANG, what)
            if answer != b"right":
                kind = WRONG if answer == b"wrong" else RAW
                return FuzzOutcome(kind, f"{what}: {answer.decode(errors='replace')}")
    finally:
        stop.set()
        for thread in threads:
            thread.join(_PATIENCE_S)
    return FuzzOutcome(RIGHT, what)


# ------------------------------------------------------------------------------------- interrupts


@dataclass(frozen=True)
class InterruptCase:
    """Interrupts of an action. places: for each, after how many function calls."""

    action: str
    parts: tuple[str, str]
    places: list[int]
    error: str


_ERRORS: dict[str, type[BaseException]] = {
    "KeyboardInterrupt": KeyboardInterrupt,
    "MemoryError": MemoryError,
    "SystemExit": SystemExit,
}


def interrupts(case: InterruptCase) -> FuzzOutcome:
    """Interrupt an action at a random place: afterwards the objects work as before."""
    given = samples.inputs()
    kernel = samples.kernel(PROBLEM, case.parts)
    plan, layer = kernel.plan(), samples.loaded_layer(given.weights)
    lora = replace(PROBLEM, lora=samples.LORA)
    pool = import_name("modular_kernel.layers.adapter_pool:AdapterPool")(lora)
    arguments = (given.x_TH, given.weights, given.routing)
    expected = kernel(*arguments).clone()
    other = samples.inputs(1)
    actions: dict[str, Callable[[], object]] = {
        "kernel": lambda: kernel(*arguments),
        "plan": lambda: plan(*arguments),
        "layer": lambda: layer(given.x_TH, given.routing),
        "start": lambda: kernel.start(*arguments).finish(),
        "load": lambda: pool.load("mine", samples.adapter(2, 1)),
        "evict": lambda: pool.evict("mine"),
        "set_weights": lambda: layer.set_weights(other.weights),
        "reserve": lambda: kernel.reserve_workspace(4),
        "make": lambda: samples.kernel(PROBLEM, case.parts),
        "warm_up": lambda: layer.warm_up(3),
    }
    what = f"{case.error} in {case.action} of {' x '.join(case.parts)} at {case.places}"
    if case.action == "evict":
        pool.load("mine", samples.adapter(2, 1))
    for place in case.places:
        with contextlib.suppress(_ERRORS[case.error], ModularKernelError):
            _interrupted(actions[case.action], place, _ERRORS[case.error])
    outcomes: list[FuzzOutcome] = []

    def use() -> None:
        outcomes.append(_after_interrupt(case, what, kernel, plan, layer, pool, given, expected))

    # In another thread, which would wait for a lock that was not released.
    errors = _run_threads([use])
    if errors is None:
        return FuzzOutcome(HANG, what)
    if errors:
        return FuzzOutcome(RAW, f"{what}: {format_error(errors[0])}")
    return outcomes[0]


def _after_interrupt(  # noqa: PLR0913 (all that the interrupted action may have changed)
    case: InterruptCase,
    what: str,
    kernel: Any,
    plan: Any,
    layer: Any,
    pool: Any,
    given: Any,
    expected: torch.Tensor,
) -> FuzzOutcome:
    arguments = (given.x_TH, given.weights, given.routing)
    kernel.reserve_workspace(2)
    for name, run in (("kernel", kernel), ("plan", plan)):
        if not _same(run(*arguments), expected):
            return FuzzOutcome(WRONG, f"{what}: then {name}")
    if case.action == "set_weights":  # it has either the former weights or all of the others
        found = layer(given.x_TH, given.routing)
        others = kernel(given.x_TH, samples.inputs(1).weights, given.routing)
        if not (_same(found, expected) or _same(found, others)):
            return FuzzOutcome(WRONG, f"{what}: then layer, with parts of both weights")
        layer.set_weights(given.weights)
    if not _same(layer(given.x_TH, given.routing), expected):
        return FuzzOutcome(WRONG, f"{what}: then layer")
    if case.action in ("load", "evict"):
        fault = _pool_fault_after(pool)
        if fault:
            return FuzzOutcome(WRONG, f"{what}: {fault}")
    return FuzzOutcome(RIGHT, what)


def _pool_fault_after(pool: Any) -> str:
    """Check that the pool is consistent, and that all of its slots can be used."""
    if "mine" in pool.slots:
        slot = pool.slots["mine"]
        held = pool.weights(samples.inputs().weights).lora_b2[slot][..., :2]
        if not torch.equal(held, samples.adapter(2, 1).lora_b2):
            return "the adapter that is loaded is not whole"
        pool.evict("mine")
    for number in range(3):
        pool.load(str(number), samples.adapter(2, number))
    return _pool_fault(pool)


def _interrupted(action: Callable[[], object], place: int, error: type[BaseException]) -> None:
    """Run an action, and raise `error` at the `place`-th place where a signal may arrive.

    The interpreter handles signals when a function begins, and when one of C returns.
    """
    count = 0

    def profile(frame: FrameType, event: str, _function: Any) -> None:
        nonlocal count
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(_OURS):
            count += 1
            if count == place:
                raise error

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(before)


# The package's own files: torch and the standard library may not survive an interrupt anywhere.
_OURS = str(Path(__file__).parents[3])

_PARTS = st.sampled_from((samples.PAIR, samples.BATCHED))
_POOL_CASES = st.builds(
    PoolCase,
    manager=st.booleans(),
    programs=st.lists(
        st.lists(
            st.tuples(st.sampled_from(("load", "load", "evict")), st.integers(0, 5)),
            min_size=1,
            max_size=8,
        ),
        min_size=2,
        max_size=6,
    ),
)
_THREAD_CASES = st.builds(
    ThreadCase,
    parts=_PARTS,
    programs=st.lists(
        st.lists(st.tuples(st.sampled_from(_STEPS), st.integers(0, 3)), min_size=1, max_size=8),
        min_size=2,
        max_size=6,
    ),
)
_ACTIONS = ("kernel", "plan", "layer", "make", "pool", "start")
_FORK_CASES = st.builds(
    ForkCase,
    parts=_PARTS,
    steps=st.lists(st.sampled_from(_ACTIONS), min_size=1, max_size=3),
    in_child=st.sampled_from(_ACTIONS),
    pauses_us=st.lists(st.integers(0, 3000), min_size=1, max_size=5),
)
_INTERRUPT_CASES = st.builds(
    InterruptCase,
    action=st.sampled_from(
        ("kernel", "plan", "layer", "start", "load", "evict", "set_weights", "reserve", "make",
         "warm_up")
    ),
    parts=_PARTS,
    places=st.lists(st.integers(1, 400), min_size=1, max_size=3),
    error=st.sampled_from(sorted(_ERRORS)),
)  # fmt: skip
TARGETS: tuple[Target[Any], ...] = (
    Target("adapter_threads", 1, _POOL_CASES, adapter_threads),
    Target("interleavings", 1, _THREAD_CASES, interleavings, launches=True),
    Target("forks", 0.3, _FORK_CASES, forks),
    Target("interrupts", 2, _INTERRUPT_CASES, interrupts),
)
