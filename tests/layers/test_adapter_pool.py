"""AdapterPool: its layer equals that of merged weights, and a refused load changes nothing."""

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
NAMES = ("lora_a13", "lora_b13", "lora_a2", "lora_b2")
PROBLEM = mk.Problem(
    tokens=24, hidden=H, intermediate=I, experts=E, top_k=2, dtype=torch.float32,
    lora="adapters=3,rank=6",
)  # fmt: skip


def adapter(rank: int = 4, problem: mk.Problem = PROBLEM, seed: int = 0) -> Adapter:
    assert problem.adapters is not None
    spec = replace(problem.adapters, rank=rank)
    shapes = spec.shapes(problem.e, problem.w1_rows, problem.hidden, problem.intermediate)
    generator = torch.Generator().manual_seed(seed)
    return Adapter(**{
        name: torch.randn(shape[1:], generator=generator).to(problem.dtype)
        for name, shape in shapes.items()
    })  # fmt: skip


def held(pool: AdapterPool) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a pool."""
    nothing = torch.zeros(())
    weights = pool.weights(mk.ExpertWeights(nothing, nothing))
    found = [getattr(weights, name) for name in NAMES]
    return tuple(each for each in found if each is not None)


def peft_delta(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return in float64 what PEFT itself adds to w1 and w2."""
    of = {
        name.partition(".")[2]: DELTAS[name].to(DEVICE).double()
        for name in DELTAS
        if name.startswith(kind)
    }
    if "w1" in of:
        return torch.cat([of["w1"], of["w3"]], 1), of["w2"]
    return of.get("gate_up_proj", torch.zeros(E, 2 * I, H, device=DEVICE).double()), of["down_proj"]


def merged_result(problem: mk.Problem, i: Any, slots: dict[int, str]) -> torch.Tensor:
    """The layer in float64 with PEFT's own deltas merged into its weights, slot by slot."""
    plain = replace(problem, lora="none")
    routing = replace(i.routing, adapters_T=None)
    base = replace(i.weights, **dict.fromkeys(NAMES))
    want = reference.float64_reference(i.x_TH, base, routing, plain)
    for slot, kind in slots.items():
        first, second = peft_delta(kind)
        its = replace(base, w1=base.w1.double() + first, w2=base.w2.double() + second)
        mine = i.routing.adapters_T == slot
        assert mine.any()
        want[mine] = reference.float64_reference(i.x_TH, its, routing, plain)[mine]
    return want


def run(pair: tuple[str, str], problem: mk.Problem, i: Any, pool: AdapterPool) -> torch.Tensor:
    kernel = mk.make_kernel(*pair, problem)
    base = replace(i.weights, **dict.fromkeys(NAMES))
    return kernel(i.x_TH.clone(), pool.weights(base), i.routing)


def loaded() -> tuple[AdapterPool, dict[int, str]]:
    """Return a pool with an adapter of ranks 3 and 5 (rank_pattern), one of rank 4 on down only,
    and one with separate experts.
    """
    pool = AdapterPool(PROBLEM, DEVICE)
    kinds = ("fused", "down", "modules")
    return pool, {pool.load(kind, load_adapter(GOLDEN / kind, 1, PROBLEM)): kind
                  for kind in kinds}  # fmt: skip


def call(slots_T: torch.Tensor) -> Any:
    i = make_inputs(PROBLEM, "uniform", DEVICE)
    return replace(i, routing=replace(i.routing, adapters_T=slots_T.to(DEVICE, torch.int32)))


SLOTS_T = torch.arange(24) % 4 - 1


@pytest.mark.parametrize("experts", ["TorchExperts", "TritonExperts"])
def test_the_layer_equals_that_of_weights_merged_by_peft(experts: str) -> None:
    pool, slots = loaded()
    i = call(SLOTS_T)
    got = run(("MoEPrepareAndFinalizeNoEP", experts), PROBLEM, i, pool).double()
    want = merged_result(PROBLEM, i, slots)
    assert (got - want).abs().max() <= 1e-6 * want.abs().max()


