"""Each kind of experts module has the same output as in transformers, or is refused by name."""

import copy
import gc
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from transformers_samples import CONTIGUOUS, DEVICE, NO_EP, skip_if_refused

import modular_kernel as mk
from modular_kernel.errors import ConfigurationError, DtypeError, UnknownPartError, UnsupportedError

if find_spec("transformers") is None:
    pytest.skip("the extra is not installed", allow_module_level=True)

from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation
from transformers_samples import OURS

from modular_kernel.cli.demo_models import SMALL_MODELS
from modular_kernel.integrations.transformers import (
    activation_of,
    register,
    registration,
    weights_of,
)

MODELS = tuple(SMALL_MODELS)


# ------------------------------------------------------------------------------ experts modules

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 5, 32, 24, 3


def default_gate(self, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return self.act_fn(gate) * up


def oai_gate(self, gate_up):
    gate, up = gate_up[..., ::2].clamp(max=self.limit), gate_up[..., 1::2]
    return (up.clamp(-self.limit, self.limit) + 1) * gate * torch.sigmoid(gate * self.alpha)


def oai_gate_in_halves(self, gate_up):
    return oai_gate(self, torch.stack(gate_up.chunk(2, dim=-1), dim=-1).flatten(-2))


def clamp_before_gate(self, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    limit = self.swiglu_limit
    return self.act_fn(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def clamp_after_gate(self, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return self.act_fn(gate).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)


def float32_gate(self, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return (self.act_fn(gate.float()) * up.float()).to(gate.dtype)


def softcapped_gate(self, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    gate_cap, up_cap = self.gate_softcap, self.up_softcap
    return (
        torch.tanh(gate / gate_cap) * gate_cap * gate.sigmoid() * torch.tanh(up / up_cap) * up_cap
    )


def situ_gate(self, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return self.beta * torch.tanh(gate / self.beta) * gate.sigmoid() * up


def per_channel_gate(self, gate_up):
    scale = torch.ones(gate_up.shape[-1] // 2, device=gate_up.device)
    scale[-1] = 1.5
    return default_gate(self, gate_up) * scale


def crashing_gate(self, gate_up):
    return gate_up @ gate_up


def make_module(
    act="silu", gate=default_gate, *, gated=True, bias=False, transposed=False, **attributes
) -> torch.nn.Module:
    """Return an experts module with random weights, defined as in a model of transformers."""
    generator = torch.Generator().manual_seed(0)

    def make_weight(*shape: int) -> torch.nn.Parameter:
        fan_in = shape[-1]
        if transposed and len(shape) == 3:
            shape = (shape[0], shape[2], shape[1])
        values = torch.randn(shape, generator=generator) * 2 * fan_in**-0.5
        return torch.nn.Parameter(values.to(DEVICE))

    class SmallExperts(torch.nn.Module):
        def __init__(self, config) -> None:
            super().__init__()
            self.num_experts = EXPERTS
            w1_name, projections = ("gate_up_proj", 2) if gated else ("up_proj", 1)
            w1_rows = projections * INTERMEDIATE
            setattr(self, w1_name, make_weight(EXPERTS, w1_rows, HIDDEN))
            self.down_proj = make_weight(EXPERTS, HIDDEN, INTERMEDIATE)
            if bias:
                setattr(self, f"{w1_name}_bias", make_weight(EXPERTS, w1_rows))
                self.down_proj_bias = make_weight(EXPERTS, HIDDEN)
            self.act_fn = ACT2FN[act]
            for name, value in attributes.items():
                setattr(self, name, value)

        _apply_gate = gate

        def forward(self, hidden_states, top_k_index, top_k_weights):
            raise AssertionError("not dispatched")

    flags = {"has_gate": gated, "has_bias": bias, "is_transposed": transposed}
    experts_class = use_experts_implementation(**flags)(SmallExperts)
    return experts_class(SimpleNamespace(_experts_implementation="batched_mm")).eval()


def make_inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=generator)
    scores, ids = torch.randn(tokens, EXPERTS, generator=generator).topk(TOP_K)
    return x.to(DEVICE), ids.to(DEVICE), scores.softmax(-1).to(DEVICE)


def call(module, name, x, ids, scores) -> torch.Tensor:
    module.config._experts_implementation = name
    with torch.no_grad():
        return module(x, ids, scores)


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    error = (got.double() - expected).square().mean().sqrt()
    assert error <= 1e-6 * expected.square().mean().sqrt()


def compute_exact(module, x, ids, scores) -> torch.Tensor:
    """Return the output of transformers' own batched implementation in float64."""
    return call(copy.deepcopy(module).double(), "batched_mm", x.double(), ids, scores.double())


OAI_OPTIONS = {"alpha": 1.702, "limit": 0.7}
# The expected activation and the options of the module, by case.
SUPPORTED_MODULES: "dict[str, tuple[str, dict[str, object]]]" = {
    "silu": ("silu", {}),
    "swish": ("silu", {"act": "swish"}),
    "gelu": ("gelu", {"act": "gelu"}),
    "gelu_python": ("gelu", {"act": "gelu_python"}),
    "gelu_new": ("gelu_tanh", {"act": "gelu_new"}),
    "gelu_pytorch_tanh": ("gelu_tanh", {"act": "gelu_pytorch_tanh"}),
    "float32_gate": ("silu", {"gate": float32_gate}),
    "transposed": ("silu", {"transposed": True}),
    "bias": ("silu", {"bias": True}),
    "oai": ("swiglu_oai", {"gate": oai_gate, "transposed": True, "bias": True, **OAI_OPTIONS}),
    "oai_in_halves": ("swiglu_oai", {"gate": oai_gate_in_halves, "bias": True, **OAI_OPTIONS}),
    "clamp_before": ("swiglu_clamp_before", {"gate": clamp_before_gate, "swiglu_limit": 0.5}),
    "clamp_after": ("swiglu_clamp_after", {"gate": clamp_after_gate, "limit": 0.5}),
    "gelu_clamped": ("gelu", {"gate": clamp_before_gate, "act": "gelu", "swiglu_limit": 0.5}),
    "gelu_tanh_clamped": (
        "gelu_tanh",
        {"gate": clamp_before_gate, "act": "gelu_pytorch_tanh", "swiglu_limit": 0.5},
    ),
    "softcapped": ("situ", {"gate": softcapped_gate, "gate_softcap": 1.5, "up_softcap": 0.8}),
    "situ": ("situ", {"gate": situ_gate, "beta": 1.5}),
    "ungated_silu": ("silu_no_mul", {"gated": False}),
    "ungated_gelu": ("gelu_no_mul", {"gated": False, "act": "gelu", "bias": True}),
    "ungated_gelu_tanh": ("gelu_tanh_no_mul", {"gated": False, "act": "gelu_new"}),
    "relu2": ("relu2", {"act": "relu2", "gated": False}),
    "relu2_bias": ("relu2", {"act": "relu2", "gated": False, "bias": True, "transposed": True}),
}


@pytest.mark.parametrize("pair", CONTIGUOUS, ids=" x ".join)
@pytest.mark.parametrize("case", SUPPORTED_MODULES)
def test_modules_equal_transformers(case, pair) -> None:
    skip_if_refused(pair)
    kind, options = SUPPORTED_MODULES[case]
    module, arguments = make_module(**options), make_inputs(19)
    spec = activation_of(module)
    assert (spec.kind, spec.interleaved) == (kind, case == "oai")
    assert_close(call(module, register(*pair), *arguments), compute_exact(module, *arguments))


def test_weights_are_views() -> None:
    module = make_module(transposed=True, bias=True)
    weights = weights_of(module)
    assert weights.w1.data_ptr() == module.gate_up_proj.data_ptr()
    assert weights.w2.data_ptr() == module.down_proj.data_ptr()
    assert weights.w1.shape == (EXPERTS, 2 * INTERMEDIATE, HIDDEN)


def test_ids_of_other_ranks_are_skipped() -> None:
    module, name = make_module(), register(NO_EP, "TorchExperts", name="sharded")
    module._is_expert_parallel = True
    x, ids, scores = make_inputs(9)
    global_ids = torch.where(ids < 2, EXPERTS, ids)
    masked_scores = torch.where(ids < 2, 0, scores)
    assert_close(
        call(module, name, x, global_ids, masked_scores),
        compute_exact(module, x, ids, masked_scores),
    )
    assert [kernel.invalid_ids for kernel in list_kernels(name)] == [0]
    # The router weights of skipped pairs have no effect.
    output = call(module, name, x, global_ids, scores)
    assert_close(output, compute_exact(module, x, ids, masked_scores))


def test_inputs_may_be_strided_and_scores_of_another_dtype() -> None:
    module, name = make_module().to(torch.bfloat16), register(*OURS)
    x, ids, scores = make_inputs(12)
    x, scores = x.to(torch.bfloat16), scores.to(torch.bfloat16)
    strided = torch.stack([x, x], dim=1)[:, 0], ids.T.contiguous().T, scores.T.contiguous().T
    got = call(module, name, *strided)
    assert got.dtype is torch.bfloat16
    assert torch.equal(got, call(module, name, x, ids, scores))


def test_changed_limits_are_used() -> None:
    module = make_module(gate=clamp_before_gate, swiglu_limit=0.5)
    name, arguments = register(*OURS), make_inputs(8)
    call(module, name, *arguments)
    module.swiglu_limit = 0.1
    assert_close(call(module, name, *arguments), compute_exact(module, *arguments))


def test_changed_weights_are_used() -> None:
    module, name, arguments = make_module(transposed=True), register(*OURS), make_inputs(8)
    call(module, name, *arguments)
    with torch.no_grad():
        module.gate_up_proj.mul_(2)
    module.down_proj.data = module.down_proj.data.clone() * 3
    assert_close(call(module, name, *arguments), compute_exact(module, *arguments))


REFUSED_OPTIONS: "dict[str, dict[str, object]]" = {
    "quick_gelu": {"act": "quick_gelu"},
    "gelu_10": {"act": "gelu_10"},
    "relu": {"act": "relu"},
    "ungated_relu": {"gated": False, "act": "relu"},
    "limit_of_each_expert": {"gate": clamp_before_gate, "swiglu_limit": torch.ones(EXPERTS, 1)},
    "per_channel_gate": {"gate": per_channel_gate},
    "crashing_gate": {"gate": crashing_gate},
    "unlabelled_limit": {"gate": lambda self, v: default_gate(self, v).clamp(max=3.0)},
    "fewer_experts": {"num_experts": EXPERTS - 1},
}


@pytest.mark.parametrize("case", REFUSED_OPTIONS)
def test_modules_with_another_computation_are_refused(case) -> None:
    with pytest.raises(UnsupportedError, match="SmallExperts"):
        call(make_module(**REFUSED_OPTIONS[case]), register(*OURS), *make_inputs(4))


def test_norms_and_quantized_weights_are_refused() -> None:
    class QuantizedTensor(torch.Tensor):
        pass

    normed, packed, mixed = make_module(), make_module(), make_module()
    normed.has_post_expert_norm = True
    packed.gate_up_proj = torch.nn.Parameter(
        packed.gate_up_proj.detach().as_subclass(QuantizedTensor)
    )
    for module in (normed, packed):
        with pytest.raises(UnsupportedError, match="SmallExperts"):
            call(module, register(*OURS), *make_inputs(4))
    with pytest.raises(DtypeError):
        call(mixed.to(torch.bfloat16), register(*OURS), *make_inputs(4))


# ------------------------------------------------------------------------------- registration


def list_kernels(name: str) -> list[mk.FusedMoEModularKernel]:
    return list(registration(name).kernels.values())


def test_the_device_determines_the_default_pairing() -> None:
    name = register(*OURS)
    assert name == "modular_kernel"
    call(make_module(), name, *make_inputs(4))
    experts = "TritonExperts" if DEVICE == "cuda" else "TorchExperts"
    assert [kernel.pairing for kernel in list_kernels(name)] == [f"{NO_EP} x {experts}"]


def test_capacity_grows_by_powers_of_two_and_layers_share_kernels() -> None:
    name = register(NO_EP, "TorchExperts", name="grown")
    modules = make_module(), make_module()
    for tokens in (1, 16, 17, 100, 3, 0):
        for module in modules:
            assert call(module, name, *make_inputs(tokens)).shape == (tokens, HIDDEN)
    assert sorted(kernel.problem.tokens for kernel in list_kernels(name)) == [16, 32, 128]


def test_cached_data_of_a_module_is_freed_with_it() -> None:
    name = register(NO_EP, "TorchExperts", name="kept")
    module = make_module()
    call(copy.deepcopy(module), name, *make_inputs(2))
    call(module, name, *make_inputs(2))
    del module
    gc.collect()
    assert len(registration(name).layers) == 0


@pytest.mark.parametrize("name", ["eager", "grouped_mm", "batched_mm"])
def test_names_of_transformers_cannot_be_registered(name) -> None:
    with pytest.raises(ConfigurationError, match=name):
        register(*OURS, name=name)


def test_unknown_parts_are_refused_at_once() -> None:
    with pytest.raises(UnknownPartError, match="TorchExperts"):
        register(NO_EP, "TorchExpert", name="typo")
    assert "typo" not in ALL_EXPERTS_FUNCTIONS


def test_incompatible_pairings_are_refused_with_every_reason() -> None:
    name = register("BatchedPrepareAndFinalize", "TorchExperts", name="mismatch")
    with pytest.raises(mk.IncompatibleError) as caught:
        call(make_module(), name, *make_inputs(2))
    assert {"format", "reduce"} <= {rejection.rule for rejection in caught.value.rejections}


def test_error_without_transformers_names_the_extra() -> None:
    program = (
        "import sys; sys.modules['transformers'] = None\n"
        "import modular_kernel.integrations.transformers"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert result.returncode != 0
    assert "modular-kernel[transformers]" in result.stderr
