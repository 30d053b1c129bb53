"""FP8Experts of transformers run without copies of their weights, for every kind of scales."""

from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from transformers_samples import CONTIGUOUS as PAIRS
from transformers_samples import DEVICE

import modular_kernel as mk

if find_spec("transformers") is None:
    pytest.skip("the extra is not installed", allow_module_level=True)

from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
from transformers.integrations.moe import use_experts_implementation
from transformers_samples import OURS

from modular_kernel.errors import InputError, UnsupportedError
from modular_kernel.integrations.transformers import register, registration

E, H, I, K, B = 4, 64, 64, 2, 32  # noqa: E741
FP8 = torch.float8_e4m3fn
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])

# The intermediate size and the options of the module, by case.
CASES: "dict[str, tuple[int, dict[str, object]]]" = {
    "blocks": (I, {}),
    "ragged": (48, {}),
    "ragged_power_of_two": (48, {"scale_fmt": "ue8m0"}),
    "power_of_two": (I, {"scale_fmt": "ue8m0"}),
    "one_scale": (I, {"block_size": None}),
    "static": (I, {"block_size": None, "activation_scheme": "static"}),
    "ungated": (I, {"has_gate": False, "hidden_act": "relu2"}),
    "clamped": (I, {"swiglu_limit": 0.8}),
    "softcapped": (I, {"mlp_gate_softcap": 2.0, "mlp_up_softcap": 1.0}),
    "float4": (I, {"expert_dtype": "fp4", "scale_fmt": "ue8m0"}),
}
CONFIG_KEYS = ("hidden_act", "swiglu_limit", "mlp_gate_softcap", "mlp_up_softcap")


