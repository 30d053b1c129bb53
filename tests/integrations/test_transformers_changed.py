"""The call after a change of an experts module, eager or compiled, uses the changed module.

Each change is made after a first call. The next call returns the output of transformers' own
experts in the changed state, or raises a typed error.
"""

import copy
import types
from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

if find_spec("transformers") is None:
    pytest.skip("the extra is not installed", allow_module_level=True)

from transformers.integrations.moe import use_experts_implementation
from transformers_samples import DEVICE, OURS

from modular_kernel.errors import IncompatibleError, InputError
from modular_kernel.integrations.transformers import register, registration

E, H, I, K = 5, 32, 24, 2  # noqa: E741


@use_experts_implementation
class Experts(torch.nn.Module):
    """An experts module with the parameters and activation of most model families."""

    def __init__(self, config) -> None:
        super().__init__()
        self.num_experts, self.act_fn = E, torch.nn.SiLU()
        generator = torch.Generator().manual_seed(0)
        shapes = {"gate_up_proj": (E, 2 * I, H), "down_proj": (E, H, I)}
        for name, shape in shapes.items():
            values = torch.randn(shape, generator=generator) / 5
            setattr(self, name, torch.nn.Parameter(values.to(DEVICE)))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        raise AssertionError("not dispatched")


def make_experts() -> torch.nn.Module:
    return Experts(SimpleNamespace(_experts_implementation=register(*OURS))).eval()


def make_inputs(
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(7, H, generator=generator)
    values, ids = torch.randn(7, E, generator=generator).topk(K)
    return x.to(DEVICE, dtype), ids.to(DEVICE), values.softmax(-1).to(DEVICE)


def apply_gelu_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate) * up


def apply_interleaved_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(gate_up[..., ::2]) * gate_up[..., 1::2]


def apply_unbound_gelu_gate(gate_up: torch.Tensor) -> torch.Tensor:
    return apply_gelu_gate(None, gate_up)


def replace_parameter(module: torch.nn.Module, name: str, change: Callable) -> None:
    setattr(module, name, torch.nn.Parameter(change(getattr(module, name).detach().clone())))


def replace_data(module: torch.nn.Module, name: str, change: Callable) -> None:
    tensor = getattr(module, name)
    tensor.data = change(tensor.detach().clone())


def transpose_weights(module: torch.nn.Module) -> None:
    """Store the same values with the last two dimensions exchanged."""
    for name in ("gate_up_proj", "down_proj"):
        replace_parameter(module, name, lambda tensor: tensor.transpose(1, 2).contiguous())
    module.is_transposed = True


def add_biases(module: torch.nn.Module) -> None:
    module.has_bias = True
    module.gate_up_proj_bias = torch.nn.Parameter(torch.ones(E, 2 * I, device=DEVICE))
    module.down_proj_bias = torch.nn.Parameter(torch.ones(E, H, device=DEVICE))


def halve_intermediate_size(module: torch.nn.Module) -> None:
    replace_parameter(module, "gate_up_proj", lambda tensor: tensor[:, ::2])
    replace_parameter(module, "down_proj", lambda tensor: tensor[:, :, ::2])


def exchange_class(module: torch.nn.Module) -> None:
    module.__class__ = type("Other", (Experts,), {"_apply_gate": apply_interleaved_gate})


