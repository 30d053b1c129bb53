"""Fuzz targets: threads that use adapter pools and kernels, forks during calls, and interrupts.

An adapter pool holds LoRA adapters in numbered slots. `parts` in the cases below are the names of
an exchange class and an experts class.
"""

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
    CORRECT,
    HANG,
    UNTYPED_ERROR,
    WRONG_RESULT,
    FuzzOutcome,
    format_error,
)
from modular_kernel.testing.stress.fuzz.samples import PROBLEM
from modular_kernel.testing.stress.fuzz.target import Target, import_object

_TIMEOUT_S = 30.0


def _run_threads(functions: list[Callable[[], None]]) -> list[Exception] | None:
    """Run each function in a thread; return their exceptions, or None if a thread hangs."""
    errors: list[Exception] = []
    start = threading.Barrier(len(functions))

    def run(function: Callable[[], None]) -> None:
        try:
            start.wait(_TIMEOUT_S)
            function()
        except Exception as error:  # noqa: BLE001 (classified by the caller)
            errors.append(error)

    threads = [threading.Thread(target=run, args=(f,), daemon=True) for f in functions]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _TIMEOUT_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return None if any(thread.is_alive() for thread in threads) else errors


def _is_close(output: torch.Tensor, expected: torch.Tensor) -> bool:
    return output.shape == expected.shape and torch.allclose(output, expected, rtol=1e-4, atol=1e-5)


@contextlib.contextmanager
def _switch_threads_frequently() -> Iterator[None]:
    old_interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(old_interval)


# --------------------------------------------------------------------------------- adapter pools

# The steps of one thread: (operation, number of the adapter).
Program = list[tuple[str, int]]


@dataclass(frozen=True)
class PoolCase:
    """Threads that load and evict adapters.

    use_manager: whether to use a LoRAManager instead of an AdapterPool.
    programs: the steps of each thread.
    """

    use_manager: bool
    programs: list[Program]


def check_adapter_threads(case: PoolCase) -> FuzzOutcome:
    """Load and evict adapters in several threads. Afterwards, each slot must hold its adapter."""
    description = f"{'LoRAManager' if case.use_manager else 'AdapterPool'}, {case.programs}"
    load: Callable[[int], object]
    evict: Callable[[int], object]
    if case.use_manager:
        manager: Any = import_object("modular_kernel.layers.lora:LoRAManager")(
            PROBLEM, samples.LORA_OPTIONS, [3]
        )
        make = import_object("modular_kernel.layers.lora:MoELoRALayer")
        pool: Any = manager.pools[3]
        load = lambda n: manager.load(str(n), {3: make(samples.make_adapter(2, n))})  # noqa: E731
        evict = lambda n: manager.evict(str(n))  # noqa: E731
    else:
        problem = replace(PROBLEM, lora=samples.LORA_OPTIONS)
        pool = import_object("modular_kernel.layers.adapter_pool:AdapterPool")(problem)
        load = lambda n: pool.load(str(n), samples.make_adapter(2, n))  # noqa: E731
        evict = lambda n: pool.evict(str(n))  # noqa: E731

    def run(program: Program) -> None:
        for operation, number in program:
            # There may be no free slot, or another thread may have loaded or evicted the adapter.
            with contextlib.suppress(ModularKernelError):
                (load if operation == "load" else evict)(number)

    with _switch_threads_frequently():
        errors = _run_threads([lambda p=program: run(p) for program in case.programs])  # type: ignore[misc]
    if errors is None:
        return FuzzOutcome(HANG, description)
    if errors:
        return FuzzOutcome(UNTYPED_ERROR, f"{description}: {format_error(errors[0])}")
    mismatch = _find_pool_mismatch(pool)
    return (
        FuzzOutcome(WRONG_RESULT, f"{description}: {mismatch}")
        if mismatch
        else FuzzOutcome(CORRECT, description)
    )


def _find_pool_mismatch(pool: Any) -> str:
    slots = dict(pool.slots)
    if len(set(slots.values())) != len(slots):
        return f"two names in one slot: {slots}"
    tensors = pool.weights(samples.make_call_inputs().weights)
    for name, slot in slots.items():
        expected = samples.make_adapter(2, int(name))
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
    """Threads that use one kernel, its plan, and a layer.

    parts: names of an exchange class and an experts class.
    programs: for each thread, steps given as (one of _STEPS, number of the inputs).
    """

    parts: tuple[str, str]
    programs: list[list[tuple[str, int]]]


