"""Weights that a kernel prepared once: mxfp4's for products in registers, a stand-in's here."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from test_grouped_w4_path import _BASE, _OAI, H200, _multiply
from torch.multiprocessing.reductions import StorageWeakRef

from experts.triton.configs.select import choose_config, on_device, override_config
from experts.triton.contiguous import TritonExperts, paths_of
from experts.triton.grouped_w4 import config as grouped_w4_config
from experts.triton.grouped_w4.layout import rows_of_tiles, tile_weights
from experts.triton.grouped_w4.path import GroupedW4Path
from experts.triton.launch_config import LaunchConfig
from modular_kernel import FusedMoEModularKernel, make_kernel
from modular_kernel.contracts import PermuteExpertsUnpermute
from modular_kernel.errors import DeviceError, DtypeError, ShapeError, WeightsError
from modular_kernel.layers import fused_moe
from modular_kernel.layers.fused_moe import FusedMoE
from modular_kernel.prepared import MADE_OF, reader
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.testing import Case, prove
from modular_kernel.testing.cases.inputs import Inputs, make_inputs
from modular_kernel.types import Machine, Problem

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has its own products")
PAIR = ("MoEPrepareAndFinalizeNoEP", "TritonExperts")
CPU = torch.device("cpu")
CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"quant": "mxfp4_w4a16:repacked=true", "hidden": 320},
    {"bias": True, "activation": _OAI},
    {"intermediate": 320, "activation": "relu2"},
    {"expert_map": True, "local_experts": 3, "experts": 7},
)


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Rows of a tile of every product that the path made."""
    found: list[int] = []

    def multiply(
        self: GroupedW4Path, rows: Any, product: Any, tile: LaunchConfig, *others: Any
    ) -> None:
        found.append(tile.block_m)
        _multiply(self, rows, product, tile, *others)

    monkeypatch.setattr(GroupedW4Path, "multiply", multiply)
    with on_device(H200):
        yield found


def made(**changes: Any) -> tuple[FusedMoEModularKernel, Inputs]:
    problem = replace(_BASE, **({"tokens": 40} | changes))
    return make_kernel(*PAIR, problem), make_inputs(problem, "uniform", CPU)


def made_layer() -> tuple[FusedMoE, Inputs]:
    problem = replace(_BASE, tokens=64, hidden=96)
    layer, i = FusedMoE(
        problem.experts, problem.hidden, problem.intermediate, top_k=problem.top_k,
        experts="TritonExperts", params_dtype=problem.dtype, quant_config="mxfp4_w4a16",
    ), make_inputs(problem, "uniform", CPU)  # fmt: skip
    layer.set_weights(i.weights)
    return layer, i


def called(
    kernel: FusedMoEModularKernel, i: Inputs, weights: ExpertWeights | None = None
) -> torch.Tensor:
    return kernel(i.x_TH, weights or i.weights, i.routing).clone()


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_the_bits_are_those_of_a_call_that_orders_them(changes: dict[str, Any]) -> None:
    kernel, i = made(**changes)
    weights = kernel.prepare_weights(i.weights)
    with override_config(grouped_w4_config.default(kernel.problem, 64)):
        assert torch.equal(called(kernel, i, weights), called(kernel, i))


def test_what_is_made_is_what_the_layout_says_and_all_else_is_given_back() -> None:
    kernel, i = made()
    weights, problem = kernel.prepare_weights(i.weights), kernel.problem
    for name, tensor in vars(i.weights).items():
        assert name in MADE_OF or getattr(weights, name) is tensor
    rows = rows_of_tiles(problem.intermediate, 1, problem.intermediate, gated=True)
    assert i.weights.w1_scale is not None
    want = tile_weights(i.weights.w1, i.weights.w1_scale, rows)
    for name, tensor in zip(("w1_tiles", "w1_tile_scales"), want, strict=True):
        assert torch.equal(getattr(weights, name), tensor)
    assert kernel.prepare_weights(weights).w1_tiles is not weights.w1_tiles  # anew


