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
from lora_layers import make_call as make_lora_call
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


with_each_copy_function = pytest.mark.parametrize(
    "copy_of", [pickle_round_trip, torch_round_trip, copy.deepcopy]
)


def list_valid_pairings() -> list[tuple[str, str]]:
    verdicts = [verdict for verdict in mk.check_all(PROBLEM) if verdict.ok]
    return [(verdict.prepare_finalize, verdict.experts) for verdict in verdicts]


@with_each_copy_function
def test_kernels_and_plans_of_every_pairing_round_trip(copy_of: Callable[[Any], Any]) -> None:
    pairs, inputs = list_valid_pairings(), random_inputs(PROBLEM, DEVICE)
    assert ("MoEPrepareAndFinalizeNoEP", "TorchExperts") in pairs
    for pair in pairs:
        kernel = mk.make_kernel(*pair, PROBLEM, checked=True)
        expected = kernel(*inputs)
        kernel_copy = copy_of(kernel)
        assert torch.equal(kernel_copy(*inputs), expected), pair
        assert (kernel_copy.problem, kernel_copy.machine) == (kernel.problem, kernel.machine)
        assert (kernel_copy.checked, kernel_copy.poison) == (True, False)
        plan = kernel.plan()
        plan(*inputs)
        assert torch.equal(copy_of(plan)(*inputs), expected), pair


def test_copies_count_their_own_invalid_ids() -> None:
    kernel = mk.make_kernel("MoEPrepareAndFinalizeNoEP", "TorchExperts", PROBLEM)
    x_TH, weights, routing = random_inputs(PROBLEM, DEVICE)
    routing.topk_ids_TK[0, 0] = 99
    kernel(x_TH, weights, routing)
    kernel_copy = pickle_round_trip(kernel)
    assert (kernel.invalid_ids, kernel_copy.invalid_ids) == (1, 0)
    kernel_copy(x_TH, weights, routing)
    kernel_copy(x_TH, weights, routing)
    assert (kernel.invalid_ids, kernel_copy.invalid_ids) == (1, 2)


@with_each_copy_function
def test_composed_kernels_round_trip(
    copy_of: Callable[[Any], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MK_CACHE_DIR", str(tmp_path))
    inputs = random_inputs(PROBLEM, CPU)
    kernel = compose(PROBLEM, mk.Machine("cpu"), options=MeasurementOptions(budget=0.0))
    kernel_copy = copy_of(kernel)
    assert kernel_copy.pairing == kernel.pairing
    assert torch.equal(kernel_copy(*inputs), kernel(*inputs))
    assert torch.equal(copy_of(kernel.plan())(*inputs), kernel(*inputs))


@with_each_copy_function
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


@with_each_copy_function
def test_layers_with_adapters_round_trip(copy_of: Callable[[Any], Any]) -> None:
    layer, manager = add_adapters(make_base_layer(), "merged", 2)
    x, logits = make_lora_call()
    batch = ForwardBatch(("a", None, "b"), STARTS)
    expected = layer(x, logits, moe_lora_info=manager.prepare_moe_lora_batch(batch, 3))
    layer_copy, manager_copy = copy_of((layer, manager))
    info = manager_copy.prepare_moe_lora_batch(batch, 3)
    assert torch.equal(layer_copy(x, logits, moe_lora_info=info), expected)
    manager_copy.evict("a")
    assert manager_copy.load("c", {}) == 0
    assert "a" in manager.pools[3].slots


@with_each_copy_function
def test_pools_round_trip(copy_of: Callable[[Any], Any]) -> None:
    problem = mk.Problem(
        tokens=8, hidden=32, intermediate=24, experts=6, top_k=2, dtype=torch.float32,
        lora="adapters=2,rank=5",
    )  # fmt: skip
    pool = AdapterPool(problem)
    pool.load("one", make_adapter(3, 1, num_a13=2))
    pool_copy = copy_of(pool)
    assert pool_copy.load("two", make_adapter(4, 2, num_a13=2)) == 1
    assert (dict(pool.slots), dict(pool_copy.slots)) == ({"one": 0}, {"one": 0, "two": 1})
    assert all(torch.equal(t[0], pool_copy._tensors[name][0]) for name, t in pool._tensors.items())
    assert not any(tensor[1].any() for tensor in pool._tensors.values())


@with_each_copy_function
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_runners_round_trip(copy_of: Callable[[Any], Any], backend: str) -> None:
    runner = MoeRunner(backend, NOT_INPLACE)
    assert torch.equal(run_layer(copy_of(runner), BASE), run_layer(runner, BASE))


def call_and_copy_result(function: Any, *inputs: Any) -> Any:
    """Call a function in this process, and return a copy of its result as a numpy array."""
    torch.set_num_threads(1)
    return function(*inputs).clone().numpy()


def test_a_spawned_process_runs_kernels_plans_and_layers() -> None:
    inputs = random_inputs(PROBLEM, CPU)
    x_TH, weights, routing = inputs
    kernel = mk.make_kernel("MoEPrepareAndFinalizeNoEP", "TorchExperts", PROBLEM)
    layer = FusedMoE(4, 64, 32, top_k=2, params_dtype=torch.float32)
    layer.set_weights(weights)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as processes:
        futures = [
            processes.submit(call_and_copy_result, kernel, *inputs),
            processes.submit(call_and_copy_result, kernel.plan(), *inputs),
            processes.submit(call_and_copy_result, layer, x_TH, routing),
        ]
        outputs = [future.result(timeout=3 * TIMEOUT_S) for future in futures]
    for output in outputs:
        torch.testing.assert_close(torch.from_numpy(output), kernel(*inputs))


class TokenOutputs(Dataset):  # type: ignore[type-arg]
    """A dataset of a layer's outputs, which it computes for one token at a time."""

    def __init__(self, layer: FusedMoE, inputs: Any) -> None:
        self.layer, (self.x_TH, _, self.routing) = layer, inputs

    def __len__(self) -> int:
        return len(self.x_TH)

    def __getitem__(self, index: int) -> torch.Tensor:
        token = slice(index, index + 1)
        routing = mk.Routing(self.routing.topk_weights_TK[token], self.routing.topk_ids_TK[token])
        return self.layer(self.x_TH[token], routing)[0]


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_workers_of_a_data_loader_call_a_layer(start_method: str) -> None:
    inputs = random_inputs(PROBLEM, CPU)
    layer = FusedMoE(4, 64, 32, top_k=2, params_dtype=torch.float32)
    layer.set_weights(inputs[1])
    expected = layer(inputs[0], inputs[2])
    loader = DataLoader(
        TokenOutputs(layer, inputs),
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
        for errors in pair.run(collect_errors, layer):
            assert [error for error, _ in errors] == [UnsupportedError.__name__] * len(errors)
            assert all("group" in message for _, message in errors)


def collect_errors(rank: int, world: int, group: object, layer: Layer) -> list[tuple[str, str]]:
    """Copy parts over ranks in every way, and return the name and message of each error."""
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