def check_interleaved_steps(case: ThreadCase) -> FuzzOutcome:  # noqa: C901 (one case for each step)
    """Make calls, plans and reservations in several threads. Every output must be correct."""
    kernel = samples.make_torch_kernel(PROBLEM, case.parts)
    shared_plan = kernel.plan()
    inputs = [samples.make_call_inputs(seed) for seed in range(4)]
    expected = [kernel(sample.x_TH, sample.weights, sample.routing).clone() for sample in inputs]
    layer = samples.make_loaded_layer(inputs[0].weights)
    mismatches: list[str] = []

    def compare(step: str, output: torch.Tensor, number: int, rows: int | None = None) -> None:
        if not _is_close(output, expected[number][:rows]):
            mismatches.append(f"{step} {number}")

    def run_step(step: str, number: int) -> None:
        sample = inputs[number]
        arguments = (sample.x_TH, sample.weights, sample.routing)
        if step == "call":
            compare(step, kernel(*arguments), number)
        elif step == "call out":
            out = torch.full_like(sample.x_TH, torch.nan)
            compare(step, kernel(*arguments, out=out), number)
            compare(step, out, number)
        elif step == "plan":
            compare(step, kernel.plan()(*arguments), number)
        elif step == "shared plan":
            out = torch.empty_like(sample.x_TH)
            compare(step, shared_plan(*arguments, out=out), number)
        elif step == "start":
            pending = kernel.start(*arguments)
            time.sleep(0)
            compare(step, pending.finish(), number)
        elif step == "reserve":
            kernel.reserve_workspace(1 + number)
        elif step == "layer":
            output = layer(inputs[0].x_TH, inputs[0].routing)
            compare(step, output, 0)
        elif step == "count":
            _ = kernel.invalid_ids
        elif step == "specs":
            kernel.workspace_specs(number)
        else:
            rows = 1 + number
            routing = sample.routing.of(slice(0, rows))
            compare(step, kernel(sample.x_TH[:rows], sample.weights, routing), number, rows)

    def run(program: list[tuple[str, int]]) -> None:
        for step, number in program:
            run_step(step, number)

    description = f"{' x '.join(case.parts)}: {case.programs}"
    with _switch_threads_frequently():
        errors = _run_threads([lambda p=program: run(p) for program in case.programs])  # type: ignore[misc]
    if errors is None:
        return FuzzOutcome(HANG, description)
    if errors:
        return FuzzOutcome(UNTYPED_ERROR, f"{description}: {format_error(errors[0])}")
    return (
        FuzzOutcome(WRONG_RESULT, f"{description}: {mismatches}")
        if mismatches
        else FuzzOutcome(CORRECT, description)
    )


# ------------------------------------------------------------------------------------------ forks


def _run_in_child(function: Callable[[], bytes], timeout_s: float) -> bytes | None:
    """Run `function` in a forked child; return its result, or None if the child hangs."""
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
        ready, _, _ = select.select([reader], [], [], timeout_s)
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
    """Forks while threads make calls.

    parts: names of an exchange class and an experts class.
    steps: the action that each thread repeats.
    child_action: the action of each forked child.
    pauses_us: microseconds to wait before each fork.
    """

    parts: tuple[str, str]
    steps: list[str]
    child_action: str
    pauses_us: list[int]


