"""torch.compile and torch.export trace our experts without graph breaks or changes of results."""

import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

import modular_kernel as mk

if find_spec("transformers") is None:
    pytest.skip("the extra is not installed", allow_module_level=True)

from transformers.integrations.moe import use_experts_implementation
from transformers_samples import OURS

from modular_kernel.cli.demo_models import SMALL_MODELS, build_small_model
from modular_kernel.integrations.transformers import register, registration
from modular_kernel.machine import prefer_torch_reference
from modular_kernel.operators import experts as experts_op
from modular_kernel.operators.pairing import serialize_layer
from modular_kernel.plan import held_bytes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NO_EP = "MoEPrepareAndFinalizeNoEP"
E, H, I, K = 5, 32, 24, 2  # noqa: E741


@pytest.fixture(autouse=True)
def reset_compiler() -> None:
    """Reset torch.compile, because a second compilation in one process could reuse the first."""
    torch.compiler.reset()


@use_experts_implementation
class Experts(torch.nn.Module):
    """Experts with a limit on the gate."""

    def __init__(self, config) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.num_experts, self.limit = E, 0.5
        shapes = {"gate_up_proj": (E, 2 * I, H), "down_proj": (E, H, I)}
        for name, shape in shapes.items():
            values = torch.randn(shape, generator=generator) / 5
            setattr(self, name, torch.nn.Parameter(values.to(DEVICE)))

    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        up = up.clamp(-self.limit, self.limit)
        return torch.nn.functional.silu(gate.clamp(max=self.limit)) * up

    def forward(self, hidden_states, top_k_index, top_k_weights):
        raise AssertionError("not dispatched")


def make_experts() -> torch.nn.Module:
    return Experts(SimpleNamespace(_experts_implementation=register(*OURS))).eval()


def make_inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, H, generator=generator)
    values, ids = torch.randn(tokens, E, generator=generator).topk(K)
    return x.to(DEVICE), ids.to(DEVICE), values.softmax(-1).to(DEVICE)


def list_operators(graph: torch.fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if "modular_kernel" in str(node.target)]


# -------------------------------------------------------------------------------------- models


