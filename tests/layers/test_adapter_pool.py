"""AdapterPool, the device memory for LoRA adapters: outputs equal those of merged weights, and a
refused load changes nothing.
"""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import DEVICE
from safetensors.torch import load_file

import modular_kernel as mk
from modular_kernel import reference
from modular_kernel.checkpoints.peft import load_adapter
from modular_kernel.errors import (
    CapacityError,
    ConfigurationError,
    DeviceError,
    DtypeError,
    LayoutError,
    ModularKernelError,
    ShapeError,
    StateError,
    WeightsError,
)
from modular_kernel.layers import adapter_pool
from modular_kernel.layers.adapter_pool import AdapterPool
from modular_kernel.spec.lora import Adapter
from modular_kernel.testing.cases.inputs import make_inputs

GOLDEN = Path(__file__).parents[1] / "helpers" / "golden" / "peft"
DELTAS = load_file(GOLDEN / "deltas.safetensors")
H, I, E = 16, 12, 4  # noqa: E741
FACTOR_NAMES = ("lora_a13", "lora_b13", "lora_a2", "lora_b2")
PROBLEM = mk.Problem(
    tokens=24, hidden=H, intermediate=I, experts=E, top_k=2, dtype=torch.float32,
    lora="adapters=3,rank=6",
)  # fmt: skip


def make_random_adapter(rank: int = 4, problem: mk.Problem = PROBLEM, seed: int = 0) -> Adapter:
    assert problem.adapters is not None
    spec = replace(problem.adapters, rank=rank)
    shapes = spec.shapes(problem.e, problem.w1_rows, problem.hidden, problem.intermediate)
    generator = torch.Generator().manual_seed(seed)
    return Adapter(**{
        name: torch.randn(shape[1:], generator=generator).to(problem.dtype)
        for name, shape in shapes.items()
    })  # fmt: skip


def list_pool_tensors(pool: AdapterPool) -> tuple[torch.Tensor, ...]:
    placeholder = torch.zeros(())
    weights = pool.weights(mk.ExpertWeights(placeholder, placeholder))
    tensors = [getattr(weights, name) for name in FACTOR_NAMES]
    return tuple(tensor for tensor in tensors if tensor is not None)