def check_forks(case: ForkCase) -> FuzzOutcome:  # noqa: C901 (one action for each step)
    """Fork while threads make calls. Children must not hang, and their output must be correct."""
    inputs = samples.make_call_inputs()
    kernel = samples.make_torch_kernel(PROBLEM, case.parts)
    plan = kernel.plan()
    layer = samples.make_loaded_layer(inputs.weights)
    problem = replace(PROBLEM, lora=samples.LORA_OPTIONS)
    pool = import_object("modular_kernel.layers.adapter_pool:AdapterPool")(problem)
    arguments = (inputs.x_TH, inputs.weights, inputs.routing)
    expected = plan(*arguments).clone()
    stop = threading.Event()

    def make_and_call() -> torch.Tensor:
        return samples.make_torch_kernel(PROBLEM, case.parts)(*arguments)

    def load_and_evict() -> torch.Tensor:
        pool.load("mine", samples.make_adapter(2, 1))
        pool.evict("mine")
        return expected

    actions: dict[str, Callable[[], torch.Tensor]] = {
        "kernel": lambda: kernel(*arguments),
        "plan": lambda: plan(*arguments),
        "layer": lambda: layer(inputs.x_TH, inputs.routing),
        "make": make_and_call,
        "pool": load_and_evict,
        "start": lambda: kernel.start(*arguments).finish(),
    }

    def repeat(step: str) -> None:
        while not stop.is_set():
            # Another thread may have loaded the adapter.
            with contextlib.suppress(ModularKernelError):
                actions[step]()

    def run_child_action() -> bytes:
        if case.child_action == "pool":
            for name in list(pool.slots):
                pool.evict(name)
        output = actions[case.child_action]()
        return b"right" if _is_close(output, expected) else b"wrong"

    description = (
        f"forks of {' x '.join(case.parts)}, during {case.steps}; then {case.child_action}"
    )
    threads = [threading.Thread(target=repeat, args=(s,), daemon=True) for s in case.steps]
    for thread in threads:
        thread.start()
    try:
        for pause in case.pauses_us:
            time.sleep(pause / 1e6)
            answer = _run_in_child(run_child_action, 15.0)
            if answer is None:
                return FuzzOutcome(HANG, description)
            if answer != b"right":
                kind = WRONG_RESULT if answer == b"wrong" else UNTYPED_ERROR
                return FuzzOutcome(kind, f"{description}: {answer.decode(errors='replace')}")
    finally:
        stop.set()
        for thread in threads:
            thread.join(_TIMEOUT_S)
    return FuzzOutcome(CORRECT, description)


# ------------------------------------------------------------------------------------- interrupts


@dataclass(frozen=True)
class InterruptCase:
    """Repeated interruptions of one action by an error.

    positions: for each interruption, the number of function calls and returns after which it
        occurs.
    """

    action: str
    parts: tuple[str, str]
    positions: list[int]
    error: str


_ERRORS: dict[str, type[BaseException]] = {
    "KeyboardInterrupt": KeyboardInterrupt,
    "MemoryError": MemoryError,
    "SystemExit": SystemExit,
}


def check_interrupts(case: InterruptCase) -> FuzzOutcome:
    """Interrupt an action at random positions. Afterwards, all objects must work as before."""
    inputs = samples.make_call_inputs()
    kernel = samples.make_torch_kernel(PROBLEM, case.parts)
    plan, layer = kernel.plan(), samples.make_loaded_layer(inputs.weights)
    lora_problem = replace(PROBLEM, lora=samples.LORA_OPTIONS)
    pool = import_object("modular_kernel.layers.adapter_pool:AdapterPool")(lora_problem)
    arguments = (inputs.x_TH, inputs.weights, inputs.routing)
    expected = kernel(*arguments).clone()
    new_inputs = samples.make_call_inputs(1)
    actions: dict[str, Callable[[], object]] = {
        "kernel": lambda: kernel(*arguments),
        "plan": lambda: plan(*arguments),
        "layer": lambda: layer(inputs.x_TH, inputs.routing),
        "start": lambda: kernel.start(*arguments).finish(),
        "load": lambda: pool.load("mine", samples.make_adapter(2, 1)),
        "evict": lambda: pool.evict("mine"),
        "set_weights": lambda: layer.set_weights(new_inputs.weights),
        "reserve": lambda: kernel.reserve_workspace(4),
        "make": lambda: samples.make_torch_kernel(PROBLEM, case.parts),
        "warm_up": lambda: layer.warm_up(3),
    }
    description = f"{case.error} in {case.action} of {' x '.join(case.parts)} at {case.positions}"
    if case.action == "evict":
        pool.load("mine", samples.make_adapter(2, 1))
    for position in case.positions:
        with contextlib.suppress(_ERRORS[case.error], ModularKernelError):
            _run_interrupted(actions[case.action], position, _ERRORS[case.error])
    outcomes: list[FuzzOutcome] = []

    def check_afterwards() -> None:
        outcomes.append(
            _check_after_interrupt(case, description, kernel, plan, layer, pool, inputs, expected)
        )

    # Use another thread, because it would block if a lock was not released.
    errors = _run_threads([check_afterwards])
    if errors is None:
        return FuzzOutcome(HANG, description)
    if errors:
        return FuzzOutcome(UNTYPED_ERROR, f"{description}: {format_error(errors[0])}")
    return outcomes[0]


