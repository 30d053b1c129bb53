"""nvfp4_w4a4, nvfp4 weights with 4-bit activations: the scales of x and h per expert, in the
rounded reference and in the torch parts.
"""

from dataclasses import replace

import pytest
import torch

from modular_kernel import ExpertWeights, Problem, Routing, make_kernel, reference
from modular_kernel.catalog import check, this_machine
from modular_kernel.errors import ConfigurationError, DtypeError, ShapeError, WeightsError
from modular_kernel.quant import nvfp4
from modular_kernel.quant.quantized_weights import (
    check_weights_quantized,
    quantize_weights,
    static_scale,
    weight_specs,
)
from modular_kernel.reference.nvfp4 import round_to_nvfp4
from modular_kernel.spec.problem import Parallel
from modular_kernel.spec.quantization import QuantScheme

BASE = Problem(12, 64, 96, 4, 2, "bfloat16", "nvfp4_w4a4")
PAIRS = (
    ("MoEPrepareAndFinalizeNoEP", "TorchExperts"),
    ("BatchedPrepareAndFinalize", "NaiveBatchedExperts"),
)
CPU = torch.device("cpu")


def make_layer(problem: Problem, seed: int = 0) -> tuple[torch.Tensor, ExpertWeights, Routing]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    e, h, i = problem.e, problem.hidden, problem.intermediate
    weights = ExpertWeights(
        normal(e, problem.w1_rows, h) / h**0.5,
        2 * normal(e, h, i) / i**0.5,
        a1_scale=static_scale(problem, 5.0),
        a2_scale=static_scale(problem, 9.0),
    )
    ids = torch.randint(0, problem.experts, (problem.tokens, problem.top_k), generator=generator)
    routing = Routing(torch.rand(ids.shape, generator=generator) + 0.5, ids.int())
    return normal(problem.tokens, h).to(problem.dtype), quantize_weights(weights, problem), routing


def call_kernel(pair: tuple[str, str], problem: Problem, *call: object) -> torch.Tensor:
    return make_kernel(*pair, problem, machine=this_machine(device="cpu"))(*call)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------ the scheme


def test_the_name_determines_all_options() -> None:
    scheme = QuantScheme.parse("nvfp4_w4a4")
    assert str(scheme) == "nvfp4_w4a4"
    assert scheme.static
    assert scheme.scales_by_expert
    assert not scheme.dispatched_quantized
    assert scheme.activation_granularity == "group"
    for name in ("nvfp4_w4a4:static=false", "nvfp4_w4a4:group=32", "nvfp4_w4a16:static=true"):
        with pytest.raises(ConfigurationError):
            QuantScheme.parse(name)


def test_weight_specs_have_one_activation_scale_per_expert() -> None:
    specs, weight_only_specs = weight_specs(BASE), weight_specs(replace(BASE, quant="nvfp4_w4a16"))
    assert set(specs) - set(weight_only_specs) == {"a1_scale", "a2_scale"}
    assert specs["a1_scale"].shape == specs["a2_scale"].shape == (4,)
    local_problem = replace(BASE, local_experts=3, expert_map=True)
    assert weight_specs(local_problem)["a1_scale"].shape == (3,)


@pytest.mark.parametrize(
    ("scale", "error"),
    [
        (None, WeightsError),
        (torch.ones(1), ShapeError),
        (torch.ones(4, 1), ShapeError),
        (torch.ones(4).half(), DtypeError),
    ],
)
def test_scales_that_are_not_per_expert_are_refused(
    scale: torch.Tensor | None, error: type[Exception]
) -> None:
    _, weights, _ = make_layer(BASE)
    with pytest.raises(error, match="a2_scale"):
        check_weights_quantized(replace(weights, a2_scale=scale), BASE, CPU)


@pytest.mark.parametrize("value", [0.0, -0.01, torch.nan, torch.inf, 1e-40])
@pytest.mark.parametrize("name", ["a1_scale", "a2_scale"])
def test_a_checked_call_refuses_invalid_scales(name: str, value: float) -> None:
    x, weights, routing = make_layer(BASE)
    checked_kernel = make_kernel(*PAIRS[0], BASE, machine=this_machine(device="cpu"), checked=True)
    checked_kernel(x, weights, routing)
    changed_scale = getattr(weights, name).clone()
    changed_scale[2] = value
    with pytest.raises(WeightsError, match=rf"{name}: got .* with finite inverses"):
        checked_kernel(x, replace(weights, **{name: changed_scale}), routing)


