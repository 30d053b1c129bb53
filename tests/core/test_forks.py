"""A child forked at any moment works or raises a typed error; it never deadlocks."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_child import TIMEOUT_S, Gate, run_in_child
from lora_layers import make_adapter as layer_adapter
from lora_layers import make_base_layer

import modular_kernel as mk
from modular_kernel.errors import StateError
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.layers.adapter_pool import AdapterPool
from modular_kernel.layers.fused_moe import FusedMoE
from modular_kernel.layers.lora import ForwardBatch, LoRAManager, MoELoRALayer
from modular_kernel.select.cache import Cache
from modular_kernel.spec.problem import Machine
from modular_kernel.utils import forks

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork"),
]
NO_EP = "MoEPrepareAndFinalizeNoEP"
PROBLEM = mk.Problem(
    tokens=8, hidden=32, intermediate=16, experts=4, top_k=2, dtype=torch.float32
)  # fmt: skip


def arguments(problem: mk.Problem = PROBLEM) -> tuple[torch.Tensor, mk.ExpertWeights, mk.Routing]:
    g = torch.Generator().manual_seed(0)
    e, h, i = problem.experts, problem.hidden, problem.intermediate
    weights = mk.ExpertWeights(
        w1=torch.randn(e, 2 * i, h, generator=g) / h**0.5,
        w2=torch.randn(e, h, i, generator=g) / i**0.5,
    )
    ids = torch.randint(e, (problem.tokens, problem.top_k), generator=g, dtype=torch.int32)
    scores = torch.rand(problem.tokens, problem.top_k, generator=g)
    return torch.randn(problem.tokens, h, generator=g), weights, mk.Routing(scores, ids)


def make_blocking_kernel(gate: Gate) -> FusedMoEModularKernel:
    """Return a kernel whose experts wait at the gate in each call."""
    kernel = mk.make_kernel(NO_EP, "TorchExperts", PROBLEM, machine=Machine("cpu"))
    apply = kernel.experts.apply

    def slow(*args: Any, **options: Any) -> None:
        gate.pass_through()
        apply(*args, **options)

    kernel.experts.apply = slow  # type: ignore[method-assign]
    return kernel


def test_a_plan_in_use_by_another_thread_works_in_the_child() -> None:
    gate, inputs = Gate(), arguments()
    plan = make_blocking_kernel(gate).plan()
    expected = plan(*inputs).clone()
    with gate.holding(lambda: plan(*inputs)):
        torch.testing.assert_close(run_in_child(lambda: plan(*inputs).clone()), expected)
        from_grandchild = run_in_child(lambda: run_in_child(lambda: plan(*inputs).clone()))
        torch.testing.assert_close(from_grandchild, expected)
    assert torch.equal(plan(*inputs), expected)


def test_a_thread_that_forks_during_its_call_finishes_it_in_the_child() -> None:
    inputs, errors = arguments(), list[Any]()
    kernel = mk.make_kernel(NO_EP, "TorchExperts", PROBLEM, machine=Machine("cpu"))
    plan, apply = kernel.plan(), kernel.experts.apply
    expected = plan(*inputs).clone()

    def call_again() -> str:
        try:
            plan(*inputs)
        except StateError as error:
            return str(error)
        return "called"

    def forking(*args: Any, **options: Any) -> None:
        kernel.experts.apply = apply  # type: ignore[method-assign]
        apply(*args, **options)
        errors.append(run_in_child(call_again))

    kernel.experts.apply = forking  # type: ignore[method-assign]
    assert torch.equal(plan(*inputs), expected)
    assert "a call within its own call" in errors[0]


def test_layers_work_in_a_child_forked_while_a_thread_makes_their_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from modular_kernel.operators import kernel_cache

    gate, inputs = Gate(), arguments()
    layer = FusedMoE(4, 32, 16, top_k=2, params_dtype=torch.float32)
    layer.set_weights(inputs[1])
    make_kernel = kernel_cache.make_kernel

    def slow(*args: Any, **options: Any) -> FusedMoEModularKernel:
        gate.pass_through()
        return make_kernel(*args, **options)

    monkeypatch.setattr(kernel_cache, "make_kernel", slow)
    monkeypatch.setattr("modular_kernel.layers.fused_moe._plan_cache", kernel_cache.KernelCache())
    with gate.holding(lambda: layer(inputs[0], inputs[2])):
        result = run_in_child(lambda: layer(inputs[0], inputs[2]))
    torch.testing.assert_close(result, layer(inputs[0], inputs[2]))


def test_the_interpreter_works_in_a_child_forked_during_a_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    patch = pytest.importorskip("modular_kernel.interpreter.patch")
    if not patch.is_active():
        pytest.skip("kernels are compiled here")
    gate, inputs = Gate(), arguments()
    kernel = mk.make_kernel(NO_EP, "TritonExperts", PROBLEM, machine=cpu_machine())
    expected = kernel(*inputs)
    builder = interpreter.interpreter_builder
    set_grid_idx = builder.set_grid_idx

    def slow(*args: int) -> None:
        gate.pass_through()
        set_grid_idx(*args)

    monkeypatch.setattr(builder, "set_grid_idx", slow)

    def child() -> tuple[torch.Tensor, int, Any]:
        result = kernel(*inputs)
        return result, len(patch._scopes), patch.tl.zeros_like.__name__

    with gate.holding(lambda: kernel(*inputs)):
        assert patch._scopes
        result, scopes, name = run_in_child(child)
    torch.testing.assert_close(result, expected)
    assert not scopes
    # No launch is under way, so the interpreter's replacements in `tl` are not active.
    assert name == patch.tl.zeros_like.__name__
    assert not patch._scopes


def cpu_machine() -> Machine:
    from modular_kernel.catalog import this_machine

    return this_machine(device="cpu")


LORA = mk.Problem(
    tokens=8, hidden=32, intermediate=24, experts=6, top_k=2, dtype=torch.float32,
    lora="adapters=2,rank=5",
)  # fmt: skip


def test_a_child_forked_during_a_load_has_no_partial_adapter_in_its_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, pool = Gate(), AdapterPool(LORA)
    split_gate_up, tensors = pool._split_gate_up, pool._tensors

    def slow(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name == "lora_a2":  # the other tensors are already in the slot
            gate.pass_through()
        return split_gate_up(name, tensor)

    monkeypatch.setattr(pool, "_split_gate_up", slow)
    small = layer_adapter(1, 2, num_a13=2)

    def child() -> tuple[int, dict[str, torch.Tensor]]:
        slot = pool.load("small", small)
        return slot, {name: tensor[slot].clone() for name, tensor in tensors.items()}

    with gate.holding(lambda: pool.load("large", layer_adapter(5, 1, num_a13=2))):
        slot, result = run_in_child(child)
    assert (slot, dict(pool.slots)) == (0, {"large": 0})
    alone = AdapterPool(LORA)
    alone.load("small", small)
    assert all(torch.equal(result[name], t[0]) for name, t in alone._tensors.items())


def test_a_child_forked_during_a_load_loses_no_slot_of_its_manager(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Gate()
    manager = LoRAManager(make_base_layer().problem, "adapters=1,rank=5", [3, 4])
    load, own = manager.pools[4].load, MoELoRALayer(layer_adapter(4, 1, num_a13=2))

    def slow(*args: Any) -> int:
        gate.pass_through()
        return load(*args)

    monkeypatch.setattr(manager.pools[4], "load", slow)

    def child() -> tuple[int, list[dict[str, int]]]:
        batch = ForwardBatch((None,), torch.tensor([0, 4]))
        assert manager.prepare_moe_lora_batch(batch, 3) is None
        slot = manager.load("mine", {3: own})
        return slot, [dict(pool.slots) for pool in manager.pools.values()]

    with gate.holding(lambda: manager.load("theirs", {3: own})):
        assert run_in_child(child) == (0, [{"mine": 0}, {"mine": 0}])
    assert [dict(pool.slots) for pool in manager.pools.values()] == [{"theirs": 0}] * 2


def test_properties_being_computed_by_a_thread_are_computed_in_the_child(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Gate()

    @dataclass
    class Slow:
        number: int

        @cached_property
        def double(self) -> int:
            gate.pass_through()
            return 2 * self.number

    monkeypatch.setattr(mk, "Slow", Slow, raising=False)  # as if it were a class of the package
    with gate.holding(lambda: Slow(1).double):
        assert run_in_child(lambda: Slow(4).double) == 8


_PRELUDE = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1] / "helpers")!r})
import torch
torch.set_num_threads(2)
from forked_child import run_in_child
"""
_COMPUTES = """
import modular_kernel as mk
problem = mk.Problem(tokens=256, hidden=512, intermediate=512, experts=2, top_k=2,
                     dtype=torch.float32)
kernel = mk.make_kernel("MoEPrepareAndFinalizeNoEP", "TorchExperts", problem)
x = torch.ones(256, 512)
weights = mk.ExpertWeights(torch.ones(2, 1024, 512) / 512, torch.ones(2, 512, 512) / 512)
routing = mk.Routing(torch.ones(256, 2), torch.tensor([[0, 1]] * 256, dtype=torch.int32))
want = kernel(x, weights, routing)
for call in (kernel, kernel.plan()):
    torch.testing.assert_close(run_in_child(lambda: call(x, weights, routing).clone()), want)
"""
_COMPUTES_NOTHING = """
import modular_kernel.utils.forks
assert run_in_child(torch.get_num_threads) == 2
"""