def test_later_loads_reuse_the_same_memory() -> None:
    pool, _slots = loaded()
    i = call(SLOTS_T)
    places = [each.data_ptr() for each in held(pool)]
    kernel = mk.make_kernel("MoEPrepareAndFinalizeNoEP", "TorchExperts", PROBLEM)
    weights = pool.weights(replace(i.weights, **dict.fromkeys(NAMES)))
    before = kernel(i.x_TH.clone(), weights, i.routing).clone()
    pool.evict("modules")
    assert pool.slots == {"fused": 0, "down": 1}
    mine = i.routing.adapters_T == 2
    nobody = call(torch.full_like(SLOTS_T, -1))
    bare = run(("MoEPrepareAndFinalizeNoEP", "TorchExperts"), PROBLEM, nobody, pool)
    freed = kernel(i.x_TH.clone(), weights, i.routing)
    torch.testing.assert_close(freed[mine], bare[mine], rtol=1e-6, atol=1e-7)
    assert torch.equal(freed[~mine], before[~mine])
    assert not any(each[2].any() for each in held(pool))
    assert pool.load("again", load_adapter(GOLDEN / "modules", 1, PROBLEM)) == 2
    assert torch.equal(kernel(i.x_TH.clone(), weights, i.routing), before)
    assert [each.data_ptr() for each in held(pool)] == places


@pytest.mark.parametrize(
    ("activation", "shared"),
    [("silu", ""), ("silu", ",a13=shared"), ("silu", ",outer=shared"), ("relu2", ",outer=shared")],
)
def test_a_smaller_rank_is_padded_with_zeros(shared: str, activation: str) -> None:
    problem = replace(PROBLEM, activation=activation, lora="adapters=3,rank=6" + shared)
    small, pool = adapter(2, problem), AdapterPool(problem)
    pool.load("whole", adapter(6, problem, 1))
    slot = pool.load("small", small)
    a13, b13, a2, b2 = (each[slot] for each in held(pool))
    halves = a13.shape[1] // 6
    for half in range(halves):
        rows = a13[:, half * 6 : half * 6 + 6]
        assert torch.equal(rows[:, :2], small.lora_a13[:, half * 2 : half * 2 + 2])
        assert not rows[:, 2:].any()
    assert torch.equal(b13[..., :2], small.lora_b13)
    assert torch.equal(b2[..., :2], small.lora_b2)
    assert torch.equal(a2[:, :2], small.lora_a2)
    assert not any(part.any() for part in (b13[..., 2:], b2[..., 2:], a2[:, 2:]))


def test_a_full_pool_states_the_bytes_that_it_needs() -> None:
    pool, _ = loaded()
    assert pool.slot_bytes == 4 * E * (2 * 6 * H + 2 * I * 6 + 6 * I + H * 6)
    with pytest.raises(CapacityError, match=f"'more': got 3 slots.*{pool.slot_bytes} bytes"):
        unchanged(pool, "more", adapter())


def unchanged(pool: AdapterPool, name: Any, given: Any) -> None:
    """Load, and if that raises, check that the pool is bit for bit as before."""
    before, slots = [each.clone() for each in held(pool)], dict(pool.slots)
    try:
        pool.load(name, given)
    except ModularKernelError:
        assert dict(pool.slots) == slots
        assert all(torch.equal(a, b) for a, b in zip(before, held(pool), strict=True))
        raise