def test_activations_are_dispatched_unquantized() -> None:
    for name in ("AllGatherReduceScatter", "TorchAll2All", "TorchAll2AllBatched"):
        experts = "NaiveBatchedExperts" if "Batched" in name else "TorchExperts"
        problem = replace(BASE, parallel=Parallel(2))
        verdict = check(f"{name}PrepareAndFinalize", experts, problem, this_machine(device="cpu"))
        assert verdict.ok, str(verdict)


# ----------------------------------------------------------------------------------- the values


@pytest.mark.parametrize("depth", [64, 72, 7])
def test_the_reference_equals_the_quantizer(depth: int) -> None:
    """The two implementations are independent. They agree bit for bit with reciprocals, and up to
    ties with divisions.
    """
    generator = torch.Generator().manual_seed(depth)
    rows = torch.randn(300, depth, generator=generator).bfloat16().float()
    rows *= torch.exp2(torch.randint(-9, 9, (300, 1), generator=generator).float())
    rows[0], rows[1, :3] = 0, 1e5
    scale_e = torch.tensor([0.013, 0.4, 1.0])
    experts = torch.arange(300) % 3
    scale_of_rows = scale_e[experts][:, None]
    expected = nvfp4.dequantize(*nvfp4.quantize(rows, 1 / scale_of_rows), scale_of_rows)
    assert torch.equal(round_to_nvfp4(rows, experts, scale_e, reciprocal=True), expected)
    rounded_by_division = round_to_nvfp4(rows, experts, scale_e, reciprocal=False)
    assert (
        float(torch.isclose(rounded_by_division, expected, rtol=1e-6, atol=0).float().mean()) > 0.99
    )


def test_nan_stays_nan() -> None:
    rows = torch.full((2, 32), 6.0)
    rows[1, 20] = torch.nan
    rounded = round_to_nvfp4(rows, torch.tensor([0, 0]), torch.ones(1), reciprocal=False)
    assert rounded[1, 16:].isnan().all()
    assert torch.equal(rounded[1, :16], rows[1, :16])
    assert torch.equal(rounded[0], rows[0])


@pytest.mark.parametrize("name", ["a1_scale", "a2_scale"])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[1])
def test_the_scale_of_an_expert_applies_only_to_its_tokens(
    pair: tuple[str, str], name: str
) -> None:
    x, weights, routing = make_layer(BASE)
    changed_scale = getattr(weights, name).clone()
    changed_scale[2] /= 64  # Values saturate.
    uses_expert = (routing.topk_ids_TK == 2).any(1)
    assert uses_expert.any()
    assert not uses_expert.all()
    changed_weights = replace(weights, **{name: changed_scale})
    for compute in (
        lambda w: call_kernel(pair, BASE, x, w, routing).double(),
        lambda w: reference.rounded_reference(x, w, routing, BASE),
    ):
        before, after = compute(weights), compute(changed_weights)
        assert torch.equal(before[~uses_expert], after[~uses_expert])
        assert (
            (before - after)[uses_expert].norm(dim=1) > 0.2 * before[uses_expert].norm(dim=1)
        ).all()


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[1])
def test_x_and_h_are_both_rounded(pair: tuple[str, str]) -> None:
    """Rounding to 4 bits changes the output by several percent."""
    problem = replace(BASE, activation="relu2", top_k=1)
    x, weights, routing = make_layer(problem)
    exact = reference.float64_reference(x, weights, routing, problem)
    out = call_kernel(pair, problem, x, weights, routing).double()
    relative_error = (out - exact).norm() / exact.norm()
    assert 0.03 < float(relative_error) < 0.3
    weight_only_problem = replace(problem, quant="nvfp4_w4a16")
    weights = replace(weights, a1_scale=None, a2_scale=None)
    out = call_kernel(pair, weight_only_problem, x, weights, routing).double()
    assert float((out - exact).norm() / exact.norm()) < 0.01
