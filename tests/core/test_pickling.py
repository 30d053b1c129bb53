"""Kernels, plans, layers, runners and adapter pools can be pickled, saved and copied."""

import copy
import io
import multiprocessing
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import DEVICE
from ep_layers import ALL2ALL, BATCHED, GATHERED, REPLICATED, Layer
from forked_child import TIMEOUT_S
from fused_experts_calls import BASE
from lora_layers import STARTS, add_adapters, make_adapter, make_base_layer
from lora_layers import make_call as lora_call
from rank_fixtures import make_ranks_fixture
from runner_calls import NOT_INPLACE, run_layer
from torch.utils.data import DataLoader, Dataset

import modular_kernel as mk
from modular_kernel.errors import ModularKernelError, UnsupportedError
from modular_kernel.integrations.moe_runner import MoeRunner
from modular_kernel.layers.adapter_pool import AdapterPool
from modular_kernel.layers.ep_moe import EPMoE
from modular_kernel.layers.fused_moe import FusedMoE
from modular_kernel.layers.lora import ForwardBatch
from modular_kernel.layers.parallel import LayerParallel
from modular_kernel.layers.router import Router
from modular_kernel.select.autotune import MeasurementOptions, compose
from modular_kernel.spec.router import RouterSpec
from modular_kernel.testing.random_inputs import random_inputs
from modular_kernel.testing.ranks.pool import RankPool

PROBLEM = mk.Problem(
    tokens=8, hidden=64, intermediate=32, experts=4, top_k=2, dtype=torch.float32
)  # fmt: skip
CPU = torch.device("cpu")

pair = make_ranks_fixture(2)