def poisoned(value: float) -> torch.Tensor:
    bad = adapter().lora_b2
    bad[1, 2, 3] = value
    return bad


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
        ("lora_b2", poisoned(torch.nan), WeightsError, "lora_b2: got values that are not finite"),
        ("lora_b2", poisoned(-torch.inf), WeightsError, "lora_b2: got values that are not finite"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_leave_the_pool_unchanged(
    name: str, tensor: Any, error: type[Exception], match: str
) -> None:
    pool = AdapterPool(PROBLEM)
    pool.load("first", adapter(6, seed=1))
    with pytest.raises(error, match=f"adapter 'bad': {match}"):
        unchanged(pool, "bad", replace(adapter(), **{name: tensor}))


def test_a_name_can_be_loaded_once() -> None:
    pool = AdapterPool(PROBLEM)
    pool.load("a", adapter())
    with pytest.raises(StateError, match="adapter 'a': got loaded in slot 0"):
        unchanged(pool, "a", adapter(seed=1))
    with pytest.raises(StateError, match="adapter 'b': got not loaded, need a loaded adapter: a"):
        pool.evict("b")
    for name in ("", "x" * 257, 7, None):
        with pytest.raises(ConfigurationError, match="name of an adapter"):
            unchanged(pool, name, adapter())
    with pytest.raises(ConfigurationError, match="adapter 'b'"):
        unchanged(pool, "b", {each.name: None for each in fields(Adapter)})
    with pytest.raises(TypeError):
        pool.slots["b"] = 1  # type: ignore[index]


def test_nothing_changes_while_a_stream_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = AdapterPool(PROBLEM)
    pool.load("a", adapter())
    monkeypatch.setattr(adapter_pool, "is_capturing", lambda device: True)
    with pytest.raises(StateError, match="adapter 'b': got a stream that is being captured"):
        unchanged(pool, "b", adapter())
    with pytest.raises(StateError, match="adapter 'a': got a stream that is being captured"):
        pool.evict("a")
    assert pool.slots == {"a": 0}
    assert held(pool)[0][0].any()


def test_a_copy_that_fails_leaves_a_free_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = AdapterPool(PROBLEM)

    def fail(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name == "lora_b2":
            raise StateError("a copy", got="no memory", need="some")
        return tensor.reshape(E, -1, 4, tensor.shape[-1]) if "_a" in name else tensor

    monkeypatch.setattr(pool, "_split_gate_up", fail)
    with pytest.raises(StateError, match="a copy"):
        unchanged(pool, "a", adapter())


def test_invalid_arguments_of_a_pool() -> None:
    with pytest.raises(ConfigurationError, match="lora: got none"):
        AdapterPool(replace(PROBLEM, lora="none"))
    with pytest.raises(ConfigurationError, match=r"device: got 1\.5"):
        AdapterPool(PROBLEM, 1.5)  # type: ignore[arg-type]
    pool = AdapterPool(PROBLEM)
    i = make_inputs(PROBLEM, "uniform", torch.device("cpu"))
    with pytest.raises(WeightsError, match="base weights: got lora_a13, lora_b13"):
        pool.weights(i.weights)


def test_a_missing_device_is_refused_by_name() -> None:
    with pytest.raises(DeviceError, match="pool: got cuda:99: "):
        AdapterPool(PROBLEM, "cuda:99")
    with pytest.raises(ConfigurationError, match="device: got 'nowhere'"):
        AdapterPool(PROBLEM, "nowhere")


def test_a_device_without_memory_is_refused() -> None:
    """Tensors on the meta device would accept every adapter without storing it."""
    for device in ("meta", torch.device("meta")):
        with pytest.raises(DeviceError, match="pool: got meta, need a device whose tensors have"):
            AdapterPool(PROBLEM, device)


@pytest.mark.parametrize("experts", [1 << 10, 1 << 19])
def test_a_pool_that_does_not_fit_states_its_bytes(experts: int) -> None:
    """Sizes above the address space and above 64 bits."""
    sizes = {"hidden": 1 << 16, "intermediate": 1 << 16, "experts": experts}
    problem = replace(PROBLEM, lora="adapters=65536,rank=256", **sizes)  # type: ignore[arg-type]
    slot = 4 * experts * 256 * (2 * (1 << 16) + 2 * (1 << 16) + 2 * (1 << 16))
    with pytest.raises(CapacityError, match=f"pool of 65536 slots: .* need {65536 * slot} bytes"):
        AdapterPool(problem)


def test_out_of_memory_states_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, big = AdapterPool(PROBLEM), adapter()

    def full(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nGPU 0 has ...")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", full)
        needed = sum(getattr(big, name).nbytes for name in NAMES)
        with pytest.raises(CapacityError, match=f"'big': got no memory: CUDA.*need {needed} byt"):
            unchanged(pool, "big", big)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", full)
        with pytest.raises(CapacityError, match=f"need {3 * pool.slot_bytes} bytes on cpu"):
            AdapterPool(PROBLEM)


@pytest.mark.parametrize(("function", "kind"), [("empty", DeviceError), ("zeros", CapacityError)])
def test_a_long_error_is_cut_to_160_characters(
    monkeypatch: pytest.MonkeyPatch, function: str, kind: type[ModularKernelError]
) -> None:
    def failed(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("x" * 161 + "\nand more")

    monkeypatch.setattr(torch, function, failed)
    with pytest.raises(kind, match=f": {'x' * 160}, need"):
        AdapterPool(PROBLEM)


def test_other_errors_of_torch_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(torch, "zeros", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        AdapterPool(PROBLEM)


def test_freed_weights_are_refused() -> None:
    given = adapter()
    given.lora_a2.untyped_storage().resize_(0)
    with pytest.raises(LayoutError, match="lora_a2: got 0 bytes of memory"):
        AdapterPool(PROBLEM).load("mine", given)


def test_base_weights_are_expert_weights() -> None:
    base: Any = None
    with pytest.raises(ConfigurationError, match="base weights: got None"):
        AdapterPool(PROBLEM).weights(base)
