"""Calls that need gradients have the gradients of transformers' grouped_mm, or are refused."""

import copy
from importlib.util import find_spec

import pytest
import torch

if find_spec("transformers") is None:
    pytest.skip("the extra is not installed", allow_module_level=True)

from transformers_samples import OURS

from modular_kernel.cli.demo_models import build_small_model
from modular_kernel.errors import ConfigurationError, UnsupportedError
from modular_kernel.integrations.transformers import register, registration

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_model(name: str, implementation: str) -> torch.nn.Module:
    model = build_small_model(name, "float32", DEVICE)
    model.set_experts_implementation(implementation)
    return model


def compute_gradients(model: torch.nn.Module) -> "dict[str, torch.Tensor]":
    ids = torch.arange(24, device=DEVICE).reshape(2, 12)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_equal_gradients(
    got: "dict[str, torch.Tensor]", expected: "dict[str, torch.Tensor]"
) -> None:
    assert got.keys() == expected.keys() != set()
    for name, gradient in got.items():
        assert (gradient - expected[name]).abs().max() <= 1e-7, name


@pytest.mark.parametrize("checkpointing", [None, True, False])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_gradients_equal_those_of_grouped_mm(name, checkpointing) -> None:
    gradients_by_implementation = []
    for implementation in (register(*OURS), "grouped_mm"):
        model = make_model(name, implementation).train()
        if checkpointing is not None:
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
            model.enable_input_require_grads()
        gradients_by_implementation.append(compute_gradients(model))
    assert_equal_gradients(*gradients_by_implementation)
    assert len(gradients_by_implementation[0]) == len(list(model.parameters()))


@pytest.mark.parametrize("trained", ["self_attn.q_proj", "mlp.gate", "down_proj"])
def test_trained_parameters_get_gradients(trained) -> None:
    """The model is in eval mode, and the experts may be frozen."""
    gradients_by_implementation = []
    for implementation in (register(*OURS), "grouped_mm"):
        model = make_model("mixtral", implementation)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained in name)
        gradients_by_implementation.append(compute_gradients(model))
    assert_equal_gradients(*gradients_by_implementation)


def compute_exact_gradients(name: str) -> "dict[str, torch.Tensor]":
    """Return the gradients of transformers' eager experts in float64."""
    return compute_gradients(make_model(name, "eager").double())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_kernels_run_in_eval_mode_and_have_gradients(name, compiled) -> None:
    """Grad mode is on, as in `model.eval(); model(ids)`. A backward pass may or may not follow."""
    torch.compiler.reset()
    implementation = register(*OURS, name="ours")
    kernels = registration(implementation).kernels
    kernels.clear()
    model = make_model(name, implementation)
    if compiled:
        model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    got = compute_gradients(model)
    assert kernels
    expected = compute_exact_gradients(name)
    eager_gradients = compute_gradients(make_model(name, "eager"))
    assert got.keys() == expected.keys() == eager_gradients.keys()
    for parameter, exact in expected.items():
        error = (got[parameter].double() - exact).norm()
        # As in `mk demo`, the bound is twice the error of transformers' experts plus one rounding.
        bound = 2 * (eager_gradients[parameter].double() - exact).norm()
        assert error <= bound + torch.finfo(torch.float32).eps * exact.norm(), parameter


def test_frozen_parameters_get_no_gradients() -> None:
    """The other parameters get the same gradients as in a model without frozen parameters."""
    implementation = register(*OURS, name="ours")
    all_gradients = compute_gradients(make_model("gpt_oss", implementation))
    model = make_model("gpt_oss", implementation)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith(("gate_up_proj", "down_proj_bias")))
    trained_gradients = compute_gradients(model)
    assert trained_gradients.keys() == {
        n for n in all_gradients if n.endswith(("gate_up_proj", "down_proj_bias"))
    }
    assert all(
        torch.equal(gradient, all_gradients[name]) for name, gradient in trained_gradients.items()
    )


def test_kernels_run_if_no_gradients_are_needed() -> None:
    """Kernels run also in grad mode, but not in a forward pass that a checkpoint will recompute."""
    name = register(*OURS, name="ours")
    model = make_model("mixtral", name).requires_grad_(False)
    ids = torch.arange(8, device=DEVICE)[None]
    registration(name).kernels.clear()
    model(input_ids=ids)
    assert registration(name).kernels
    registration(name).kernels.clear()
    with torch.no_grad():
        model.train()(input_ids=ids)
    assert not registration(name).kernels


def test_weights_computed_from_leaves_get_gradients() -> None:
    """An adapter computes weights from leaves that are not in `parameters()`."""
    gradients_by_implementation = []
    for implementation in (register(*OURS), "grouped_mm"):
        model = copy.deepcopy(make_model("mixtral", implementation)).requires_grad_(False)
        experts = model.model.layers[1].mlp.experts
        scale = torch.ones(1, device=DEVICE, requires_grad=True)
        weight = experts._parameters.pop("down_proj")
        experts.__dict__["down_proj"] = weight * scale
        ids = torch.arange(8, device=DEVICE)[None]
        model(input_ids=ids).logits.square().mean().backward()
        gradients_by_implementation.append({"scale": scale.grad})
    assert_equal_gradients(*gradients_by_implementation)


def test_compiled_training_steps_are_one_graph() -> None:
    torch.compiler.reset()
    model = make_model("mixtral", register(*OURS)).train()
    ids = torch.arange(8, device=DEVICE)[None]
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(input_ids=ids).logits.square().mean().backward()
    got = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.set_experts_implementation("grouped_mm")
    model(input_ids=ids).logits.square().mean().backward()
    assert_equal_gradients(got, {name: p.grad for name, p in model.named_parameters()})


def test_gradients_are_refused_on_request() -> None:
    name = register(*OURS, name="forward_only", gradients="refuse")
    model, ids = make_model("mixtral", name), torch.arange(8, device=DEVICE)[None]
    with pytest.raises(UnsupportedError, match="gradients"):
        model(input_ids=ids)
    with torch.no_grad():
        model.train()(input_ids=ids)
    assert registration(name).kernels
    with pytest.raises(ConfigurationError, match="gradients"):
        register(*OURS, gradients="forget")
    invalid_values = (torch.zeros(2), {}, 3)
    for value in invalid_values:
        for argument in ("prepare_finalize", "experts", "name", "gradients"):
            with pytest.raises(ConfigurationError):
                register(**{argument: value})  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="experts implementation"):
            registration(value)  # type: ignore[arg-type]
