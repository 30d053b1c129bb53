"""A forked child works or raises a typed error, and never deadlocks, whenever it is forked."""

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
from lora_layers import make_adapter as make_layer_adapter
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


def make_arguments(
    problem: mk.Problem = PROBLEM,
) -> tuple[torch.Tensor, mk.ExpertWeights, mk.Routing]:
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

    def wait_and_apply(*args: Any, **options: Any) -> None:
        gate.pass_through()
        apply(*args, **options)

    kernel.experts.apply = wait_and_apply  # type: ignore[method-assign]
    return kernel


def test_a_plan_in_use_by_another_thread_works_in_the_child() -> None:
    gate, inputs = Gate(), make_arguments()
    plan = make_blocking_kernel(gate).plan()
    expected = plan(*inputs).clone()
    with gate.holding(lambda: plan(*inputs)):
        torch.testing.assert_close(run_in_child(lambda: plan(*inputs).clone()), expected)
        from_grandchild = run_in_child(lambda: run_in_child(lambda: plan(*inputs).clone()))
        torch.testing.assert_close(from_grandchild, expected)
    assert torch.equal(plan(*inputs), expected)


def test_a_thread_that_forks_during_its_call_finishes_it_in_the_child() -> None:
    inputs, errors = make_arguments(), list[Any]()
    kernel = mk.make_kernel(NO_EP, "TorchExperts", PROBLEM, machine=Machine("cpu"))
    plan, apply = kernel.plan(), kernel.experts.apply
    expected = plan(*inputs).clone()

    def call_again() -> str:
        try:
            plan(*inputs)
        except StateError as error:
            return str(error)
        return "called"

    def apply_and_fork(*args: Any, **options: Any) -> None:
        kernel.experts.apply = apply  # type: ignore[method-assign]
        apply(*args, **options)
        errors.append(run_in_child(call_again))

    kernel.experts.apply = apply_and_fork  # type: ignore[method-assign]
    assert torch.equal(plan(*inputs), expected)
    assert "a call within its own call" in errors[0]


def test_layers_work_in_a_child_forked_while_a_thread_makes_their_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from modular_kernel.operators import kernel_cache

    gate, inputs = Gate(), make_arguments()
    layer = FusedMoE(4, 32, 16, top_k=2, params_dtype=torch.float32)
    layer.set_weights(inputs[1])
    make_kernel = kernel_cache.make_kernel

    def wait_and_make_kernel(*args: Any, **options: Any) -> FusedMoEModularKernel:
        gate.pass_through()
        return make_kernel(*args, **options)

    monkeypatch.setattr(kernel_cache, "make_kernel", wait_and_make_kernel)
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
    gate, inputs = Gate(), make_arguments()
    kernel = mk.make_kernel(NO_EP, "TritonExperts", PROBLEM, machine=detect_cpu_machine())
    expected = kernel(*inputs)
    builder = interpreter.interpreter_builder
    set_grid_idx = builder.set_grid_idx

    def wait_and_set_grid_idx(*args: int) -> None:
        gate.pass_through()
        set_grid_idx(*args)

    monkeypatch.setattr(builder, "set_grid_idx", wait_and_set_grid_idx)

    def launch_in_child() -> tuple[torch.Tensor, int, Any]:
        result = kernel(*inputs)
        return result, len(patch._scopes), patch.tl.zeros_like.__name__

    with gate.holding(lambda: kernel(*inputs)):
        assert patch._scopes
        result, num_scopes, name = run_in_child(launch_in_child)
    torch.testing.assert_close(result, expected)
    assert not num_scopes
    # No launch is in progress, so the interpreter's replacements in `tl` are not active.
    assert name == patch.tl.zeros_like.__name__
    assert not patch._scopes


def detect_cpu_machine() -> Machine:
    from modular_kernel.catalog import this_machine

    return this_machine(device="cpu")


LORA_PROBLEM = mk.Problem(
    tokens=8, hidden=32, intermediate=24, experts=6, top_k=2, dtype=torch.float32,
    lora="adapters=2,rank=5",
)  # fmt: skip


