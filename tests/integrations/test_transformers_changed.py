"""Changes to an experts module between calls take effect in the next call, also in a graph.

Each change is made after a first call, eager or compiled. Afterwards the module computes what a new
module in the changed state would, or raises a typed error.
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
    """An experts module like that of most model families."""

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


def experts() -> torch.nn.Module:
    return Experts(SimpleNamespace(_experts_implementation=register(*OURS))).eval()


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(7, H, generator=generator)
    values, ids = torch.randn(7, E, generator=generator).topk(K)
    return x.to(DEVICE, dtype), ids.to(DEVICE), values.softmax(-1).to(DEVICE)


def clamped(self, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate) * up


def interleaved(self, gate_up: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(gate_up[..., ::2]) * gate_up[..., 1::2]


def unbound(gate_up: torch.Tensor) -> torch.Tensor:
    return clamped(None, gate_up)


def new(module: torch.nn.Module, name: str, change: Callable) -> None:
    setattr(module, name, torch.nn.Parameter(change(getattr(module, name).detach().clone())))


def data(module: torch.nn.Module, name: str, change: Callable) -> None:
    tensor = getattr(module, name)
    tensor.data = change(tensor.detach().clone())


def turned(module: torch.nn.Module) -> None:
    """Return the same values in transposed storage."""
    for name in ("gate_up_proj", "down_proj"):
        new(module, name, lambda tensor: tensor.transpose(1, 2).contiguous())
    module.is_transposed = True


def biased(module: torch.nn.Module) -> None:
    module.has_bias = True
    module.gate_up_proj_bias = torch.nn.Parameter(torch.ones(E, 2 * I, device=DEVICE))
    module.down_proj_bias = torch.nn.Parameter(torch.ones(E, H, device=DEVICE))


def narrower(module: torch.nn.Module) -> None:
    new(module, "gate_up_proj", lambda tensor: tensor[:, ::2])
    new(module, "down_proj", lambda tensor: tensor[:, :, ::2])


def exchange_class(module: torch.nn.Module) -> None:
    module.__class__ = type("Other", (Experts,), {"_apply_gate": interleaved})


CHANGES = {
    "a gate of its own": lambda m: setattr(m, "_apply_gate", types.MethodType(clamped, m)),
    "a gate that is a function": lambda m: setattr(m, "_apply_gate", unbound),
    "the class": exchange_class,
    "act_fn, a module": lambda m: setattr(m, "act_fn", torch.nn.GELU()),
    "act_fn, a function": lambda m: (
        m._modules.pop("act_fn") and setattr(m, "act_fn", torch.nn.functional.gelu)
    ),
    "another parameter": lambda m: new(m, "down_proj", lambda w: w * 2),
    "other data": lambda m: data(m, "gate_up_proj", lambda w: w * 2),
    "written in place": lambda m: m.down_proj.mul_(2),
    "written past autograd": lambda m: m.down_proj.data.mul_(2),
    "transposed": turned,
    "biases": biased,
    "another I": narrower,
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_takes_effect_in_the_next_call(change, compiled) -> None:
    torch.compiler.reset()
    module, given = experts(), inputs()
    run = torch.compile(module, backend="eager", fullgraph=True) if compiled else module
    with torch.no_grad():
        before = run(*given)
        CHANGES[change](module)
        after, want = run(*given), reference(module, given)
    assert after.shape == before.shape
    assert change == "transposed" or not torch.allclose(after, before, atol=1e-3)
    assert torch.allclose(after, want, atol=2e-6)


def reference(module, given) -> torch.Tensor:
    """Return what transformers' own products compute for the module in its current state."""
    own = copy.copy(module)
    own.config = SimpleNamespace(_experts_implementation="batched_mm")
    if "_apply_gate" in vars(module) and isinstance(module._apply_gate, types.MethodType):
        own._apply_gate = types.MethodType(module._apply_gate.__func__, own)
    return own(*given)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_module_can_change_its_dtype(compiled) -> None:
    torch.compiler.reset()
    module = experts()
    run = torch.compile(module, backend="eager", fullgraph=True) if compiled else module
    with torch.no_grad():
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float32):
            module.to(dtype)
            x, ids, scores = inputs(dtype)
            after = run(x, ids, scores)
            assert after.dtype is dtype
            exact = copy.deepcopy(module).double()
            want = reference(exact, (x.double(), ids, scores.double()))
            assert (after.double() - want).norm() / want.norm() <= 1e-2


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_can_be_enabled_and_disabled(compiled) -> None:
    if compiled and torch.__version__ < "2.12":
        pytest.xfail(
            "torch 2.11 keeps a graph, of a Linear too, if requires_grad of a weight changes"
        )
    torch.compiler.reset()
    module, (x, ids, scores) = experts().requires_grad_(False), inputs()
    run = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
    for asked in (False, True, False):
        module.down_proj.requires_grad_(asked)
        module.down_proj.grad = None
        out = run(x, ids, scores)
        assert out.requires_grad is asked
        if asked:
            out.sum().backward()
            want = copy.deepcopy(module)
            reference(want, (x, ids, scores)).sum().backward()
            assert torch.allclose(module.down_proj.grad, want.down_proj.grad, atol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
def test_another_implementation_or_pairing_is_the_one_that_runs(compiled) -> None:
    torch.compiler.reset()
    module, given = experts(), inputs()
    name = register("MoEPrepareAndFinalizeNoEP", "TorchExperts", name="changed")
    module.config._experts_implementation = name
    run = torch.compile(module, backend="eager") if compiled else module
    with torch.no_grad():
        first = run(*given)
        kernels = registration(name).kernels
        assert len(kernels) == 1
        register("MoEPrepareAndFinalizeNoEP", "NaiveBatchedExperts", name="changed")
        with pytest.raises(IncompatibleError, match="NaiveBatchedExperts"):
            run(*given)
        module.config._experts_implementation = "batched_mm"
        assert torch.allclose(run(*given), first, atol=2e-6)
        assert len(registration(name).kernels) == 0


def flag(name: str, value: object) -> Callable:
    return lambda module: setattr(module, name, value)


# What is done -> the error that names it.
CONTRADICTIONS = {
    "is_transposed alone": (flag("is_transposed", True), "gate_up_proj"),
    "num_experts": (flag("num_experts", E + 1), "num_experts 6 and weights of 5"),
    "has_bias alone": (flag("has_bias", True), "gate_up_proj_bias"),
    "has_gate alone": (flag("has_gate", False), "up_proj"),
    "a norm": (flag("has_post_expert_norm", True), "a norm after each expert"),
    "one dtype of two": (lambda m: new(m, "down_proj", lambda w: w.bfloat16()), "w2"),
    "on no device": (lambda m: m.to("meta"), "meta"),
    "a matrix less": (lambda m: new(m, "down_proj", lambda w: w[:-1]), "w2"),
    "no gate of ours": (flag("act_fn", torch.nn.Tanh()), "computes another function"),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("change", CONTRADICTIONS)
def test_an_inconsistent_change_is_an_error(change, compiled) -> None:
    torch.compiler.reset()
    module, given = experts(), inputs()
    run = torch.compile(module, backend="eager") if compiled else module
    act, match = CONTRADICTIONS[change]
    with torch.no_grad():
        run(*given)
        act(module)
        with pytest.raises(InputError, match=match):
            run(*given)