@pytest.mark.parametrize(
    ("rows", "block_m"), [(11, 0), (12, 64), (55, 64), (56, 128), (640, 128), (700, 128)]
)
def test_calls_take_them_by_rows_whatever_files_say(
    rows: int, block_m: int, launched: list[int]
) -> None:
    kernel, i = made(tokens=rows * 2, experts=6, top_k=3, hidden=32, intermediate=32)
    plain = choose_config(kernel.problem, kernel.problem.tokens, paths_of(kernel.problem))
    called(kernel, i, kernel.prepare_weights(i.weights))
    if block_m:
        assert launched == [block_m, block_m]
    else:
        assert not launched
        assert plain.path != "grouped_w4"


def test_strided_weights_are_prepared_too(launched: list[int]) -> None:
    kernel, i = made()
    spaced = torch.empty(*i.weights.w1.shape, 2, dtype=torch.uint8)[..., 0].copy_(i.weights.w1)
    weights = kernel.prepare_weights(replace(i.weights, w1=spaced))
    assert torch.equal(
        called(kernel, i, weights), called(kernel, i, kernel.prepare_weights(i.weights))
    )
    assert len(launched) == 4


@pytest.mark.share(5)
@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_proven(changes: dict[str, Any], machine: Machine) -> None:
    """The harness prepares weights itself, and calls with and without."""
    problem = replace(_BASE, tokens=60, **changes)
    proof = prove(Case(*PAIR, problem, "zipf"), machine)
    assert proof.passed, str(proof)


def test_the_harness_notices_weights_prepared_wrongly(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = GroupedW4Path.prepare

    def wrong(self: GroupedW4Path, weights: ExpertWeights, out: dict[str, torch.Tensor]) -> None:
        right(self, weights, out)
        out["w2_tile_scales"][-1].zero_()

    monkeypatch.setattr(GroupedW4Path, "prepare", wrong)
    proof = prove(Case(*PAIR, replace(_BASE, tokens=60), "uniform"), machine)
    assert proof.failures
    assert all(failure.startswith("prepared_weights: ") for failure in proof.failures)


@pytest.mark.parametrize("of", ["w1", "w1_scale", "w2", "w2_scale"])
def test_a_call_after_weights_were_written_is_refused(of: str) -> None:
    kernel, i = made()
    plan, weights = kernel.plan(), kernel.prepare_weights(i.weights)
    for _ in range(2):
        plan(i.x_TH, weights, i.routing)
        called(kernel, i, weights)
    tensor: torch.Tensor = getattr(i.weights, of)
    tensor.view(-1)[0] += 1
    for run in (plan, kernel):
        with pytest.raises(WeightsError, match=rf"{of[:2]}_tile\w+.*prepare_weights"):
            run(i.x_TH, weights, i.routing)
    called(kernel, i)  # without them all is well
    called(kernel, i, kernel.prepare_weights(weights))


def test_others_weights_beside_them_are_refused() -> None:
    kernel, i = made()
    weights = kernel.prepare_weights(i.weights)
    turned = i.weights.w2.as_strided(i.weights.w2.shape, (0, 0, 0))
    for w2 in (i.weights.w2.clone(), turned):
        with pytest.raises(WeightsError, match="other values"):
            called(kernel, i, replace(weights, w2=w2))


def test_other_memory_at_the_same_address_is_noticed() -> None:
    """As where parameters leave a GPU and others take their place, so does its allocator."""
    kernel, i = made()
    memory = i.weights.w1.clone().numpy()
    w1 = torch.from_numpy(memory)
    weights, plan = kernel.prepare_weights(replace(i.weights, w1=w1)), kernel.plan()
    for run in (plan, plan, kernel):
        run(i.x_TH, weights, i.routing)
    place = w1.data_ptr(), w1._version
    w1.data = torch.empty(0, dtype=torch.uint8)
    gc.collect()  # what the interpreter may hold
    memory[:] ^= 1
    w1.data = torch.from_numpy(memory)
    assert (w1.data_ptr(), w1._version) == place
    for run, given in ((plan, weights), (kernel, weights), (kernel, replace(weights))):
        with pytest.raises(WeightsError, match="other values"):
            run(i.x_TH, given, i.routing)


@pytest.mark.parametrize("copied_by", [copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w))])
def test_copies_that_do_not_know_what_they_are_made_of_are_refused(
    copied_by: Callable[[ExpertWeights], ExpertWeights],
) -> None:
    kernel, i = made()
    copied = copied_by(kernel.prepare_weights(i.weights))
    with pytest.raises(WeightsError, match="a tensor that no kernel prepared"):
        called(kernel, i, copied)
    called(kernel, i, kernel.prepare_weights(copied))