CHANGES = {
    "gate: a method": lambda m: setattr(m, "_apply_gate", types.MethodType(apply_gelu_gate, m)),
    "gate: a function": lambda m: setattr(m, "_apply_gate", apply_unbound_gelu_gate),
    "class": exchange_class,
    "act_fn: a module": lambda m: setattr(m, "act_fn", torch.nn.GELU()),
    "act_fn: a function": lambda m: (
        m._modules.pop("act_fn") and setattr(m, "act_fn", torch.nn.functional.gelu)
    ),
    "parameter replaced": lambda m: replace_parameter(m, "down_proj", lambda w: w * 2),
    "data replaced": lambda m: replace_data(m, "gate_up_proj", lambda w: w * 2),
    "weights written in place": lambda m: m.down_proj.mul_(2),
    "weights written through .data": lambda m: m.down_proj.data.mul_(2),
    "transposed": transpose_weights,
    "biases": add_biases,
    "intermediate size": halve_intermediate_size,
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_the_next_call_uses_the_changed_module(change, compiled) -> None:
    torch.compiler.reset()
    module, arguments = make_experts(), make_inputs()
    run = torch.compile(module, backend="eager", fullgraph=True) if compiled else module
    with torch.no_grad():
        before = run(*arguments)
        CHANGES[change](module)
        after, expected = run(*arguments), compute_reference(module, arguments)
    assert after.shape == before.shape
    assert change == "transposed" or not torch.allclose(after, before, atol=1e-3)
    assert torch.allclose(after, expected, atol=2e-6)


def compute_reference(module, arguments) -> torch.Tensor:
    """Return the output of transformers' own implementation for the current state of the module."""
    reference_module = copy.copy(module)
    reference_module.config = SimpleNamespace(_experts_implementation="batched_mm")
    if "_apply_gate" in vars(module) and isinstance(module._apply_gate, types.MethodType):
        reference_module._apply_gate = types.MethodType(
            module._apply_gate.__func__, reference_module
        )
    return reference_module(*arguments)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_module_can_change_its_dtype(compiled) -> None:
    torch.compiler.reset()
    module = make_experts()
    run = torch.compile(module, backend="eager", fullgraph=True) if compiled else module
    with torch.no_grad():
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float32):
            module.to(dtype)
            x, ids, scores = make_inputs(dtype)
            after = run(x, ids, scores)
            assert after.dtype is dtype
            float64_module = copy.deepcopy(module).double()
            expected = compute_reference(float64_module, (x.double(), ids, scores.double()))
            assert (after.double() - expected).norm() / expected.norm() <= 1e-2


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_can_be_enabled_and_disabled(compiled) -> None:
    if compiled and torch.__version__ < "2.12":
        pytest.xfail(
            "torch 2.11 keeps a graph, of a Linear too, if requires_grad of a weight changes"
        )
    torch.compiler.reset()
    module, (x, ids, scores) = make_experts().requires_grad_(False), make_inputs()
    run = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
    for requires_grad in (False, True, False):
        module.down_proj.requires_grad_(requires_grad)
        module.down_proj.grad = None
        out = run(x, ids, scores)
        assert out.requires_grad is requires_grad
        if requires_grad:
            out.sum().backward()
            reference_module = copy.deepcopy(module)
            compute_reference(reference_module, (x, ids, scores)).sum().backward()
            assert torch.allclose(module.down_proj.grad, reference_module.down_proj.grad, atol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
def test_changed_implementation_or_pairing_takes_effect(compiled) -> None:
    torch.compiler.reset()
    module, arguments = make_experts(), make_inputs()
    name = register("MoEPrepareAndFinalizeNoEP", "TorchExperts", name="changed")
    module.config._experts_implementation = name
    run = torch.compile(module, backend="eager") if compiled else module
    with torch.no_grad():
        first = run(*arguments)
        kernels = registration(name).kernels
        assert len(kernels) == 1
        register("MoEPrepareAndFinalizeNoEP", "NaiveBatchedExperts", name="changed")
        with pytest.raises(IncompatibleError, match="NaiveBatchedExperts"):
            run(*arguments)
        module.config._experts_implementation = "batched_mm"
        assert torch.allclose(run(*arguments), first, atol=2e-6)
        assert len(registration(name).kernels) == 0


def set_attribute(name: str, value: object) -> Callable:
    return lambda module: setattr(module, name, value)


# The change and the error message, by name.
CONTRADICTIONS = {
    "is_transposed without transposed weights": (
        set_attribute("is_transposed", True),
        "gate_up_proj",
    ),
    "num_experts": (set_attribute("num_experts", E + 1), "num_experts 6 and weights of 5"),
    "has_bias without biases": (set_attribute("has_bias", True), "gate_up_proj_bias"),
    "has_gate without ungated weights": (set_attribute("has_gate", False), "up_proj"),
    "a norm after each expert": (
        set_attribute("has_post_expert_norm", True),
        "a norm after each expert",
    ),
    "two dtypes": (lambda m: replace_parameter(m, "down_proj", lambda w: w.bfloat16()), "w2"),
    "on the meta device": (lambda m: m.to("meta"), "meta"),
    "a missing matrix": (lambda m: replace_parameter(m, "down_proj", lambda w: w[:-1]), "w2"),
    "an unsupported activation": (
        set_attribute("act_fn", torch.nn.Tanh()),
        "computes another function",
    ),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("change", CONTRADICTIONS)
def test_inconsistent_changes_are_refused(change, compiled) -> None:
    torch.compiler.reset()
    module, arguments = make_experts(), make_inputs()
    run = torch.compile(module, backend="eager") if compiled else module
    apply_change, match = CONTRADICTIONS[change]
    with torch.no_grad():
        run(*arguments)
        apply_change(module)
        with pytest.raises(InputError, match=match):
            run(*arguments)