def test_a_child_forked_during_a_load_has_no_partial_adapter_in_its_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, pool = Gate(), AdapterPool(LORA_PROBLEM)
    split_gate_up, tensors = pool._split_gate_up, pool._tensors

    def wait_and_split(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name == "lora_a2":  # the other tensors are already in the slot
            gate.pass_through()
        return split_gate_up(name, tensor)

    monkeypatch.setattr(pool, "_split_gate_up", wait_and_split)
    small = make_layer_adapter(1, 2, num_a13=2)

    def load_in_child() -> tuple[int, dict[str, torch.Tensor]]:
        slot = pool.load("small", small)
        return slot, {name: tensor[slot].clone() for name, tensor in tensors.items()}

    with gate.holding(lambda: pool.load("large", make_layer_adapter(5, 1, num_a13=2))):
        slot, result = run_in_child(load_in_child)
    assert (slot, dict(pool.slots)) == (0, {"large": 0})
    expected_pool = AdapterPool(LORA_PROBLEM)
    expected_pool.load("small", small)
    assert all(torch.equal(result[name], t[0]) for name, t in expected_pool._tensors.items())


def test_a_child_forked_during_a_load_loses_no_slot_of_its_manager(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Gate()
    manager = LoRAManager(make_base_layer().problem, "adapters=1,rank=5", [3, 4])
    load, lora_layer = manager.pools[4].load, MoELoRALayer(make_layer_adapter(4, 1, num_a13=2))

    def wait_and_load(*args: Any) -> int:
        gate.pass_through()
        return load(*args)

    monkeypatch.setattr(manager.pools[4], "load", wait_and_load)

    def load_in_child() -> tuple[int, list[dict[str, int]]]:
        batch = ForwardBatch((None,), torch.tensor([0, 4]))
        assert manager.prepare_moe_lora_batch(batch, 3) is None
        slot = manager.load("child", {3: lora_layer})
        return slot, [dict(pool.slots) for pool in manager.pools.values()]

    with gate.holding(lambda: manager.load("parent", {3: lora_layer})):
        assert run_in_child(load_in_child) == (0, [{"child": 0}, {"child": 0}])
    assert [dict(pool.slots) for pool in manager.pools.values()] == [{"parent": 0}] * 2


def test_properties_being_computed_by_a_thread_are_computed_in_the_child(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Gate()

    @dataclass
    class SlowNumber:
        number: int

        @cached_property
        def double(self) -> int:
            gate.pass_through()
            return 2 * self.number

    # Make it a class of the package, whose cached properties a fork resets.
    monkeypatch.setattr(mk, "SlowNumber", SlowNumber, raising=False)
    with gate.holding(lambda: SlowNumber(1).double):
        assert run_in_child(lambda: SlowNumber(4).double) == 8


_PRELUDE = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1] / "helpers")!r})
import torch
torch.set_num_threads(2)
from forked_child import run_in_child
"""
_COMPUTE_PROGRAM = """
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
_NO_COMPUTE_PROGRAM = """
import modular_kernel.utils.forks
assert run_in_child(torch.get_num_threads) == 2
"""


@pytest.mark.parametrize(
    "program", [_COMPUTE_PROGRAM, _NO_COMPUTE_PROGRAM], ids=["computes", "nothing"]
)
def test_a_child_of_a_process_with_several_compute_threads_works(program: str) -> None:
    process = run_python(_PRELUDE + program)
    assert process.returncode == 0, process.stderr


def run_python(program: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=4 * TIMEOUT_S)


def test_the_lock_of_the_choice_cache_is_released_while_a_child_runs(tmp_path: Path) -> None:
    cache = Cache(tmp_path, {"who": "a test"}, {})
    reader, writer = os.pipe()
    with cache.lock(wait_s=0) as is_locked:
        assert is_locked
        pid = os.fork()
        if pid == 0:
            os.close(writer)
            os.read(reader, 1)  # waits until the parent closes its end
            os._exit(0)
    os.close(reader)
    try:
        with cache.lock(wait_s=0) as is_locked:
            assert is_locked
    finally:
        os.close(writer)
        os.waitpid(pid, 0)


def test_a_temporary_build_folder_is_removed_by_the_process_that_made_it(tmp_path: Path) -> None:
    process = run_python("""
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
    assert process.returncode == 0, process.stderr
    assert not Path(process.stdout.strip()).exists()


def test_deleted_objects_are_not_notified_of_a_fork() -> None:
    class Listener:
        def after_fork(self) -> None:
            notified.append(None)

    notified: list[None] = []
    live_listener, deleted_listener = Listener(), Listener()
    forks.on_fork(live_listener)
    forks.on_fork(deleted_listener)
    del deleted_listener
    assert run_in_child(lambda: len(notified)) == 1
    assert not notified


@pytest.mark.parametrize("owned", [True, False])
def test_a_lock_held_by_the_forking_thread_stays_locked_in_the_child(owned: bool) -> None:
    lock = threading.RLock()

    def reset_in_child() -> tuple[bool, bool]:
        return forks.reset_lock(lock), lock._is_owned()  # type: ignore[attr-defined]

    def run(function: Callable[[], Any]) -> Any:
        if not owned:
            return function()
        with lock:
            return function()

    assert run(lambda: run_in_child(reset_in_child)) == (owned, owned)


def test_a_plan_on_a_gpu_or_over_ranks_refuses_to_run_in_the_child() -> None:
    inputs = make_arguments()
    kernel = mk.make_kernel(NO_EP, "TorchExperts", PROBLEM, machine=Machine("cpu"))
    plan = kernel.plan()
    plan._device = torch.device("cuda", 0)  # the only attribute that the child checks

    def call_in_child() -> str:
        with pytest.raises(StateError) as caught:
            plan(*inputs)
        return str(caught.value)

    from_grandchild = run_in_child(lambda: run_in_child(call_in_child))
    for message in (run_in_child(call_in_child), from_grandchild):
        assert message.startswith(
            "a plan: got a call in a forked child process, need a spawned process"
        )
        assert "CUDA context" in message
    plan._device = torch.device("cpu")
    plan(*inputs)