@pytest.mark.share(2)
@pytest.mark.parametrize("name", SMALL_MODELS)
def test_compiled_models_are_one_graph_and_equal_eager(name) -> None:
    """The calls have 17, 9 and 5 tokens. The second graph has a dynamic number of tokens."""
    model = build_small_model(name, "float32", DEVICE)
    model.set_experts_implementation(register(*OURS))
    graphs: list[torch.fx.GraphModule] = []

    def record_graph(graph: torch.fx.GraphModule, make_inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(model, fullgraph=True, backend=record_graph)
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        for tokens in (17, 9, 5):
            ids = torch.randint(256, (2, tokens), generator=generator).to(DEVICE)
            expected = model(input_ids=ids, use_cache=False).logits
            got = compiled(input_ids=ids, use_cache=False).logits
            assert torch.equal(got, expected)
    num_layers = sum(hasattr(module, "has_gate") for module in model.modules())
    assert len(graphs) == 2
    assert [len(list_operators(graph.graph)) for graph in graphs] == [num_layers, num_layers]


def test_modules_are_traced_by_number_if_torch_cannot_trace_objects(monkeypatch) -> None:
    """torch 2.11 cannot trace objects. Each module of a class then gets its own graph."""
    constants = sys.modules["modular_kernel.integrations.transformers.constants"]
    monkeypatch.setattr(constants, "_ACCEPTS_OBJECTS", False)
    graphs: list[torch.fx.GraphModule] = []

    def record_graph(graph: torch.fx.GraphModule, make_inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    modules = [make_experts() for _ in range(2)]
    modules[1].limit = 0.1
    compiled = torch.compile(
        lambda module, *call: module(*call), backend=record_graph, fullgraph=True
    )
    arguments = make_inputs(9)
    with torch.inference_mode():
        for _ in range(2):
            for module in modules:
                assert torch.equal(compiled(module, *arguments), module(*arguments))
    assert [list_operators(graph.graph) for graph in graphs] == [
        ["modular_kernel.experts_forward.default"]
    ] * 2


def test_compiled_models_generate_the_same_tokens_with_a_static_cache() -> None:
    model = build_small_model("mixtral", "float32", DEVICE)
    prompt = torch.arange(7, device=DEVICE)[None]
    expected = model.generate(prompt, max_new_tokens=8, do_sample=False)
    model.set_experts_implementation(register(*OURS))
    model.forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    options = {"cache_implementation": "static", "disable_compile": True}
    got = model.generate(prompt, max_new_tokens=8, do_sample=False, **options)
    assert torch.equal(got, expected)


# ------------------------------------------------------------------------------- one module


def test_opcheck_passes() -> None:
    module, (x, ids, scores) = make_experts(), make_inputs(9)
    problem = mk.Problem(
        tokens=9, hidden=H, intermediate=I, experts=E, top_k=K, dtype=torch.float32
    )
    weights = [module.gate_up_proj.detach(), module.down_proj.detach()]
    pairing = str(registration().pairing)
    arguments = (x, ids, scores, weights, "w1,w2", serialize_layer(problem), pairing)
    torch.library.opcheck(experts_op.EXPERTS, arguments)
    torch.library.opcheck(experts_op.EXPERTS_FORWARD, arguments)


@pytest.mark.share(2)
def test_inductor_computes_the_same() -> None:
    module, arguments = make_experts(), make_inputs(9)

    def layer(x, ids, scores):
        return module(x * 2, ids, scores) + 1

    with torch.no_grad():
        expected = layer(*arguments)
        assert torch.equal(torch.compile(layer, fullgraph=True)(*arguments), expected)


def test_a_changed_limit_is_compiled_again() -> None:
    module, arguments = make_experts(), make_inputs(6)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    with torch.no_grad():
        for limit in (0.5, 0.1, 0.7, 0.1):
            module.limit = limit
            assert torch.equal(compiled(*arguments), module(*arguments))


def test_a_changed_act_fn_is_compiled_again() -> None:
    model = build_small_model("mixtral", "float32", DEVICE)
    module = next(m for m in model.modules() if hasattr(type(m), "_apply_gate"))
    module.config._experts_implementation = register(*OURS)
    compiled, outputs = torch.compile(module, backend="eager", fullgraph=True), []
    x_TH = torch.randn(3, module.down_proj.shape[1], device=DEVICE)
    call = (x_TH, torch.tensor([[0, 1]] * 3, device=DEVICE), torch.ones(3, 2, device=DEVICE))
    for function in (torch.nn.SiLU(), torch.nn.GELU(), torch.nn.GELU("tanh")):
        module.act_fn = function
        with torch.no_grad():
            outputs.append(compiled(*call))
            assert torch.equal(outputs[-1], module(*call))
    assert not torch.equal(outputs[0], outputs[1])


def test_dynamic_shapes_allow_another_top_k() -> None:
    module = make_experts()
    compiled = torch.compile(module, backend="eager", fullgraph=True, dynamic=True)
    for top_k in (2, 3):
        x_TH, _, _ = make_inputs(4)
        ids_TK = torch.arange(top_k, device=DEVICE).repeat(4, 1)
        weights_TK = torch.ones(4, top_k, device=DEVICE)
        with torch.no_grad():
            assert torch.equal(compiled(x_TH, ids_TK, weights_TK), module(x_TH, ids_TK, weights_TK))


def test_compiled_modules_use_moved_and_changed_weights() -> None:
    module, arguments = make_experts(), make_inputs(6)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    with torch.no_grad():
        before = compiled(*arguments)
        module.down_proj.data = module.down_proj.data.clone() * 3
        module.gate_up_proj.mul_(2)
        after = compiled(*arguments)
        assert not torch.equal(before, after)
        assert torch.equal(after, module(*arguments))


@pytest.mark.share(2)
@pytest.mark.parametrize("strict", [True, False])
def test_exported_programs_run_in_another_process_with_another_number_of_tokens(
    strict, tmp_path
) -> None:
    module = make_experts()
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    with torch.no_grad():
        shapes = ({0: tokens}, {0: tokens}, {0: tokens})
        program = torch.export.export(module, make_inputs(9), dynamic_shapes=shapes, strict=strict)
        assert list_operators(program.graph) == ["modular_kernel.experts.default"]
        arguments = make_inputs(21)
        torch.export.save(program, tmp_path / "experts.pt2")
        torch.save((arguments, module(*arguments)), tmp_path / "sample.pt")
    lines = (
        "import sys, torch",
        "import modular_kernel.operators.experts",
        "inputs, expected = torch.load(sys.argv[2])",
        "got = torch.export.load(sys.argv[1]).module()(*inputs)",
        "assert 'transformers' not in sys.modules",
        "assert torch.equal(got, expected), (got - expected).abs().max()",
    )
    command = [sys.executable, "-c", "\n".join(lines)]
    command += [str(tmp_path / "experts.pt2"), str(tmp_path / "sample.pt")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("strict", [True, False])
def test_programs_exported_without_gradients_can_compute_them(strict) -> None:
    module, (x_TH, *routing) = make_experts(), make_inputs(9)
    with torch.no_grad():
        program = torch.export.export(module, (x_TH, *routing), strict=strict).module()
    gradients = []
    for layer in (module, program):
        layer.zero_grad()
        x = x_TH.clone().requires_grad_()
        layer(x, *routing).sum().backward()
        gradients.append([x.grad, *(parameter.grad.clone() for parameter in layer.parameters())])
    assert len(gradients[1]) == 3
    for expected, got in zip(*gradients, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    ("position", "value", "match"),
    [
        (4, "w1", "2 tensors"),
        (4, "w1,w3", "w3"),
        (4, "w1,w2:x", "x"),
        (4, "b1,b2", "w1 and w2"),
        (5, "{}", "layer"),
        (5, "nothing", "layer"),
        (6, "NoSuchPart x TorchExperts", "NoSuchPart"),
    ],
)
def test_invalid_text_arguments_are_refused(position, value, match) -> None:
    module, tensors = make_experts(), make_inputs(3)
    problem = mk.Problem(
        tokens=9, hidden=H, intermediate=I, experts=E, top_k=K, dtype=torch.float32
    )
    weights = [module.gate_up_proj.detach(), module.down_proj.detach()]
    arguments = [
        *tensors,
        weights,
        "w1,w2",
        serialize_layer(problem),
        str(registration().pairing),
    ]
    arguments[position] = value
    with pytest.raises(mk.errors.InputError, match=match):
        torch.ops.modular_kernel.experts(*arguments)


# ---------------------------------------------------------------------------------------- plans


def test_plans_are_bounded_and_kept_outputs_do_not_change() -> None:
    """Four layers of one shape are called 1,000 times. Some calls exceed the largest plan."""
    name = register(NO_EP, "TorchExperts", name="planned")
    layers = [make_experts() for _ in range(4)]
    for layer in layers:
        layer.config._experts_implementation = name
    generator = torch.Generator().manual_seed(0)
    pairing, outputs, held_sizes = registration(name).pairing, [], []
    capacities = (16, 32, 64, 128, 256, 512, 1024, 2048)
    with torch.no_grad(), prefer_torch_reference():
        for call in range(1000):
            tokens = int(torch.randint(0, 2400, (1,), generator=generator))
            out = layers[call % 4](*make_inputs(tokens))
            if call % 40 == 0:
                outputs.append((out, out.clone()))
                held_sizes.append(sum(held_bytes().values()))
    plans = [plan for k in pairing.kernels.values() for plan in k._call_plans.capacities]
    assert sorted(plans) == list(capacities)
    assert {k.problem.tokens for k in pairing.kernels.values()} == {*capacities, 4096}
    assert held_sizes[-1] == held_sizes[-5]
    assert all(torch.equal(out, copy) for out, copy in outputs)