def make_module(case: str) -> torch.nn.Module:
    """Return a module as after loading, with separate scales for the gate and the up projection."""
    intermediate, options = CASES[case]
    config = SimpleNamespace(
        hidden_size=H, num_local_experts=E, intermediate_size=intermediate, hidden_act="silu",
        _experts_implementation="eager", **{k: v for k, v in options.items() if k in CONFIG_KEYS and
        k != "hidden_act"},
    )  # fmt: skip
    config.hidden_act = options.get("hidden_act", "silu")
    module_options = {
        "block_size": (B, B),
        **{k: v for k, v in options.items() if k not in CONFIG_KEYS},
    }
    has_gate = module_options.get("has_gate", True)
    experts_class = use_experts_implementation(
        type("FP8Experts", (FP8Experts,), {}),
        experts_interface=ALL_FP8_EXPERTS_FUNCTIONS,
        has_gate=has_gate,
    )
    module = experts_class(config, **module_options).requires_grad_(False).eval()
    generator = torch.Generator().manual_seed(0)
    for name, projections in (
        ("gate_up_proj" if has_gate else "up_proj", 1 + has_gate),
        ("down_proj", 1),
    ):
        weight = getattr(module, name)
        scale_name = f"{name}_scale_inv"
        scale = getattr(module, scale_name)
        if weight.dtype is torch.int8:
            codes = torch.randint(-128, 128, weight.shape, generator=generator).to(torch.int8)
            setattr(module, name, make_parameter(codes))
            scale = torch.randn(scale.shape, generator=generator).exp2() / 20
        else:
            values = torch.randn(weight.shape, generator=generator) * 100
            setattr(module, name, make_parameter(values.to(FP8)))
            rows = weight.shape[1] // projections
            tiles = -(-rows // B) if module_options["block_size"] else 1
            shape = (E, projections * tiles, scale.shape[2])
            scale = torch.randn(shape, generator=generator).exp2() / 500
        dtype = getattr(module, scale_name).dtype
        setattr(module, scale_name, make_parameter(scale.to(dtype)))
    return module.to(DEVICE)


def make_parameter(value: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(value, requires_grad=False)


def dequantize(module: torch.nn.Module, name: str, projections: int) -> torch.Tensor:
    """Return dequantized weights (e, N, K) in float64, by the definition of the format."""
    weight = getattr(module, name)
    scale = getattr(module, f"{name}_scale_inv").float().double()
    if weight.dtype is torch.int8:
        byte = weight.view(torch.uint8).long()
        values = torch.stack([byte & 15, byte >> 4], -1).flatten(2)
        return E2M1.double().to(weight.device)[values] * scale.repeat_interleave(32, 2)
    e, rows, depth = weight.shape
    block_n, block_k = (B, B) if module.block_size else (rows, depth)
    n = rows // projections
    expanded_scales = []
    for projection_scale in scale.chunk(projections, 1):
        scale_of_row = projection_scale.repeat_interleave(block_n, 1)[:, :n]
        scale_of_value = scale_of_row.repeat_interleave(block_k, 2)[:, :, :depth]
        expanded_scales.append(scale_of_value.expand(e, n, depth))
    return weight.double() * torch.cat(expanded_scales, 1)


def make_inputs(tokens: int, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, H, generator=generator).to(DEVICE, dtype)
    values, ids = torch.randn(tokens, E, generator=generator).topk(K)
    return x, ids.to(DEVICE), values.softmax(-1).to(DEVICE)


def compute_exact(module, x, ids, scores) -> torch.Tensor:
    """Return the differentiable output of the layer in float64."""
    has_gate = module.has_gate
    w1 = dequantize(module, "gate_up_proj" if has_gate else "up_proj", 1 + has_gate)
    w2 = dequantize(module, "down_proj", 1)
    rows = torch.einsum("th,tkhn->tkn", x, w1[ids].transpose(2, 3)).flatten(0, 1)
    rows = module._apply_gate(rows) if has_gate else module.act_fn(rows)
    rows = torch.einsum("tki,tkhi->tkh", rows.view(*ids.shape, -1).double(), w2[ids])
    return (rows * scores[..., None]).sum(1)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


def get_bound(module: torch.nn.Module) -> float:
    return 1e-2 if module.down_proj.dtype is torch.int8 else 8e-2


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[1])
@pytest.mark.parametrize("case", CASES)
def test_modules_are_used_in_place(case, pair) -> None:
    problem = mk.Problem(tokens=16, hidden=H, intermediate=I, experts=E, top_k=K)
    if not mk.check(*pair, problem).ok:
        pytest.skip("the part does not run here")
    module, (x, ids, scores) = make_module(case), make_inputs(13)
    module.config._experts_implementation = register(*pair)
    with torch.no_grad():
        got = module(x, ids, scores)
        expected = compute_exact(module, x.double(), ids, scores.double())
        assert relative_error(got, expected) <= get_bound(module)
        # The bound detects scales of another expert.
        scale = module.down_proj_scale_inv
        scale.copy_(scale.float().flip(0).to(scale.dtype))
        assert relative_error(module(x, ids, scores), expected) > 2 * get_bound(module)


def test_replaced_gate_and_up_scales_are_used() -> None:
    module, (x, ids, scores) = make_module("ragged"), make_inputs(13)
    module.config._experts_implementation = register(*OURS)
    with torch.no_grad():
        expected = compute_exact(module, x.double(), ids, scores.double())
        scale = module.gate_up_proj_scale_inv
        scale.copy_(torch.cat(scale.chunk(2, 1)[::-1], 1))
        assert relative_error(module(x, ids, scores), expected) > 8e-2


def test_weights_are_not_copied() -> None:
    module = make_module("blocks")
    name = register(*OURS)
    module.config._experts_implementation = name
    module(*make_inputs(4))
    weights = registration(name).layers[module].bound.weights
    assert weights.w1.data_ptr() == module.gate_up_proj.data_ptr()
    assert weights.w2_scale.data_ptr() == module.down_proj_scale_inv.data_ptr()


@pytest.mark.parametrize("case", ["blocks", "ragged_power_of_two", "float4"])
def test_a_module_is_one_operator_of_a_graph(case) -> None:
    torch.compiler.reset()
    module, arguments = make_module(case), make_inputs(9)
    module.config._experts_implementation = register(*OURS)
    with torch.no_grad():
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(*arguments), module(*arguments))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("case", ["blocks", "ragged_power_of_two"])
def test_scales_changed_between_calls_are_used(case, compiled) -> None:
    """Replaced and written scales are used. A block size that contradicts the scales is refused."""
    torch.compiler.reset()
    module, arguments = make_module(case), make_inputs(9)
    module.config._experts_implementation = register(*OURS)
    run = torch.compile(module, backend="eager") if compiled else module
    x, ids, scores = arguments[0].double(), arguments[1], arguments[2].double()
    with torch.no_grad():
        before = run(*arguments)
        scale = module.down_proj_scale_inv
        module.down_proj_scale_inv = make_parameter(scale.float().flip(0).to(scale.dtype))
        after = run(*arguments)
        assert relative_error(after, before) > 0.1
        assert relative_error(after, compute_exact(module, x, ids, scores)) <= get_bound(module)
        module.down_proj_scale_inv.copy_(scale)
        assert torch.equal(run(*arguments), before)
        module.block_size = (2 * B, 2 * B)
        with pytest.raises(InputError, match="scale"):
            run(*arguments)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_gradients_of_inputs_and_router_weights(case, compiled) -> None:
    module, (x, ids, scores) = make_module(case), make_inputs(13, torch.float32)
    module.config._experts_implementation = register(*OURS)
    run = module
    if compiled:
        torch.compiler.reset()
        run = torch.compile(module, fullgraph=True, backend="aot_eager")
    arguments = x.requires_grad_(), scores.requires_grad_()
    weight = torch.randn(13, H, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    (run(x, ids, scores) * weight).sum().backward()
    x64, scores64 = (tensor.detach().double().requires_grad_() for tensor in arguments)
    (compute_exact(module, x64, ids, scores64) * weight).sum().backward()
    assert relative_error(arguments[0].grad, x64.grad) <= get_bound(module)
    assert relative_error(arguments[1].grad, scores64.grad) <= get_bound(module)


def test_unsupported_modules_are_refused_by_name() -> None:
    module = make_module("float4")
    module.down_proj_scale_inv = make_parameter(module.down_proj_scale_inv.float())
    module.gate_up_proj_scale_inv = make_parameter(module.gate_up_proj_scale_inv.float())
    module.config._experts_implementation = register(*OURS)
    with pytest.raises(UnsupportedError, match="float8_e8m0fnu"):
        module(*make_inputs(4))
    forward_only = register(*OURS, name="forward_only", gradients="refuse")
    module = make_module("blocks")
    module.config._experts_implementation = forward_only
    x, ids, scores = make_inputs(4)
    with pytest.raises(UnsupportedError, match="gradients"):
        module(x.requires_grad_(), ids, scores)