@pytest.mark.parametrize(
    "others",
    [
        {"quant": "mxfp4_w4a16:repacked=true"},
        {"activation": "silu:interleaved=true"},
    ],
    ids=str,
)
def test_those_of_a_kernel_that_reads_weights_otherwise_are_refused(
    others: dict[str, Any],
) -> None:
    kernel, i = made()
    other, _ = made(**others)
    assert other.experts.prepared_specs() == kernel.experts.prepared_specs()
    weights = other.prepare_weights(i.weights)
    with pytest.raises(WeightsError, match="w1_tiles: got made for TritonExperts of mxfp4"):
        called(kernel, i, weights)


@pytest.mark.parametrize("others", [{"tokens": 80}, {"lora": "adapters=2,rank=8"}], ids=str)
def test_those_of_a_kernel_of_the_same_layer_are_taken(
    others: dict[str, Any], launched: list[int]
) -> None:
    (kernel, i), (other, j) = made(), made(**others)
    given = {n: t for n, t in vars(kernel.prepare_weights(i.weights)).items() if t is not None}
    routing = replace(j.routing, adapters_T="none" if "lora" in others else None)
    other(j.x_TH, replace(j.weights, **given), routing)
    assert launched == [64, 64]
    mine = type("Mine", (TritonExperts,), {})
    assert reader(mine, kernel.problem) == reader(TritonExperts, other.problem)


@pytest.mark.parametrize("w1", [None, [1], torch.empty(1, device="meta")], ids=str)
def test_what_is_no_tensor_here_is_refused(w1: Any) -> None:
    kernel, i = made()
    with pytest.raises((DtypeError, DeviceError), match="w1: got"):
        kernel.prepare_weights(replace(i.weights, w1=w1))


@pytest.mark.parametrize("of", ["w1", "w2", "w1_scale", "w2_scale"])
def test_weights_that_start_anywhere_are_prepared(of: str) -> None:
    kernel, i = made()
    tensor: torch.Tensor = getattr(i.weights, of)
    moved = torch.empty(tensor.numel() + 1, dtype=torch.uint8)[1:].view(tensor.shape)
    weights = kernel.prepare_weights(replace(i.weights, **{of: moved.copy_(tensor)}))
    assert torch.equal(
        called(kernel, i, weights), called(kernel, i, kernel.prepare_weights(i.weights))
    )


def test_nothing_is_kept_alive() -> None:
    kernel, i = made()
    w1 = i.weights.w1.clone()
    weights, plan = kernel.prepare_weights(replace(i.weights, w1=w1)), kernel.plan()
    plan(i.x_TH, weights, i.routing)
    tiles, memory = weakref.ref(weights.w1_tiles), StorageWeakRef(w1.untyped_storage())
    w1.data = torch.empty(0, dtype=torch.uint8)
    gc.collect()
    assert memory.expired()
    del weights
    gc.collect()
    assert tiles() is None


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"w2_tiles": None}, WeightsError),
        ({"w1_tiles": torch.zeros(1, dtype=torch.int32)}, WeightsError),
        ({"w1_tile_scales": "copy"}, WeightsError),
        ({"w1_tiles": "of w2"}, WeightsError),
        ({"w2_tile_scales": 3}, DtypeError),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], error: type[Exception]) -> None:
    kernel, i = made()
    weights = kernel.prepare_weights(i.weights)
    ((name, value),) = change.items()
    if value == "copy":
        value = getattr(weights, name).clone()
    elif value == "of w2":
        value = weights.w2_tiles
    with pytest.raises(error, match=name):
        called(kernel, i, replace(weights, **{name: value}))


def test_experts_that_prepare_nothing_return_the_weights_and_read_nothing_else() -> None:
    triton, i = made()
    kernel = make_kernel(PAIR[0], "TorchExperts", triton.problem)
    assert kernel.prepare_weights(i.weights) is i.weights
    assert torch.equal(called(kernel, i, triton.prepare_weights(i.weights)), called(kernel, i))
    beside = {name: torch.zeros(1, dtype=torch.int32) for name in MADE_OF}
    with pytest.raises(WeightsError, match="w1_tiles: got a tensor that no kernel"):
        called(kernel, i, replace(i.weights, **beside))
    with pytest.raises(ShapeError, match="w1"):
        kernel.prepare_weights(replace(i.weights, w1=i.weights.w1[:, 1:]))
    assert PermuteExpertsUnpermute.prepared_specs(kernel.experts) == {}


