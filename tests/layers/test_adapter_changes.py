"""Loading and evicting adapters: from several threads, interrupted at any line, and in inference
mode.
"""

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


def at_once(*functions: Callable[[], Any]) -> None:
    """Run each function in its own thread, all starting together, and raise the first error."""
    barrier, failed = threading.Barrier(len(functions)), list[BaseException]()

    def run(function: Callable[[], Any]) -> None:
        try:
            barrier.wait(TIMEOUT_S)
            function()
        except BaseException as error:  # noqa: BLE001  raised below
            failed.append(error)

    threads = [threading.Thread(target=run, args=(f,), daemon=True) for f in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert not any(thread.is_alive() for thread in threads)
    for error in failed:
        raise error


def slot_of(pool: AdapterPool, slot: int) -> dict[str, torch.Tensor]:
    return {name: tensor[slot].clone() for name, tensor in pool._tensors.items()}


def alone(own: Any) -> dict[str, torch.Tensor]:
    """Return the contents of a slot with one adapter only."""
    pool = AdapterPool(PROBLEM)
    return slot_of(pool, pool.load("alone", own))


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delay threads between choosing a slot and taking it, so that they meet there."""
    check, barrier = AdapterPool._check_adapter, threading.Barrier(THREADS)

    def slow(self: AdapterPool, *given: Any) -> int:
        with suppress(threading.BrokenBarrierError):  # a turn each
            barrier.wait(0.3)
        return check(self, *given)

    monkeypatch.setattr(AdapterPool, "_check_adapter", slow)


@pytest.mark.usefixtures("meeting")
def test_threads_load_into_different_slots() -> None:
    pool = AdapterPool(PROBLEM)
    owns = {f"{n}": make_adapter(1 + n % 5, n, halves=2) for n in range(THREADS)}
    at_once(*(lambda n=name: pool.load(n, owns[n]) for name in owns))  # type: ignore[misc]
    assert sorted(pool.slots.values()) == list(range(THREADS))
    for name, own in owns.items():
        found, want = slot_of(pool, pool.slots[name]), alone(own)
        assert all(torch.equal(found[each], want[each]) for each in want), name


@pytest.mark.usefixtures("meeting")
def test_threads_load_into_the_same_slot_of_all_layers() -> None:
    manager = LoRAManager(make_base_layer().problem, "adapters=8,rank=5", [3, 4])
    own = MoELoRALayer(make_adapter(4, 1, halves=2))
    at_once(*(lambda n=n: manager.load(f"{n}", {3: own}) for n in range(THREADS)))  # type: ignore[misc]
    third, fourth = (dict(pool.slots) for pool in manager.pools.values())
    assert third == fourth
    assert sorted(third.values()) == list(range(THREADS))


def test_threads_that_load_use_and_evict_see_their_own_adapters() -> None:
    layer = make_base_layer()
    manager = LoRAManager(layer.problem, "adapters=3,rank=5", [3])
    adapted, (x, logits) = FusedMoEWithLoRA(layer, manager), make_call()
    owns = [MoELoRALayer(make_adapter(1 + n % 5, n, halves=2)) for n in range(4)]
    wants = []
    for n, own in enumerate(owns):
        manager.load(f"{n}", {3: own})
        batch = ForwardBatch((f"{n}", None, f"{n}"), STARTS)
        wants.append(
            adapted(x, logits, moe_lora_info=manager.prepare_moe_lora_batch(batch, 3)).clone()
        )
        manager.evict(f"{n}")

    def use(n: int) -> None:
        for turn in range(10):
            name = f"{n} {turn}"
            try:
                manager.load(name, {3: owns[n]})
            except CapacityError:  # the others have all slots
                continue
            batch = ForwardBatch((name, None, name), STARTS)
            info = manager.prepare_moe_lora_batch(batch, 3)
            torch.testing.assert_close(adapted(x, logits, moe_lora_info=info), wants[n])
            manager.evict(name)

    at_once(*(lambda n=n: use(n) for n in range(4)))  # type: ignore[misc]
    assert not manager.pools[3].slots
    assert not any(tensor.any() for tensor in manager.pools[3]._tensors.values())


# ------------------------------------------------------------------------- interrupted changes


class Interrupt(BaseException):
    """Like KeyboardInterrupt, not an Exception."""


@contextmanager
def interrupted(*lines: int) -> Any:
    """Raise Interrupt at the given indices among the lines that this thread executes in both
    modules.
    """
    files, passed, left = {adapter_pool.__file__, lora.__file__}, [0], sorted(lines)

    def watch(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            passed[0] += 1
            if left and passed[0] == left[0]:
                left.pop(0)
                raise Interrupt(frame.f_lineno)
        return watch

    before = sys.gettrace()
    grad = torch.is_grad_enabled()
    sys.settrace(watch)
    try:
        yield passed
    finally:
        sys.settrace(before)
        torch.set_grad_enabled(grad)  # an interrupt within no_grad's own code leaves it off


def lines_of(function: Callable[[], Any]) -> int:
    with interrupted() as passed:
        function()
    return int(passed[0])


def consistent(manager: LoRAManager) -> None:
    """Check that all layers have the same adapters in the same slots, and zeros in the others."""
    manager.load("probe", {})
    manager.evict("probe")
    for layer, pool in manager.pools.items():
        assert dict(pool.slots) == manager._slots
        for slot in set(range(2)) - set(pool.slots.values()):
            assert not any(tensor[slot].any() for tensor in pool._tensors.values())
            assert int(manager._ranks[layer][slot]) == 0
            assert float(manager._scalings[layer][slot]) == 1.0


@pytest.mark.parametrize("mode", ["merged", "parallel_delta"])
@pytest.mark.parametrize("again", [None, 7], ids=["once", "in its undoing too"])
def test_a_load_and_an_evict_interrupted_at_any_line(mode: Any, again: int | None) -> None:
    shared, halves = (",a13=shared", 1) if mode == "parallel_delta" else ("", 2)
    own = MoELoRALayer(make_adapter(4, 1, halves=halves), 2.0)

    def made() -> LoRAManager:
        manager = LoRAManager(
            make_base_layer().problem, f"adapters=2,rank=5{shared}", [3, 4], mode=mode
        )
        manager.load("kept", {3: own, 4: own})
        return manager

    manager = made()
    steps = {
        "load": lines_of(lambda: manager.load("new", {3: own})),
        "evict": lines_of(lambda: manager.evict("new")),
    }
    for change, count in steps.items():
        manager = made()
        kept = [slot_of(pool, 0) for pool in manager.pools.values()]
        for line in range(1, count + 1):
            if change == "evict" and "new" not in manager._slots:
                manager.load("new", {3: own})
            lines = (line,) if again is None else (line, line + again)
            try:
                with interrupted(*lines):
                    if change == "load":
                        manager.load("new", {3: own})
                    else:
                        manager.evict("new")
            except Interrupt:
                pass
            if change == "load" and "new" in manager._slots:  # the last line was done
                manager.evict("new")
            if change == "evict" and "new" in manager._slots:
                manager.evict("new")
            consistent(manager)
            for pool, want in zip(manager.pools.values(), kept, strict=True):
                assert dict(pool.slots) == {"kept": 0}
                found = slot_of(pool, 0)
                assert all(torch.equal(found[name], want[name]) for name in want)


@pytest.mark.parametrize("scaling", [1e39, -1e300, 1e-60])
def test_a_scaling_out_of_the_range_of_float32_takes_no_slot(scaling: float) -> None:
    problem = make_base_layer().problem
    manager = LoRAManager(problem, "adapters=2,rank=5,a13=shared", [3, 4], mode="parallel_delta")
    own = make_adapter(4, 1)
    with pytest.raises(WeightsError, match=r"'mine': scaling of layer 4: got .*float32"):
        manager.load("mine", {3: MoELoRALayer(own, 2.0), 4: MoELoRALayer(own, scaling)})
    consistent(manager)
    for name in ("mine", "other"):
        manager.load(name, {3: MoELoRALayer(own, 3e38), 4: MoELoRALayer(own, 0.0)})


# ------------------------------------------------------------------------------ inference mode


def test_pools_made_in_inference_mode_load_outside_it() -> None:
    with torch.inference_mode():
        pool = AdapterPool(PROBLEM)
        pool.load("within", make_adapter(4, 1, halves=2))
        theirs = make_adapter(3, 2, halves=2)  # tensors of inference mode
    pool.load("outside", theirs)
    pool.evict("within")
    assert not any(tensor[0].any() for tensor in pool._tensors.values())
    found, want = slot_of(pool, 1), alone(theirs)
    assert all(torch.equal(found[name], want[name]) for name in want)


@pytest.mark.parametrize("mode", ["merged", "parallel_delta"])
def test_managers_made_in_inference_mode_load_outside_it(mode: Any) -> None:
    shared, halves = (",a13=shared", 1) if mode == "parallel_delta" else ("", 2)
    with torch.inference_mode():
        manager = LoRAManager(
            make_base_layer().problem, f"adapters=2,rank=5{shared}", [3], mode=mode
        )
    manager.load("mine", {3: MoELoRALayer(make_adapter(4, 1, halves=halves), 2.0)})
    assert manager._ranks[3].tolist() == [4, 0]
    with torch.inference_mode():
        manager.evict("mine")
    manager.load("mine", {})
