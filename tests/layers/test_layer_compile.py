"""torch.compile and torch.export trace FusedMoE, EPMoE and MoeRunner as custom operators."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from small_layers import FAMILIES, E, H, I, K, Sample, make_layer

import modular_kernel as mk
from modular_kernel.errors import DtypeError, StateError, UnsupportedError
from modular_kernel.integrations.moe_runner import MoeQuantInfo, MoeRunner, MoeRunnerConfig
from modular_kernel.integrations.runner_formats import (
    DeepEPNormalDispatchOutput,
    StandardDispatchOutput,
)
from modular_kernel.layers.ep_moe import EPMoE
from modular_kernel.layers.fused_moe import FusedMoE
from modular_kernel.layers.router import Router, RouterSpec
from modular_kernel.machine import prefer_torch_reference
from modular_kernel.ops.route import RouterTensors, format_spec, parse_spec, route
from modular_kernel.tensors import Routing
from modular_kernel.testing.random_inputs import random_inputs

SAMPLES = {
    "plain": Sample(),
    "biases": Sample(fields={"bias": True}),
    "scaled": Sample(FAMILIES["biased"], fields={"routed_scaling_factor": 2.5}),
    "zero experts": Sample(FAMILIES["zero experts"], fields={"routed_scaling_factor": 2.0}),
    "on the input": Sample(fields={"apply_router_weight_on_input": True, "bias": True}),
    "bf16": Sample(fields={"dtype": torch.bfloat16}),
    "int4": Sample(fields={"quant": "int4_w4a16_group:group=8"}),
    "fp8": Sample(fields={"quant": "fp8_w8a8_block:block=8x8"}),
}
ROUTE, EXPERTS = "modular_kernel.route", "modular_kernel.experts_forward"
Compiled = tuple[Callable[..., torch.Tensor], list[torch.fx.GraphModule]]


@pytest.fixture(autouse=True)
def reset_compiler() -> Iterator[None]:
    """Reset torch.compile, and use torch references because interpreted kernels are slow."""
    torch.compiler.reset()
    with torch.no_grad(), prefer_torch_reference():
        yield
    torch.compiler.reset()


def compile_with_graphs(function: Any) -> Compiled:
    """Compile with fullgraph=True, and return the compiled function and a list of its graphs."""
    graphs: list[torch.fx.GraphModule] = []

    def record_graph(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    return torch.compile(function, fullgraph=True, backend=record_graph), graphs


def list_our_operators(graph: torch.fx.Graph) -> list[str]:
    targets = [str(node.target) for node in graph.nodes]
    return [target.removesuffix(".default") for target in targets if "modular_kernel" in target]


def draw_inputs(sample: Sample, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    x_TH = torch.randn(tokens, H, generator=generator).to(sample.problem.dtype)
    return x_TH, torch.randn(tokens, sample.router.columns(E), generator=generator)


# -------------------------------------------------------------------------------------- FusedMoE


ONE_RANK, LAST_OF_2X2_RANKS = ((0, 1), (0, 1)), ((1, 2), (1, 2))
SAMPLES_AND_RANKS = [(name, ONE_RANK) for name in SAMPLES] + [
    (n, LAST_OF_2X2_RANKS) for n in ("biases", "scaled", "int4")
]


@pytest.mark.parametrize(("name", "ranks"), SAMPLES_AND_RANKS, ids=str)
def test_a_compiled_layer_is_two_operators_for_any_number_of_tokens(name: str, ranks: Any) -> None:
    sample = SAMPLES[name]
    layer = make_layer(sample, *ranks, shared_experts=torch.nn.Tanh())
    compiled, graphs = compile_with_graphs(layer)
    for tokens in (17, 9, 5):
        call_inputs = draw_inputs(sample, tokens)
        assert torch.equal(compiled(*call_inputs), layer(*call_inputs))
    assert [list_our_operators(graph.graph) for graph in graphs] == [[ROUTE, EXPERTS]] * 2
    for tokens in (1, 0):
        call_inputs = draw_inputs(sample, tokens)
        assert torch.equal(compiled(*call_inputs), layer(*call_inputs))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_layer_compiled_before_its_first_call_equals_eager(backend: str) -> None:
    layer = make_layer(Sample())
    call = torch.compile(layer, backend=backend)
    call_inputs = draw_inputs(Sample(), 9)
    got = call(*call_inputs)
    assert torch.equal(got, layer(*call_inputs))


@pytest.mark.parametrize("table", [False, True])
def test_the_router_module_of_a_layer_is_traced(table: bool) -> None:
    spec = RouterSpec(K, "sqrtsoftplus", renormalize=True, selection_bias=not table, table=table)
    router = Router(spec, H, E, bias=True, vocabulary=20 if table else None)
    for number, parameter in enumerate(router.parameters()):
        parameter.data.copy_(Sample().draw(*parameter.shape, seed=number + 8))
    if table:
        router.tid2eid.copy_(torch.stack([torch.randperm(E)[:K] for _ in range(20)]))
    layer = make_layer(Sample(), router=router, selection_bias=None)
    call, graphs = compile_with_graphs(layer)
    for tokens in (9, 6, 4):
        token_ids = torch.randint(20, (tokens,)) if table else None
        x_TH = draw_inputs(Sample(), tokens)[0]
        got = call(x_TH, token_ids=token_ids)
        assert torch.equal(got, layer(x_TH, token_ids=token_ids))
    assert list_our_operators(graphs[0].graph) == [ROUTE, EXPERTS]


def test_routing_as_argument_is_traced() -> None:
    sample, layer = Sample(), make_layer(Sample(), router=None, top_k=K)
    x_TH, logits = draw_inputs(sample, 8)
    routing = route(logits, sample.router).routing
    weights, ids = routing.topk_weights_TK, routing.topk_ids_TK

    def call_with_routing(
        x_TH: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        return layer(x_TH, Routing(weights, ids))

    expected = layer(x_TH, routing)

    def call_with_tuple(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return layer(x, (weights.view(2, 4, K), ids.view(2, 4, K), None))

    for function in (call_with_routing, call_with_tuple):
        x = x_TH if function is call_with_routing else x_TH.view(2, 4, H)
        call, graphs = compile_with_graphs(function)
        assert torch.equal(call(x, weights, ids.long()).view(8, H), expected)
        assert list_our_operators(graphs[0].graph) == [EXPERTS]


def test_compiled_layers_use_replaced_and_cast_weights() -> None:
    layer = make_layer(Sample())
    call, _ = compile_with_graphs(layer)
    x_TH, logits = draw_inputs(Sample(), 6)
    before = call(x_TH, logits)
    layer.w2_weight.data = layer.w2_weight.data * 2
    layer.w13_weight.mul_(2)
    after = call(x_TH, logits)
    assert not torch.equal(before, after)
    assert torch.equal(after, layer(x_TH, logits))
    layer.bfloat16()
    assert torch.equal(call(x_TH.bfloat16(), logits), layer(x_TH.bfloat16(), logits))


def test_replacing_the_router_recompiles() -> None:
    layer = make_layer(Sample())
    call, _ = compile_with_graphs(layer)
    call_inputs, outputs = draw_inputs(Sample(), 6), []
    for spec in (RouterSpec(K), RouterSpec(K, "sigmoid"), RouterSpec(K, renormalize=True, eps=0.5)):
        layer.router = spec
        outputs.append(call(*call_inputs))
        assert torch.equal(outputs[-1], layer(*call_inputs))
    assert not torch.equal(outputs[0], outputs[1])


def test_compiled_layers_refuse_the_same_inputs_as_eager_layers() -> None:
    layer = make_layer(Sample())
    x_TH, logits = draw_inputs(Sample(), 6)
    call = torch.compile(layer, backend="eager")
    with pytest.raises(DtypeError, match="x: got float64, need float32"):
        call(x_TH.double(), logits)
    with torch.enable_grad(), pytest.raises(UnsupportedError, match="gradients"):
        call(x_TH.clone().requires_grad_(), logits)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="x has another dtype"):
        compile_with_graphs(layer)[0](x_TH.double(), logits)


def test_a_layer_that_sums_over_ranks_breaks_the_graph_with_a_reason(monkeypatch) -> None:
    layer = make_layer(Sample())
    layer._groups = (object(),)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, group: tensor.mul_(3))
    call_inputs = draw_inputs(Sample(), 6)
    expected = layer(*call_inputs)
    assert torch.equal(torch.compile(layer, backend="eager")(*call_inputs), expected)
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="sums over ranks is not traced"):
        compile_with_graphs(layer)[0](*call_inputs)
    with pytest.raises(UnsupportedError, match=r"torch\.export: got a FusedMoE that exchanges"):
        torch.export.export(layer, call_inputs, strict=False)


@pytest.mark.parametrize("name", ["problem", "experts"])
def test_a_layer_with_a_replaced_problem_or_pairing_breaks_the_graph(name: str) -> None:
    layer = make_layer(Sample())
    if name == "problem":
        layer.problem = mk.Problem(1, H, I, E, K, dtype=torch.float32, routed_scaling_factor=3.0)
    else:
        layer.experts, layer.prepare_finalize = "NaiveBatchedExperts", "BatchedPrepareAndFinalize"
    call_inputs = draw_inputs(Sample(), 6)
    assert torch.equal(torch.compile(layer, backend="eager")(*call_inputs), layer(*call_inputs))
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="was replaced is not traced"):
        compile_with_graphs(layer)[0](*call_inputs)


def test_a_compiled_layer_raises_until_it_is_loaded() -> None:
    sample = Sample()
    layer = FusedMoE(E, H, I, router=sample.router, params_dtype=torch.float32)
    call, _ = compile_with_graphs(layer)
    call_inputs = draw_inputs(sample, 6)
    with pytest.raises(StateError, match="nothing loaded into w1, w2"):
        call(*call_inputs)
    weights = sample.plain
    layer.w13_weight.data.copy_(weights.w1)
    with pytest.raises(StateError, match="nothing loaded into w2"):
        call(*call_inputs)
    layer.w2_weight.data.copy_(weights.w2)
    got = call(*call_inputs)
    assert torch.equal(got, make_layer(sample)(*call_inputs))


def test_a_compiled_router_raises_until_it_is_loaded() -> None:
    router = Router(RouterSpec(K), H, E)
    layer = make_layer(Sample(), router=router, selection_bias=None)
    call, _ = compile_with_graphs(layer)
    x_TH = draw_inputs(Sample(), 6)[0]
    with pytest.raises(StateError, match="nothing loaded into parameter 0 of the router"):
        call(x_TH)
    router.weight.data.normal_()
    assert torch.equal(call(x_TH), layer(x_TH))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_routers_of_several_sizes_share_one_graph_with_symbolic_sizes(dtype: torch.dtype) -> None:
    run = torch.compile(lambda router, x_TH: router(x_TH), backend="eager", dynamic=True)
    for hidden, experts, tokens in ((32, 4, 3), (64, 8, 5), (40, 6, 1)):
        router = Router(RouterSpec(2), hidden, experts, device="cpu", dtype=dtype)
        router.weight.data.normal_()
        x_TH = torch.randn(tokens, hidden).to(dtype)
        with torch.no_grad():
            for got, expected in zip(run(router, x_TH), router(x_TH), strict=True):
                assert torch.equal(got, expected)


def test_an_unloaded_router_at_the_address_of_a_loaded_one_raises() -> None:
    """The allocator may give the memory of a freed router to the next router."""
    x_TH, memory = torch.randn(3, H), torch.empty(E * H + 4)
    address = memory.data_ptr()
    array = memory.numpy()

    def make_router() -> Router:
        module = Router(RouterSpec(K), H, E, device="cpu", dtype=torch.float32)
        storage = torch.from_numpy(array)[: E * H].view(E, H)  # a new storage at the same address
        assert storage.data_ptr() == address
        module.weight = torch.nn.Parameter(storage.copy_(module.weight), requires_grad=False)
        return module

    run = torch.compile(lambda router: router(x_TH)[1], backend="eager")
    loaded = make_router()
    loaded.weight.data.copy_(torch.randn(E, H))
    with torch.no_grad():
        assert int(run(loaded).min()) >= 0
        del loaded
        with pytest.raises(StateError, match="nothing loaded into parameter 0 of the router"):
            run(make_router())


# ------------------------------------------------------------------------------ EPMoE, MoeRunner


def test_ep_moe_of_one_rank_is_traced() -> None:
    bias = torch.linspace(-0.5, 0.5, E)
    layer = EPMoE(
        E, K, H, I, torch.float32, use_grouped_topk=True, num_expert_group=4, topk_group=2,
        correction_bias=bias, tp_size=2, tp_rank=1, experts="TorchExperts",
    )  # fmt: skip
    weights = Sample().plain
    layer.set_weights(mk.ExpertWeights(weights.w1[E // 2 :], weights.w2[E // 2 :]))
    call, graphs = compile_with_graphs(layer)
    for tokens in (9, 6, 4):
        call_inputs = draw_inputs(Sample(), tokens)
        assert torch.equal(call(*call_inputs), layer(*call_inputs))
    assert [list_our_operators(graph.graph) for graph in graphs] == [[ROUTE, EXPERTS]] * 2


def make_runner(quant: str, **config: Any) -> tuple[MoeRunner, MoeQuantInfo]:
    problem = mk.Problem(9, H, I, E, K, dtype=torch.float32, quant=quant)
    _, weights, _ = random_inputs(problem, torch.device("cpu"))
    info = MoeQuantInfo(
        weights.w1,
        weights.w2,
        w13_scale=weights.w1_scale,
        w2_scale=weights.w2_scale,
        quant=None if quant == "none" else quant,
    )
    return MoeRunner("torch", MoeRunnerConfig(top_k=K, **{"inplace": False} | config)), info


class ModelWithRunner(torch.nn.Module):
    def __init__(self, quant: str, **config: Any) -> None:
        super().__init__()
        self.runner, self.info = make_runner(quant, **config)

    def forward(self, x_TH: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        dispatched = StandardDispatchOutput(x_TH * 2, (weights, ids))
        return self.runner.run(dispatched, self.info).hidden_states + 1


def draw_routed_inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x_TH, logits = draw_inputs(Sample(), tokens)
    values, ids = logits.topk(K)
    return x_TH, values.softmax(-1), ids


RUNNER_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("none", {"activation": "gelu", "routed_scaling_factor": 2.5}),
    "no combine": ("none", {"no_combine": True}),
    "inplace": ("none", {"inplace": True}),
    "on the input": ("none", {"apply_router_weight_on_input": True}),
    "fp8 by block": ("fp8_w8a8_block:block=8x8", {}),
}


@pytest.mark.parametrize("name", RUNNER_OPTIONS)
def test_a_compiled_runner_is_one_operator(name: str) -> None:
    quant, config = RUNNER_OPTIONS[name]
    model = ModelWithRunner(quant, **config)
    call, graphs = compile_with_graphs(model)
    for tokens in (9, 17, 5):
        call_inputs = draw_routed_inputs(tokens)
        assert torch.equal(call(*call_inputs), model(*call_inputs))
    assert [list_our_operators(graph.graph) for graph in graphs] == [[EXPERTS]] * 2


def test_a_compiled_inplace_runner_overwrites_x() -> None:
    runner, info = make_runner("none", inplace=True)
    x_TH, weights, ids = draw_routed_inputs(9)
    expected = runner.run(StandardDispatchOutput(x_TH.clone(), (weights, ids)), info).hidden_states

    def run_inplace(x_TH: torch.Tensor) -> torch.Tensor:
        return runner.run(StandardDispatchOutput(x_TH, (weights, ids)), info).hidden_states

    got = compile_with_graphs(run_inplace)[0](x_TH)
    assert torch.equal(got, expected)
    assert torch.equal(x_TH, expected)


def test_deepep_dispatch_breaks_the_graph_with_a_reason() -> None:
    runner, info = make_runner("fp8_w8a8_channel")
    x_RH = torch.randn(5, H).to(torch.float8_e4m3fn)
    scale, (_, weights, ids) = torch.ones(5, 1), draw_routed_inputs(5)

    def call(x_RH: torch.Tensor) -> torch.Tensor:
        dispatched = DeepEPNormalDispatchOutput(x_RH, scale, ids, weights)
        return runner.run(dispatched, info).hidden_states

    expected = call(x_RH)
    assert torch.equal(torch.compile(call, backend="eager")(x_RH), expected)
    torch.compiler.reset()
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match="the format deepep_normal is not traced"
    ):
        compile_with_graphs(call)[0](x_RH)


# ---------------------------------------------------------------------------------------- export


def make_module_to_export(
    kind: str,
) -> tuple[torch.nn.Module, Callable[[int], tuple[torch.Tensor, ...]]]:
    if kind == "MoeRunner":
        return ModelWithRunner("none"), draw_routed_inputs
    if kind == "FusedMoE":
        sample = SAMPLES["scaled"]
        return make_layer(sample, (1, 2)), lambda tokens: draw_inputs(sample, tokens)
    layer = EPMoE(E, K, H, I, torch.float32, tp_size=2, tp_rank=0, experts="TorchExperts")
    weights = Sample().plain
    layer.set_weights(mk.ExpertWeights(weights.w1[: E // 2], weights.w2[: E // 2]))
    return layer, lambda tokens: draw_inputs(Sample(), tokens)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("kind", ["FusedMoE", "EPMoE", "MoeRunner"])
def test_an_exported_program_runs_in_another_process(kind: str, strict: bool, tmp_path) -> None:
    layer, make_inputs = make_module_to_export(kind)
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    shapes = tuple({0: tokens} for _ in make_inputs(9))
    program = torch.export.export(layer, make_inputs(9), dynamic_shapes=shapes, strict=strict)
    # An exported MoeRunner supports gradients, regardless of the grad mode during export.
    assert list_our_operators(program.graph)[-1] == (
        "modular_kernel.experts" if kind == "MoeRunner" else EXPERTS
    )
    call_inputs = make_inputs(21)
    torch.export.save(program, tmp_path / "layer.pt2")
    torch.save((call_inputs, layer(*call_inputs)), tmp_path / "sample.pt")
    lines = (
        "import sys, torch",
        "import modular_kernel.operators.experts",
        "from modular_kernel.machine import prefer_torch_reference",
        "inputs, expected = torch.load(sys.argv[2])",
        "with prefer_torch_reference():",
        "    got = torch.export.load(sys.argv[1]).module()(*inputs)",
        "assert 'modular_kernel.layers.fused_moe' not in sys.modules",
        "assert torch.equal(got, expected), (got - expected).abs().max()",
    )
    command = [sys.executable, "-c", "\n".join(lines)]
    command += [str(tmp_path / "layer.pt2"), str(tmp_path / "sample.pt")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


# ------------------------------------------------------------------------- the router's operator


@pytest.mark.parametrize("name", FAMILIES)
def test_opcheck_of_route_passes(name: str) -> None:
    sample = Sample(FAMILIES[name])
    spec = format_spec(sample.router)
    assert parse_spec(spec) == sample.router
    arguments = (sample.logits, sample.selection_bias, None, None, [], spec, False)
    torch.library.opcheck(torch.ops.modular_kernel.route.default, arguments)
    got = torch.ops.modular_kernel.route(*arguments[:-1], True)
    expected = route(
        sample.logits,
        sample.router,
        RouterTensors(sample.selection_bias),
        ids_dtype=torch.int64,
    )
    assert torch.equal(got[0], expected.routing.topk_weights_TK)
    assert torch.equal(got[1], expected.routing.topk_ids_TK)
    assert got[2].shape == ((7,) if sample.router.zero_experts else (0,))


@pytest.mark.parametrize(
    "spec_json", ["", "[]", '{"top_k": 2, "more": 1}', '{"top_k": 0}', '{"score": "softmax"}']
)
def test_invalid_router_texts_are_refused(spec_json: str) -> None:
    arguments = (torch.zeros(3, E), None, None, None, [], spec_json, False)
    with pytest.raises(mk.errors.ConfigurationError, match="router"):
        torch.ops.modular_kernel.route(*arguments)