def load_peft_deltas(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the float64 matrices that PEFT adds to w1 and w2."""
    deltas = {
        name.partition(".")[2]: DELTAS[name].to(DEVICE).double()
        for name in DELTAS
        if name.startswith(kind)
    }
    if "w1" in deltas:
        return torch.cat([deltas["w1"], deltas["w3"]], 1), deltas["w2"]
    return deltas.get("gate_up_proj", torch.zeros(E, 2 * I, H, device=DEVICE).double()), deltas[
        "down_proj"
    ]


def compute_merged_output(problem: mk.Problem, inputs: Any, slots: dict[int, str]) -> torch.Tensor:
    """Return the layer's float64 output with PEFT's deltas of each slot merged into the weights."""
    problem_without_adapters = replace(problem, lora="none")
    routing = replace(inputs.routing, adapters_T=None)
    base_weights = replace(inputs.weights, **dict.fromkeys(FACTOR_NAMES))
    expected = reference.float64_reference(
        inputs.x_TH, base_weights, routing, problem_without_adapters
    )
    for slot, kind in slots.items():
        delta_w1, delta_w2 = load_peft_deltas(kind)
        merged = replace(
            base_weights,
            w1=base_weights.w1.double() + delta_w1,
            w2=base_weights.w2.double() + delta_w2,
        )
        uses_slot = inputs.routing.adapters_T == slot
        assert uses_slot.any()
        expected[uses_slot] = reference.float64_reference(
            inputs.x_TH, merged, routing, problem_without_adapters
        )[uses_slot]
    return expected


def run(pair: tuple[str, str], problem: mk.Problem, inputs: Any, pool: AdapterPool) -> torch.Tensor:
    kernel = mk.make_kernel(*pair, problem)
    base_weights = replace(inputs.weights, **dict.fromkeys(FACTOR_NAMES))
    return kernel(inputs.x_TH.clone(), pool.weights(base_weights), inputs.routing)


def make_loaded_pool() -> tuple[AdapterPool, dict[int, str]]:
    """Return a pool with three adapters, and their kinds by slot.

    The adapters have ranks 3 and 5 by rank_pattern, rank 4 on the down projection only, and one
    module per expert.
    """
    pool = AdapterPool(PROBLEM, DEVICE)
    kinds = ("fused", "down", "modules")
    return pool, {pool.load(kind, load_adapter(GOLDEN / kind, 1, PROBLEM)): kind
                  for kind in kinds}  # fmt: skip


def make_call(slots_T: torch.Tensor) -> Any:
    inputs = make_inputs(PROBLEM, "uniform", DEVICE)
    return replace(
        inputs, routing=replace(inputs.routing, adapters_T=slots_T.to(DEVICE, torch.int32))
    )


SLOTS_T = torch.arange(24) % 4 - 1


@pytest.mark.parametrize("experts", ["TorchExperts", "TritonExperts"])
def test_output_equals_the_layer_with_weights_merged_by_peft(experts: str) -> None:
    pool, slots = make_loaded_pool()
    inputs = make_call(SLOTS_T)
    got = run(("MoEPrepareAndFinalizeNoEP", experts), PROBLEM, inputs, pool).double()
    expected = compute_merged_output(PROBLEM, inputs, slots)
    assert (got - expected).abs().max() <= 1e-6 * expected.abs().max()


def test_later_loads_reuse_the_same_memory() -> None:
    pool, _slots = make_loaded_pool()
    inputs = make_call(SLOTS_T)
    addresses = [tensor.data_ptr() for tensor in list_pool_tensors(pool)]
    kernel = mk.make_kernel("MoEPrepareAndFinalizeNoEP", "TorchExperts", PROBLEM)
    weights = pool.weights(replace(inputs.weights, **dict.fromkeys(FACTOR_NAMES)))
    before = kernel(inputs.x_TH.clone(), weights, inputs.routing).clone()
    pool.evict("modules")
    assert pool.slots == {"fused": 0, "down": 1}
    uses_evicted_slot = inputs.routing.adapters_T == 2
    inputs_without_adapters = make_call(torch.full_like(SLOTS_T, -1))
    without_adapters = run(
        ("MoEPrepareAndFinalizeNoEP", "TorchExperts"), PROBLEM, inputs_without_adapters, pool
    )
    after_evict = kernel(inputs.x_TH.clone(), weights, inputs.routing)
    torch.testing.assert_close(
        after_evict[uses_evicted_slot], without_adapters[uses_evicted_slot], rtol=1e-6, atol=1e-7
    )
    assert torch.equal(after_evict[~uses_evicted_slot], before[~uses_evicted_slot])
    assert not any(tensor[2].any() for tensor in list_pool_tensors(pool))
    assert pool.load("again", load_adapter(GOLDEN / "modules", 1, PROBLEM)) == 2
    assert torch.equal(kernel(inputs.x_TH.clone(), weights, inputs.routing), before)
    assert [tensor.data_ptr() for tensor in list_pool_tensors(pool)] == addresses


@pytest.mark.parametrize(
    ("activation", "shared"),
    [("silu", ""), ("silu", ",a13=shared"), ("silu", ",outer=shared"), ("relu2", ",outer=shared")],
)
def test_adapters_of_smaller_rank_are_padded_with_zeros(shared: str, activation: str) -> None:
    problem = replace(PROBLEM, activation=activation, lora="adapters=3,rank=6" + shared)
    small, pool = make_random_adapter(2, problem), AdapterPool(problem)
    pool.load("whole", make_random_adapter(6, problem, 1))
    slot = pool.load("small", small)
    a13, b13, a2, b2 = (tensor[slot] for tensor in list_pool_tensors(pool))
    halves = a13.shape[1] // 6
    for half in range(halves):
        rows = a13[:, half * 6 : half * 6 + 6]
        assert torch.equal(rows[:, :2], small.lora_a13[:, half * 2 : half * 2 + 2])
        assert not rows[:, 2:].any()
    assert torch.equal(b13[..., :2], small.lora_b13)
    assert torch.equal(b2[..., :2], small.lora_b2)
    assert torch.equal(a2[:, :2], small.lora_a2)
    assert not any(part.any() for part in (b13[..., 2:], b2[..., 2:], a2[:, 2:]))


def test_a_full_pool_states_the_bytes_of_a_slot() -> None:
    pool, _ = make_loaded_pool()
    assert pool.slot_bytes == 4 * E * (2 * 6 * H + 2 * I * 6 + 6 * I + H * 6)
    with pytest.raises(CapacityError, match=f"'more': got 3 slots.*{pool.slot_bytes} bytes"):
        load_and_check_unchanged_on_error(pool, "more", make_random_adapter())


def load_and_check_unchanged_on_error(pool: AdapterPool, name: Any, adapter: Any) -> None:
    """Load an adapter. If the load raises, check that the pool is bitwise unchanged."""
    tensors_before = [tensor.clone() for tensor in list_pool_tensors(pool)]
    slots_before = dict(pool.slots)
    try:
        pool.load(name, adapter)
    except ModularKernelError:
        assert dict(pool.slots) == slots_before
        tensors = list_pool_tensors(pool)
        assert all(torch.equal(a, b) for a, b in zip(tensors_before, tensors, strict=True))
        raise


def make_b2(value: float) -> torch.Tensor:
    tensor = make_random_adapter().lora_b2
    tensor[1, 2, 3] = value
    return tensor


@pytest.mark.parametrize(
    ("name", "tensor", "error", "match"),
    [
        ("lora_a2", torch.zeros(E, 7, I), WeightsError, "rank: got 7, need 1 to 6, the pool's"),
        ("lora_a2", torch.zeros(E, 0, I), WeightsError, "rank: got 0"),
        ("lora_b2", torch.zeros(E, H, 3), ShapeError, r"lora_b2: got \(4, 16, 3\), need \(4, 16"),
        ("lora_a13", torch.zeros(2, 8, H), ShapeError, r"lora_a13: got \(2, 8, 16\), need \(4, 8"),
        ("lora_a2", torch.zeros(4, I), ShapeError, r"lora_[ab]1?3?2?: got"),
        ("lora_b13", torch.zeros(E, 24, 4).half(), DtypeError, "lora_b13: got torch.float16"),
        ("lora_b13", torch.zeros(E, 24, 4, device="meta"), DeviceError, "lora_b13: got meta"),
        ("lora_b13", None, DtypeError, "lora_b13: got NoneType"),
        ("lora_b13", torch.zeros(E, 24, 4).to_sparse(), LayoutError, "lora_b13: got"),
        ("lora_b2", make_b2(torch.nan), WeightsError, "lora_b2: got values that are not finite"),
        ("lora_b2", make_b2(-torch.inf), WeightsError, "lora_b2: got values that are not finite"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_leave_the_pool_unchanged(
    name: str, tensor: Any, error: type[Exception], match: str
) -> None:
    pool = AdapterPool(PROBLEM)
    pool.load("first", make_random_adapter(6, seed=1))
    with pytest.raises(error, match=f"adapter 'bad': {match}"):
        load_and_check_unchanged_on_error(
            pool, "bad", replace(make_random_adapter(), **{name: tensor})
        )


def test_a_name_can_be_loaded_once() -> None:
    pool = AdapterPool(PROBLEM)
    pool.load("a", make_random_adapter())
    with pytest.raises(StateError, match="adapter 'a': got loaded in slot 0"):
        load_and_check_unchanged_on_error(pool, "a", make_random_adapter(seed=1))
    with pytest.raises(StateError, match="adapter 'b': got not loaded, need a loaded adapter: a"):
        pool.evict("b")
    for name in ("", "x" * 257, 7, None):
        with pytest.raises(ConfigurationError, match="name of an adapter"):
            load_and_check_unchanged_on_error(pool, name, make_random_adapter())
    with pytest.raises(ConfigurationError, match="adapter 'b'"):
        load_and_check_unchanged_on_error(
            pool, "b", {field.name: None for field in fields(Adapter)}
        )
    with pytest.raises(TypeError):
        pool.slots["b"] = 1  # type: ignore[index]


def test_loads_and_evictions_are_refused_during_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = AdapterPool(PROBLEM)
    pool.load("a", make_random_adapter())
    monkeypatch.setattr(adapter_pool, "is_capturing", lambda device: True)
    with pytest.raises(StateError, match="adapter 'b': got a stream that is being captured"):
        load_and_check_unchanged_on_error(pool, "b", make_random_adapter())
    with pytest.raises(StateError, match="adapter 'a': got a stream that is being captured"):
        pool.evict("a")
    assert pool.slots == {"a": 0}
    assert list_pool_tensors(pool)[0][0].any()


def test_a_failed_copy_leaves_the_slot_free(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = AdapterPool(PROBLEM)

    def fail(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name == "lora_b2":
            raise StateError("a copy", got="no memory", need="some")
        return tensor.reshape(E, -1, 4, tensor.shape[-1]) if "_a" in name else tensor

    monkeypatch.setattr(pool, "_split_gate_up", fail)
    with pytest.raises(StateError, match="a copy"):
        load_and_check_unchanged_on_error(pool, "a", make_random_adapter())


def test_invalid_arguments_of_a_pool() -> None:
    with pytest.raises(ConfigurationError, match="lora: got none"):
        AdapterPool(replace(PROBLEM, lora="none"))
    with pytest.raises(ConfigurationError, match=r"device: got 1\.5"):
        AdapterPool(PROBLEM, 1.5)  # type: ignore[arg-type]
    pool = AdapterPool(PROBLEM)
    inputs = make_inputs(PROBLEM, "uniform", torch.device("cpu"))
    with pytest.raises(WeightsError, match="base weights: got lora_a13, lora_b13"):
        pool.weights(inputs.weights)


def test_missing_devices_are_refused_by_name() -> None:
    with pytest.raises(DeviceError, match="pool: got cuda:99: "):
        AdapterPool(PROBLEM, "cuda:99")
    with pytest.raises(ConfigurationError, match="device: got 'nowhere'"):
        AdapterPool(PROBLEM, "nowhere")


def test_the_meta_device_is_refused() -> None:
    """Tensors on the meta device would accept every adapter without storing it."""
    for device in ("meta", torch.device("meta")):
        with pytest.raises(DeviceError, match="pool: got meta, need a device whose tensors have"):
            AdapterPool(PROBLEM, device)


@pytest.mark.parametrize("experts", [1 << 10, 1 << 19])
def test_a_pool_that_exceeds_memory_states_its_bytes(experts: int) -> None:
    """One size exceeds the address space, and the other size exceeds 64 bits."""
    sizes = {"hidden": 1 << 16, "intermediate": 1 << 16, "experts": experts}
    problem = replace(PROBLEM, lora="adapters=65536,rank=256", **sizes)  # type: ignore[arg-type]
    slot_bytes = 4 * experts * 256 * (2 * (1 << 16) + 2 * (1 << 16) + 2 * (1 << 16))
    with pytest.raises(
        CapacityError, match=f"pool of 65536 slots: .* need {65536 * slot_bytes} bytes"
    ):
        AdapterPool(problem)


def test_out_of_memory_states_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, adapter = AdapterPool(PROBLEM), make_random_adapter()

    def fail(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nGPU 0 has ...")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", fail)
        needed = sum(getattr(adapter, name).nbytes for name in FACTOR_NAMES)
        with pytest.raises(CapacityError, match=f"'big': got no memory: CUDA.*need {needed} byt"):
            load_and_check_unchanged_on_error(pool, "big", adapter)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", fail)
        with pytest.raises(CapacityError, match=f"need {3 * pool.slot_bytes} bytes on cpu"):
            AdapterPool(PROBLEM)


@pytest.mark.parametrize(("function", "kind"), [("empty", DeviceError), ("zeros", CapacityError)])
def test_a_long_error_is_cut_to_160_characters(
    monkeypatch: pytest.MonkeyPatch, function: str, kind: type[ModularKernelError]
) -> None:
    def fail(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("x" * 161 + "\nand more")

    monkeypatch.setattr(torch, function, fail)
    with pytest.raises(kind, match=f": {'x' * 160}, need"):
        AdapterPool(PROBLEM)


def test_other_errors_of_torch_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(torch, "zeros", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        AdapterPool(PROBLEM)


def test_freed_weights_are_refused() -> None:
    adapter = make_random_adapter()
    adapter.lora_a2.untyped_storage().resize_(0)
    with pytest.raises(LayoutError, match="lora_a2: got 0 bytes of memory"):
        AdapterPool(PROBLEM).load("mine", adapter)


def test_base_weights_are_expert_weights() -> None:
    base_weights: Any = None
    with pytest.raises(ConfigurationError, match="base weights: got None"):
        AdapterPool(PROBLEM).weights(base_weights)