def test_a_batch_invariant_layer_prepares_nothing() -> None:
    kernel, i = made(batch_invariant=True)
    assert kernel.prepare_weights(i.weights) is i.weights


def test_tokens_of_adapters_layers_without_one_take_them(launched: list[int]) -> None:
    kernel, i = made(lora="adapters=2,rank=8")
    weights = kernel.prepare_weights(i.weights)
    called(kernel, i, weights)
    assert not launched
    routing = Routing(i.routing.topk_weights_TK, i.routing.topk_ids_TK, "none")
    kernel(i.x_TH, weights, routing)
    assert launched == [64, 64]


def test_a_layer_keeps_them_until_its_parameters_are_exchanged(launched: list[int]) -> None:
    layer, i = made_layer()
    layer.prepare_weights()
    assert layer.weights() is layer.weights()
    got = layer(i.x_TH, i.routing)
    assert launched == [64, 64]
    layer.set_weights(i.weights)
    assert layer.weights().w1_tiles is None
    plain = layer(i.x_TH, i.routing)
    assert len(launched) == 2
    assert float((got - plain).float().norm() / plain.float().norm()) < 0.01
    layer.prepare_weights()
    layer.get_parameter("w2_weight").data.view(-1)[0] += 1  # unseen by torch, so by us
    layer.get_parameter("w13_weight").view(-1)[0] += 1
    with pytest.raises(WeightsError, match="w1_tile"):
        layer(i.x_TH, i.routing)


@pytest.mark.parametrize("moved", ["to", "set_weights", "assign", "prepare_weights"])
def test_a_layer_lets_them_go_with_its_parameters(moved: str) -> None:
    layer, i = made_layer()
    layer.prepare_weights()
    tiles = layer.weights().w1_tiles
    assert tiles is not None
    layer.to("cpu")
    assert layer.weights().w1_tiles is tiles  # nothing moved
    gone, alive = weakref.ref(tiles), []
    del tiles
    if moved == "to":
        layer.to("meta")
    elif moved == "set_weights":
        layer.set_weights(i.weights)
    elif moved == "assign":
        state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
        layer.load_state_dict(state, assign=True)
    else:
        with pytest.MonkeyPatch.context() as patch:
            right = GroupedW4Path.prepare
            patch.setattr(GroupedW4Path, "prepare", lambda *a: (alive.append(gone()), right(*a))[1])
            layer.prepare_weights()
        assert alive == [None]
    gc.collect()
    assert gone() is None


def test_a_copy_of_a_layer_has_no_copy_of_them() -> None:
    layer, _ = made_layer()
    size = len(pickle.dumps(layer))
    layer.prepare_weights()
    assert len(pickle.dumps(layer)) == size
    assert copy.deepcopy(layer).weights().w1_tiles is None


def test_a_layer_prepares_where_its_weights_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """On its own GPU, whichever is the current one: kernels are launched on that."""
    right, current, inside = GroupedW4Path.prepare, MagicMock(), list[int]()
    manager = current.return_value

    def prepare(*given: Any) -> None:
        inside.append(manager.__enter__.call_count - manager.__exit__.call_count)
        right(*given)

    monkeypatch.setattr(fused_moe, "current", current)
    monkeypatch.setattr(GroupedW4Path, "prepare", prepare)
    made_layer()[0].prepare_weights()
    assert inside == [1]
    current.assert_called_once_with(CPU)


def test_they_cost_what_is_documented() -> None:
    problem = Problem(1, 4096, 14336, 8, 2, quant="mxfp4_w4a16")
    specs = make_kernel(*PAIR, problem).experts.prepared_specs()
    weights = 3 * 8 * 4096 * 14336 // 2
    assert sum(spec.nbytes for spec in specs.values()) == weights * 17 // 16


def test_calls_with_them_need_no_room_for_weights() -> None:
    few, many = (made(tokens=t, experts=6, top_k=3)[0].workspace_specs(t) for t in (40, 100))
    assert "permuted_x" in few  # 20 rows an expert: prepared weights alone take the path
    assert "tiled_words" not in few
    assert "tiled_words" in many