def _check_after_interrupt(  # noqa: PLR0913 (all that the interrupted action may have changed)
    case: InterruptCase,
    description: str,
    kernel: Any,
    plan: Any,
    layer: Any,
    pool: Any,
    inputs: Any,
    expected: torch.Tensor,
) -> FuzzOutcome:
    arguments = (inputs.x_TH, inputs.weights, inputs.routing)
    kernel.reserve_workspace(2)
    for name, run in (("kernel", kernel), ("plan", plan)):
        if not _is_close(run(*arguments), expected):
            message = f"{description}: {name} returns a wrong result afterwards"
            return FuzzOutcome(WRONG_RESULT, message)
    if case.action == "set_weights":  # the weights must be either all old or all new
        output = layer(inputs.x_TH, inputs.routing)
        output_with_new_weights = kernel(
            inputs.x_TH, samples.make_call_inputs(1).weights, inputs.routing
        )
        if not (_is_close(output, expected) or _is_close(output, output_with_new_weights)):
            message = f"{description}: afterwards, the layer has a mix of old and new weights"
            return FuzzOutcome(WRONG_RESULT, message)
        layer.set_weights(inputs.weights)
    if not _is_close(layer(inputs.x_TH, inputs.routing), expected):
        message = f"{description}: layer returns a wrong result afterwards"
        return FuzzOutcome(WRONG_RESULT, message)
    if case.action in ("load", "evict"):
        mismatch = _find_mismatch_after_interrupt(pool)
        if mismatch:
            return FuzzOutcome(WRONG_RESULT, f"{description}: {mismatch}")
    return FuzzOutcome(CORRECT, description)


def _find_mismatch_after_interrupt(pool: Any) -> str:
    """Describe how the pool is inconsistent, or why a slot cannot be used; "" if it is correct."""
    if "mine" in pool.slots:
        slot = pool.slots["mine"]
        loaded = pool.weights(samples.make_call_inputs().weights).lora_b2[slot][..., :2]
        if not torch.equal(loaded, samples.make_adapter(2, 1).lora_b2):
            return "the adapter was only partially loaded"
        pool.evict("mine")
    for number in range(3):
        pool.load(str(number), samples.make_adapter(2, number))
    return _find_pool_mismatch(pool)


def _run_interrupted(
    action: Callable[[], object], position: int, error: type[BaseException]
) -> None:
    """Run an action, and raise `error` at the `position`-th point at which a signal may be handled.

    The interpreter handles signals when a Python function starts and when a C function returns.
    """
    count = 0

    def profile(frame: FrameType, event: str, _function: Any) -> None:
        nonlocal count
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(_PACKAGE_FOLDER):
            count += 1
            if count == position:
                raise error

    old_profiler = sys.getprofile()
    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(old_profiler)


# Only code of this package is interrupted, because torch and the standard library do not tolerate
# an error at every point.
_PACKAGE_FOLDER = str(Path(__file__).parents[3])

_PARTS = st.sampled_from((samples.STANDARD_PAIR, samples.BATCHED_PAIR))
_POOL_CASES = st.builds(
    PoolCase,
    use_manager=st.booleans(),
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
    child_action=st.sampled_from(_ACTIONS),
    pauses_us=st.lists(st.integers(0, 3000), min_size=1, max_size=5),
)
_INTERRUPT_CASES = st.builds(
    InterruptCase,
    action=st.sampled_from(
        ("kernel", "plan", "layer", "start", "load", "evict", "set_weights", "reserve", "make",
         "warm_up")
    ),
    parts=_PARTS,
    positions=st.lists(st.integers(1, 400), min_size=1, max_size=3),
    error=st.sampled_from(sorted(_ERRORS)),
)  # fmt: skip
TARGETS: tuple[Target[Any], ...] = (
    Target("adapter_threads", 1, _POOL_CASES, check_adapter_threads),
    Target("interleavings", 1, _THREAD_CASES, check_interleaved_steps, launches=True),
    Target("forks", 0.3, _FORK_CASES, check_forks),
    Target("interrupts", 2, _INTERRUPT_CASES, check_interrupts),
)