@pytest.mark.parametrize("text", [_COMPUTES, _COMPUTES_NOTHING], ids=["computes", "nothing"])
def test_a_child_of_a_process_with_several_compute_threads_works(text: str) -> None:
    done = run_python(_PRELUDE + text)
    assert done.returncode == 0, done.stderr


def run_python(text: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", text]
    return subprocess.run(command, capture_output=True, text=True, timeout=4 * TIMEOUT_S)


def test_the_lock_of_the_choice_cache_is_released_while_a_child_runs(tmp_path: Path) -> None:
    cache = Cache(tmp_path, {"who": "a test"}, {})
    reader, writer = os.pipe()
    with cache.lock(wait_s=0) as mine:
        assert mine
        pid = os.fork()
        if pid == 0:
            os.close(writer)
            os.read(reader, 1)  # waits until the parent closes its end
            os._exit(0)
    os.close(reader)
    try:
        with cache.lock(wait_s=0) as again:
            assert again
    finally:
        os.close(writer)
        os.waitpid(pid, 0)


def test_a_temporary_build_folder_is_removed_by_the_process_that_made_it(tmp_path: Path) -> None:
    done = run_python("""
import os, sys
from modular_kernel.replay.launch import compiled_files
folder = compiled_files._get_process_folder()
pid = os.fork()
if pid == 0:
    assert compiled_files._get_process_folder() != folder
    sys.exit(0)
os.waitpid(pid, 0)
assert folder.is_dir()
print(folder)
""")
    assert done.returncode == 0, done.stderr
    assert not Path(done.stdout.strip()).exists()


def test_deleted_objects_are_not_notified_of_a_fork() -> None:
    class Listener:
        def after_fork(self) -> None:
            notified.append(None)

    notified: list[None] = []
    kept, deleted = Listener(), Listener()
    forks.on_fork(kept)
    forks.on_fork(deleted)
    del deleted
    assert run_in_child(lambda: len(notified)) == 1
    assert not notified


@pytest.mark.parametrize("owned", [True, False])
def test_a_lock_held_by_the_forking_thread_stays_locked_in_the_child(owned: bool) -> None:
    lock = threading.RLock()

    def child() -> tuple[bool, bool]:
        return forks.reset_lock(lock), lock._is_owned()  # type: ignore[attr-defined]

    def run(function: Callable[[], Any]) -> Any:
        if not owned:
            return function()
        with lock:
            return function()

    assert run(lambda: run_in_child(child)) == (owned, owned)


def test_a_plan_on_a_gpu_or_over_ranks_refuses_to_run_in_the_child() -> None:
    inputs = arguments()
    kernel = mk.make_kernel(NO_EP, "TorchExperts", PROBLEM, machine=Machine("cpu"))
    plan = kernel.plan()
    plan._device = torch.device("cuda", 0)  # the child only checks this attribute

    def child() -> str:
        with pytest.raises(StateError) as caught:
            plan(*inputs)
        return str(caught.value)

    for message in (run_in_child(child), run_in_child(lambda: run_in_child(child))):
        assert message.startswith(
            "a plan: got a call in a forked child process, need a spawned process"
        )
        assert "CUDA context" in message
    plan._device = torch.device("cpu")
    plan(*inputs)
