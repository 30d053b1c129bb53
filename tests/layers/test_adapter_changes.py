"""Loading and evicting LoRA adapters in several threads, with interrupts, and in inference mode."""

import sys
import threading
from collections.abc import Callable
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import pytest
import torch
from forked_child import TIMEOUT_S
from lora_layers import STARTS, make_adapter, make_base_layer, make_call

import modular_kernel as mk
from modular_kernel.errors import CapacityError, WeightsError
from modular_kernel.layers import adapter_pool, lora
from modular_kernel.layers.adapter_pool import AdapterPool
from modular_kernel.layers.lora import ForwardBatch, FusedMoEWithLoRA, LoRAManager, MoELoRALayer

PROBLEM = mk.Problem(
    tokens=8, hidden=32, intermediate=24, experts=6, top_k=2, dtype=torch.float32,
    lora="adapters=8,rank=5",
)  # fmt: skip
THREADS = 8


def run_concurrently(*functions: Callable[[], Any]) -> None:
    """Run each function in its own thread, all starting together, and raise the first error."""
    barrier, errors = threading.Barrier(len(functions)), list[BaseException]()

    def run(function: Callable[[], Any]) -> None:
        try:
            barrier.wait(TIMEOUT_S)
            function()
        except BaseException as error:  # noqa: BLE001  raised after all threads have ended
            errors.append(error)

    threads = [threading.Thread(target=run, args=(f,), daemon=True) for f in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert not any(thread.is_alive() for thread in threads)
    for error in errors:
        raise error


def copy_slot(pool: AdapterPool, slot: int) -> dict[str, torch.Tensor]:
    return {name: tensor[slot].clone() for name, tensor in pool._tensors.items()}


def load_alone(adapter: Any) -> dict[str, torch.Tensor]:
    """Return the slot's tensors of a pool in which only this adapter is loaded."""
    pool = AdapterPool(PROBLEM)
    return copy_slot(pool, pool.load("alone", adapter))


@pytest.fixture
def threads_meet_at_slot_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delay all threads between choosing a slot and taking it, so that a race would occur there."""
    check_adapter, barrier = AdapterPool._check_adapter, threading.Barrier(THREADS)

    def wait_and_check(self: AdapterPool, *arguments: Any) -> int:
        with suppress(threading.BrokenBarrierError):  # fewer threads than THREADS may arrive
            barrier.wait(0.3)
        return check_adapter(self, *arguments)

    monkeypatch.setattr(AdapterPool, "_check_adapter", wait_and_check)


@pytest.mark.usefixtures("threads_meet_at_slot_choice")
def test_concurrent_loads_use_different_slots() -> None:
    pool = AdapterPool(PROBLEM)
    adapters = {f"{n}": make_adapter(1 + n % 5, n, num_a13=2) for n in range(THREADS)}
    run_concurrently(*(lambda n=name: pool.load(n, adapters[n]) for name in adapters))  # type: ignore[misc]
    assert sorted(pool.slots.values()) == list(range(THREADS))
    for name, adapter in adapters.items():
        loaded, expected = copy_slot(pool, pool.slots[name]), load_alone(adapter)
        assert all(
            torch.equal(loaded[tensor_name], expected[tensor_name]) for tensor_name in expected
        ), name


@pytest.mark.usefixtures("threads_meet_at_slot_choice")
def test_concurrent_loads_use_the_same_slot_in_all_layers() -> None:
    manager = LoRAManager(make_base_layer().problem, "adapters=8,rank=5", [3, 4])
    adapter = MoELoRALayer(make_adapter(4, 1, num_a13=2))
    run_concurrently(*(lambda n=n: manager.load(f"{n}", {3: adapter}) for n in range(THREADS)))  # type: ignore[misc]
    third, fourth = (dict(pool.slots) for pool in manager.pools.values())
    assert third == fourth
    assert sorted(third.values()) == list(range(THREADS))


def test_threads_see_only_their_own_adapters() -> None:
    layer = make_base_layer()
    manager = LoRAManager(layer.problem, "adapters=3,rank=5", [3])
    adapted, (x, logits) = FusedMoEWithLoRA(layer, manager), make_call()
    adapters = [MoELoRALayer(make_adapter(1 + n % 5, n, num_a13=2)) for n in range(4)]
    expected_outputs = []
    for n, adapter in enumerate(adapters):
        manager.load(f"{n}", {3: adapter})
        batch = ForwardBatch((f"{n}", None, f"{n}"), STARTS)
        expected_outputs.append(
            adapted(x, logits, moe_lora_info=manager.prepare_moe_lora_batch(batch, 3)).clone()
        )
        manager.evict(f"{n}")

    def load_and_evict(n: int) -> None:
        for repetition in range(10):
            name = f"{n} {repetition}"
            try:
                manager.load(name, {3: adapters[n]})
            except CapacityError:  # the other threads use all slots
                continue
            batch = ForwardBatch((name, None, name), STARTS)
            info = manager.prepare_moe_lora_batch(batch, 3)
            torch.testing.assert_close(adapted(x, logits, moe_lora_info=info), expected_outputs[n])
            manager.evict(name)

    run_concurrently(*(lambda n=n: load_and_evict(n) for n in range(4)))  # type: ignore[misc]
    assert not manager.pools[3].slots
    assert not any(tensor.any() for tensor in manager.pools[3]._tensors.values())


# ------------------------------------------------------------------------- interrupted changes


class Interrupt(BaseException):
    """An interrupt like KeyboardInterrupt, which `except Exception` does not catch."""


@contextmanager
def interrupt_at_lines(*lines: int) -> Any:
    """Raise Interrupt at the given lines, and yield a list that holds the number of executed lines.

    Lines are numbered from 1 in the order in which this thread executes them in the modules
    `adapter_pool` and `lora`.
    """
    files, line_count, remaining = {adapter_pool.__file__, lora.__file__}, [0], sorted(lines)

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            line_count[0] += 1
            if remaining and line_count[0] == remaining[0]:
                remaining.pop(0)
                raise Interrupt(frame.f_lineno)
        return trace

    trace_before = sys.gettrace()
    grad_enabled_before = torch.is_grad_enabled()
    sys.settrace(trace)
    try:
        yield line_count
    finally:
        sys.settrace(trace_before)
        torch.set_grad_enabled(
            grad_enabled_before
        )  # an interrupt inside no_grad would leave gradients off


def count_lines(function: Callable[[], Any]) -> int:
    with interrupt_at_lines() as line_count:
        function()
    return int(line_count[0])


def check_consistency(manager: LoRAManager) -> None:
    """Check that all layers have the same adapters in the same slots, and zeros in free slots."""
    manager.load("probe", {})
    manager.evict("probe")
    for layer, pool in manager.pools.items():
        assert dict(pool.slots) == manager._slots
        for slot in set(range(2)) - set(pool.slots.values()):
            assert not any(tensor[slot].any() for tensor in pool._tensors.values())
            assert int(manager._ranks[layer][slot]) == 0
            assert float(manager._scalings[layer][slot]) == 1.0


@pytest.mark.parametrize("mode", ["merged", "parallel_delta"])
@pytest.mark.parametrize(
    "second_interrupt_after", [None, 7], ids=["one_interrupt", "second_interrupt_during_rollback"]
)
def test_interrupts_at_any_line_leave_the_layers_consistent(
    mode: Any, second_interrupt_after: int | None
) -> None:
    shared, num_a13 = (",a13=shared", 1) if mode == "parallel_delta" else ("", 2)
    adapter = MoELoRALayer(make_adapter(4, 1, num_a13=num_a13), 2.0)

    def make_manager() -> LoRAManager:
        manager = LoRAManager(
            make_base_layer().problem, f"adapters=2,rank=5{shared}", [3, 4], mode=mode
        )
        manager.load("kept", {3: adapter, 4: adapter})
        return manager

    manager = make_manager()
    lines_per_change = {
        "load": count_lines(lambda: manager.load("new", {3: adapter})),
        "evict": count_lines(lambda: manager.evict("new")),
    }
    for change, count in lines_per_change.items():
        manager = make_manager()
        tensors_before = [copy_slot(pool, 0) for pool in manager.pools.values()]
        for line in range(1, count + 1):
            if change == "evict" and "new" not in manager._slots:
                manager.load("new", {3: adapter})
            lines = (
                (line,) if second_interrupt_after is None else (line, line + second_interrupt_after)
            )
            try:
                with interrupt_at_lines(*lines):
                    if change == "load":
                        manager.load("new", {3: adapter})
                    else:
                        manager.evict("new")
            except Interrupt:
                pass
            # The interrupt came after the load or before the eviction took effect.
            if change == "load" and "new" in manager._slots:
                manager.evict("new")
            if change == "evict" and "new" in manager._slots:
                manager.evict("new")
            check_consistency(manager)
            for pool, kept_tensors in zip(manager.pools.values(), tensors_before, strict=True):
                assert dict(pool.slots) == {"kept": 0}
                tensors = copy_slot(pool, 0)
                assert all(torch.equal(tensors[name], kept_tensors[name]) for name in kept_tensors)


@pytest.mark.parametrize("scaling", [1e39, -1e300, 1e-60])
def test_refused_scaling_leaves_slots_free(scaling: float) -> None:
    problem = make_base_layer().problem
    manager = LoRAManager(problem, "adapters=2,rank=5,a13=shared", [3, 4], mode="parallel_delta")
    adapter = make_adapter(4, 1)
    with pytest.raises(WeightsError, match=r"'mine': scaling of layer 4: got .*float32"):
        manager.load("mine", {3: MoELoRALayer(adapter, 2.0), 4: MoELoRALayer(adapter, scaling)})
    check_consistency(manager)
    for name in ("mine", "other"):
        manager.load(name, {3: MoELoRALayer(adapter, 3e38), 4: MoELoRALayer(adapter, 0.0)})


# ------------------------------------------------------------------------------ inference mode


def test_pools_made_in_inference_mode_load_outside_it() -> None:
    with torch.inference_mode():
        pool = AdapterPool(PROBLEM)
        pool.load("within", make_adapter(4, 1, num_a13=2))
        adapter_of_inference_mode = make_adapter(3, 2, num_a13=2)
    pool.load("outside", adapter_of_inference_mode)
    pool.evict("within")
    assert not any(tensor[0].any() for tensor in pool._tensors.values())
    loaded, expected = copy_slot(pool, 1), load_alone(adapter_of_inference_mode)
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


@pytest.mark.parametrize("mode", ["merged", "parallel_delta"])
def test_managers_made_in_inference_mode_load_outside_it(mode: Any) -> None:
    shared, num_a13 = (",a13=shared", 1) if mode == "parallel_delta" else ("", 2)
    with torch.inference_mode():
        manager = LoRAManager(
            make_base_layer().problem, f"adapters=2,rank=5{shared}", [3], mode=mode
        )
    manager.load("mine", {3: MoELoRALayer(make_adapter(4, 1, num_a13=num_a13), 2.0)})
    assert manager._ranks[3].tolist() == [4, 0]
    with torch.inference_mode():
        manager.evict("mine")
    manager.load("mine", {})