def torch_round_trip(value: Any) -> Any:
    """Save and load a value with torch."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickle_round_trip(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


WITH_EACH_COPY = pytest.mark.parametrize(
    "copy_of", [pickle_round_trip, torch_round_trip, copy.deepcopy]
)


def pairings() -> list[tuple[str, str]]:
    valid = [v.pairing for v in mk.check_all(PROBLEM) if v.ok]
    return [tuple(pairing.split(" x ")) for pairing in valid]  # type: ignore[misc]


@WITH_EACH_COPY
def test_kernels_and_plans_of_every_pairing_round_trip(copy_of: Callable[[Any], Any]) -> None:
    pairs, inputs = pairings(), random_inputs(PROBLEM, DEVICE)
    assert ("MoEPrepareAndFinalizeNoEP", "TorchExperts") in pairs
    for pair in pairs:
        kernel = mk.make_kernel(*pair, PROBLEM, checked=True)
        expected = kernel(*inputs)
        other = copy_of(kernel)
        assert torch.equal(other(*inputs), expected), pair
        assert (other.problem, other.machine) == (kernel.problem, kernel.machine)
        assert (other.checked, other.poison) == (True, False)
        plan = kernel.plan()
        plan(*inputs)
        assert torch.equal(copy_of(plan)(*inputs), expected), pair


def test_copies_count_their_own_invalid_ids() -> None:
    kernel = mk.make_kernel("MoEPrepareAndFinalizeNoEP", "TorchExperts", PROBLEM)
    x_TH, weights, routing = random_inputs(PROBLEM, DEVICE)
    routing.topk_ids_TK[0, 0] = 99
    kernel(x_TH, weights, routing)
    other = pickle_round_trip(kernel)
    assert (kernel.invalid_ids, other.invalid_ids) == (1, 0)
    other(x_TH, weights, routing)
    other(x_TH, weights, routing)
    assert (kernel.invalid_ids, other.invalid_ids) == (1, 2)


@WITH_EACH_COPY
def test_composed_kernels_round_trip(
    copy_of: Callable[[Any], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MK_CACHE_DIR", str(tmp_path))
    inputs = random_inputs(PROBLEM, CPU)
    kernel = compose(PROBLEM, mk.Machine("cpu"), options=MeasurementOptions(budget=0.0))
    other = copy_of(kernel)
    assert other.pairing == kernel.pairing
    assert torch.equal(other(*inputs), kernel(*inputs))
    assert torch.equal(copy_of(kernel.plan())(*inputs), kernel(*inputs))


@WITH_EACH_COPY
def test_layers_round_trip(copy_of: Callable[[Any], Any]) -> None:
    g = torch.Generator().manual_seed(0)
    x_TH, logits = torch.randn(5, 64, generator=g), torch.randn(5, 4, generator=g)
    for layer, routing in (
        (FusedMoE(4, 64, 32, router=RouterSpec(2), params_dtype=torch.float32), logits),
        (FusedMoE(4, 64, 32, router=Router(RouterSpec(2), 64, 4), params_dtype=torch.float32),
         None),
        (EPMoE(4, 2, 64, 32, params_dtype=torch.float32, experts="TorchExperts"), logits),
    ):  # fmt: skip
        for parameter in layer.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=g) / 8)
        expected = layer(x_TH, routing)
        assert torch.equal(copy_of(layer)(x_TH, routing), expected)


@WITH_EACH_COPY
def test_layers_with_adapters_round_trip(copy_of: Callable[[Any], Any]) -> None:
    layer, manager = add_adapters(make_base_layer(), "merged", 2)
    x, logits = lora_call()
    batch = ForwardBatch(("a", None, "b"), STARTS)
    expected = layer(x, logits, moe_lora_info=manager.prepare_moe_lora_batch(batch, 3))
    other_layer, other = copy_of((layer, manager))
    info = other.prepare_moe_lora_batch(batch, 3)
    assert torch.equal(other_layer(x, logits, moe_lora_info=info), expected)
    other.evict("a")
    assert other.load("c", {}) == 0
    assert "a" in manager.pools[3].slots


@WITH_EACH_COPY
def test_pools_round_trip(copy_of: Callable[[Any], Any]) -> None:
    problem = mk.Problem(
        tokens=8, hidden=32, intermediate=24, experts=6, top_k=2, dtype=torch.float32,
        lora="adapters=2,rank=5",
    )  # fmt: skip
    pool = AdapterPool(problem)
    pool.load("one", make_adapter(3, 1, num_a13=2))
    other = copy_of(pool)
    assert other.load("two", make_adapter(4, 2, num_a13=2)) == 1
    assert (dict(pool.slots), dict(other.slots)) == ({"one": 0}, {"one": 0, "two": 1})
    assert all(torch.equal(t[0], other._tensors[name][0]) for name, t in pool._tensors.items())
    assert not any(tensor[1].any() for tensor in pool._tensors.values())


@WITH_EACH_COPY
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_runners_round_trip(copy_of: Callable[[Any], Any], backend: str) -> None:
    runner = MoeRunner(backend, NOT_INPLACE)
    assert torch.equal(run_layer(copy_of(runner), BASE), run_layer(runner, BASE))


def run_and_copy_result(called: Any, *inputs: Any) -> torch.Tensor:
    """Call a function in this process and return a copy of its result."""
    torch.set_num_threads(1)
    return called(*inputs).clone().numpy()


def test_a_spawned_process_runs_kernels_plans_and_layers() -> None:
    inputs = random_inputs(PROBLEM, CPU)
    x_TH, weights, routing = inputs
    kernel = mk.make_kernel("MoEPrepareAndFinalizeNoEP", "TorchExperts", PROBLEM)
    layer = FusedMoE(4, 64, 32, top_k=2, params_dtype=torch.float32)
    layer.set_weights(weights)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as processes:
        runs = [
            processes.submit(run_and_copy_result, kernel, *inputs),
            processes.submit(run_and_copy_result, kernel.plan(), *inputs),
            processes.submit(run_and_copy_result, layer, x_TH, routing),
        ]
        outputs = [run.result(timeout=3 * TIMEOUT_S) for run in runs]
    for output in outputs:
        torch.testing.assert_close(torch.from_numpy(output), kernel(*inputs))


class Tokens(Dataset):  # type: ignore[type-arg]
    """A dataset of the layer's outputs for one token at a time."""

    def __init__(self, layer: FusedMoE, inputs: Any) -> None:
        self.layer, (self.x_TH, _, self.routing) = layer, inputs

    def __len__(self) -> int:
        return len(self.x_TH)

    def __getitem__(self, at: int) -> torch.Tensor:
        routing = self.routing
        own = mk.Routing(
            routing.topk_weights_TK[at : at + 1], routing.topk_ids_TK[at : at + 1]
        )  # fmt: skip
        return self.layer(self.x_TH[at : at + 1], own)[0]


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_workers_of_a_data_loader_call_a_layer(start_method: str) -> None:
    inputs = random_inputs(PROBLEM, CPU)
    layer = FusedMoE(4, 64, 32, top_k=2, params_dtype=torch.float32)
    layer.set_weights(inputs[1])
    expected = layer(inputs[0], inputs[2])
    loader = DataLoader(
        Tokens(layer, inputs),
        batch_size=4,
        num_workers=2,
        multiprocessing_context=start_method,
        timeout=3 * TIMEOUT_S,
    )
    torch.testing.assert_close(torch.cat(list(loader)), expected)


def test_pickling_parts_over_ranks_is_refused_with_the_reason(pair: RankPool) -> None:
    for part, experts in (
        (REPLICATED, "TorchExperts"),
        (GATHERED, "TorchExperts"),
        (ALL2ALL, "TorchExperts"),
        (BATCHED, "NaiveBatchedExperts"),
    ):
        layer = Layer(part, (3, 3), experts_part=experts)
        for errors in pair.run(refusals, layer):
            assert [error for error, _ in errors] == [UnsupportedError.__name__] * len(errors)
            assert all("process group" in text or "group" in text for _, text in errors)


def refusals(rank: int, world: int, group: object, layer: Layer) -> list[tuple[str, str]]:
    kernel = layer.kernel(rank, group)
    parallel = LayerParallel(ep_group=group)
    module = FusedMoE(8, 48, 40, top_k=3, params_dtype=torch.float32, parallel=parallel)
    errors = []
    for value in (kernel, kernel.plan(), module):
        for copy_of in (pickle_round_trip, torch_round_trip, copy.deepcopy):
            try:
                copy_of(value)
            except ModularKernelError as error:
                errors.append((type(error).__name__, str(error)))
            except Exception as error:  # noqa: BLE001  an untyped error fails the test
                errors.append((f"raw {type(error).__name__}", str(error)))
    # The tensors of a layer can be saved.
    assert torch_round_trip(module.state_dict()).keys() == module.state_dict().keys()
    kernel.prepare_finalize.destroy()
    return errors
