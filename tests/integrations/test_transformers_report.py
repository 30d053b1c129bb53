"""`report` lists which modules run on our parts, and `serve` enables additional modules."""

import copy
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

if find_spec("transformers") is None:
    pytest.skip("the extra is not installed", allow_module_level=True)

from transformers_samples import OURS

from modular_kernel.cli.demo_models import build_small_model
from modular_kernel.errors import ConfigurationError, UnsupportedError
from modular_kernel.integrations.transformers import register, registration, report, serve

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
H, I, E, K = 32, 24, 4, 2  # noqa: E741


class ModelWithOneModule(torch.nn.Module):
    """A model whose only module is an experts module."""

    def __init__(self, module: torch.nn.Module, name: str) -> None:
        super().__init__()
        self.config = SimpleNamespace(_experts_implementation=name)
        self.experts = module


def make_module(folder: str, name: str, *args: object, **config: object) -> torch.nn.Module:
    module = import_module(f"transformers.models.{folder}.modeling_{folder}")
    experts = getattr(module, name)(
        SimpleNamespace(hidden_act="silu", hidden_size=H, **config), *args
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return experts.eval().to(DEVICE)


def make_longcat() -> torch.nn.Module:
    sizes = {"expert_ffn_hidden_size": I, "n_routed_experts": E, "zero_expert_num": 2}
    return make_module("longcat_flash", "LongcatFlashExperts", **sizes)


def make_step(limit: float | None) -> torch.nn.Module:
    sizes = {"moe_intermediate_size": I, "num_local_experts": E}
    return make_module("step3p7", "Step3p7Experts", limit, **sizes)


def make_llama4(top_k: int) -> torch.nn.Module:
    sizes = {"intermediate_size": I, "num_local_experts": E, "num_experts_per_tok": top_k}
    return make_module("llama4", "Llama4TextMoe", **sizes)


MODULES = {
    "longcat": make_longcat,
    "step": lambda: make_step(None),
    "step, limited": lambda: make_step(0.6),
    "llama4": lambda: make_llama4(1),
    "llama4, top_k=2": lambda: make_llama4(2),
}


def make_arguments(module: torch.nn.Module) -> "tuple[torch.Tensor, ...]":
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(13, H, generator=generator).to(DEVICE)
    if hasattr(module, "router"):
        return (x,)
    experts = getattr(module, "total_experts", E)
    values, ids = torch.randn(13, experts, generator=generator).topk(K)
    return x, ids.to(DEVICE), values.softmax(-1).to(DEVICE)


def get_first_output(value: object) -> torch.Tensor:
    return value[0] if isinstance(value, tuple) else value


@pytest.mark.parametrize("case", MODULES)
def test_serve_enables_modules_that_transformers_does_not_dispatch(case) -> None:
    original, module = MODULES[case](), MODULES[case]()
    name = register("MoEPrepareAndFinalizeNoEP", "TorchExperts")
    model, arguments = ModelWithOneModule(module, name), make_arguments(module)
    (before,) = report(model)
    assert not before.served
    assert "serve(model)" in before.why
    assert serve(model) == ("experts",)
    assert [row.served for row in report(model)] == [True]
    assert serve(model) == ()
    registration(name).kernels.clear()
    with torch.no_grad():
        float64_module = copy.deepcopy(original).double()
        float64_arguments = [t.double() if t.is_floating_point() else t for t in arguments]
        expected_output = get_first_output(float64_module(*float64_arguments))
        got = get_first_output(module(*arguments))
        assert registration(name).kernels
        assert (got.double() - expected_output).norm() <= 2e-6 * expected_output.norm()
        compiled = torch.compile(module, fullgraph=True, backend="eager")
        torch.compiler.reset()
        assert torch.equal(get_first_output(compiled(*arguments)), got)
        model.config._experts_implementation = "eager"
        assert torch.equal(
            get_first_output(module(*arguments)), get_first_output(original(*arguments))
        )
    assert module.state_dict().keys() == original.state_dict().keys()


@pytest.mark.parametrize("case", MODULES)
def test_gradients_of_enabled_modules_equal_their_own(case) -> None:
    original, module = MODULES[case](), MODULES[case]()
    serve(ModelWithOneModule(module, register(*OURS)))
    for experts in (original, module):
        get_first_output(experts(*make_arguments(experts))).square().sum().backward()
    for (name, expected), parameter in zip(
        original.named_parameters(), module.parameters(), strict=True
    ):
        error = (expected.grad - parameter.grad).abs().max()
        assert error <= 1e-4 * expected.grad.abs().max(), name


def test_every_module_of_a_model_has_a_row() -> None:
    model = build_small_model("mixtral", "float32", DEVICE)
    assert [row.why for row in report(model)] == [
        "experts_implementation is 'eager', which modular_kernel has not registered"
    ] * 2
    model.set_experts_implementation(register(*OURS))
    rows = report(model)
    assert [row.name for row in rows] == [f"model.layers.{n}.mlp.experts" for n in (0, 1)]
    assert all(row.served and str(row).endswith("served") for row in rows)
    assert "training mode" in report(model.train())[0].why
    model.eval().model.layers[1].mlp.experts.act_fn = torch.nn.ReLU()
    assert [row.served for row in report(model)] == [True, False]
    assert "computes another function" in report(model)[1].why


def test_rows_predict_the_next_call() -> None:
    """Rows depend on grad mode and on training mode."""
    forward_only = register(*OURS, name="refusing", gradients="refuse")
    model = build_small_model("mixtral", "float32", DEVICE)
    ids = torch.arange(8, device=DEVICE)[None]
    model.set_experts_implementation(forward_only)
    assert all("gradients are refused" in row.why for row in report(model))
    with pytest.raises(UnsupportedError, match="gradients"):
        model(input_ids=ids)
    with torch.no_grad():
        assert all(row.served for row in report(model))
        model(input_ids=ids)
    model.set_experts_implementation(register(*OURS))
    kernels = registration().kernels
    for train in (True, False):
        kernels.clear()
        assert all(row.served is not train for row in report(model.train(train)))
        kernels.clear()
        model(input_ids=ids)
        assert bool(kernels) is not train


def test_longcat_in_training_runs_its_own_forward() -> None:
    module = make_longcat()
    model, arguments = ModelWithOneModule(module, register(*OURS)), make_arguments(module)
    serve(model)
    for train in (True, False):
        kernels = registration().kernels
        assert [row.served for row in report(model.train(train))] == [not train]
        kernels.clear()
        module(*arguments)
        assert bool(kernels) is not train


@pytest.mark.skipif(DEVICE == "cuda", reason="the default parts on a GPU are the kernels")
@pytest.mark.parametrize("compiled", [False, True])
def test_default_on_a_cpu_is_grouped_mm(compiled) -> None:
    """On a CPU, grouped_mm is faster than the parts in torch."""
    model, ids = build_small_model("qwen3_moe", "float32", DEVICE), torch.arange(8)[None]
    model.set_experts_implementation("grouped_mm")
    torch.compiler.reset()
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    with torch.no_grad():
        expected_output = run(input_ids=ids).logits
        name = register()
        model.set_experts_implementation(name)
        assert torch.equal(run(input_ids=ids).logits, expected_output)
    assert not registration(name).kernels
    assert all("grouped_mm runs, because it is faster" in row.why for row in report(model))


@pytest.mark.parametrize("function", [report, serve])
def test_arguments_that_are_not_models_are_refused(function) -> None:
    with pytest.raises(ConfigurationError, match=r"model: got 'mixtral', need"):
        function("mixtral")


@pytest.mark.parametrize(
    ("folder", "name", "config"),
    [
        ("dbrx", "DbrxExperts", {"moe_num_experts": E, "ffn_hidden_size": I,
         "ffn_act_fn": {"name": "silu"}}),
        ("jetmoe", "JetMoeMoE", {"intermediate_size": I, "activation_function": "silu",
         "num_local_experts": E, "num_experts_per_tok": K}),
    ],
)  # fmt: skip
def test_unsupported_modules_are_named(folder, name, config) -> None:
    model = ModelWithOneModule(make_module(folder, name, **config), register(*OURS))
    assert serve(model) == ()
    (row,) = report(model)
    assert row.kind == name
    assert "does not dispatch" in row.why
