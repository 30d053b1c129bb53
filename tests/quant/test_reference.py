"""The references, compared with values computed by hand and with a loop over single values."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from modular_kernel import reference
from modular_kernel.quant.quantized_weights import dequantize
from modular_kernel.spec.problem import ActivationSpec, Combine, Problem
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.testing.cases.inputs import Inputs, make_inputs
from modular_kernel.testing.cases.lists import BASE, list_axis_variants

CPU = torch.device("cpu")
SMALL = replace(BASE, tokens=5, hidden=6, intermediate=4)

# Points (gate, up), and the values of each activation at these points, computed with the math
# library.
POINTS = ((1.0, 2.0), (-3.0, 0.5), (9.0, -9.0))
VALUES = {
    "silu": (1.4621171572600098, -0.07113880976635018, -80.99000503934512),
    "gelu": (1.6826894921370859, -0.002024847047445155, -81.0),
    "gelu_tanh": (1.6823839812165535, -0.0018186960408864972, -81.0),
    "swiglu_oai:limit=7": (2.537387297798464, -0.027106964561678954, -41.99971876981991),
    "swiglu_clamp_before:limit=7": (
        1.4621171572600098,
        -0.07113880976635018,
        -48.95535849147437,
    ),
    "swiglu_clamp_after:limit=7": (1.4621171572600098, -0.07113880976635018, -49.0),
    "swiglu_clamp_before:limit=0.5": (
        0.15561483280046365,
        -0.07113880976635018,
        -0.15561483280046365,
    ),
    "swiglu_clamp_after:limit=0.5": (0.25, -0.07113880976635018, -0.25),
}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("activation_name", VALUES)
def test_activations_equal_values_computed_by_hand(activation_name: str, interleaved: bool) -> None:
    spec = replace(ActivationSpec.parse(activation_name), interleaved=interleaved)
    points = torch.tensor(POINTS, dtype=torch.float64)
    # One row with all three points: first gates and then ups, or interleaved.
    row = points.flatten() if interleaved else points.T.flatten()
    actual = reference.activation(row[None], spec)
    torch.testing.assert_close(
        actual[0], torch.tensor(VALUES[activation_name], dtype=torch.float64), rtol=1e-13, atol=0
    )


def test_relu2_equals_values_computed_by_hand() -> None:
    value = torch.tensor([[-3.0, 0.0, 0.5, 9.0]], dtype=torch.float64)
    assert reference.activation(value, ActivationSpec("relu2")).tolist() == [[0, 0, 0.25, 81]]


def make_small_layer(scale: float = 1.0) -> tuple[Problem, Inputs]:
    """Return one token with two values and two experts with I = 1, small enough to compute by
    hand.
    """
    problem = Problem(
        1, 2, 1, 2, 2, dtype=torch.float32, routed_scaling_factor=scale, activation="silu"
    )
    w1 = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [1.0, 0.0]]])
    w2 = torch.tensor([[[1.0], [2.0]], [[3.0], [-1.0]]])
    routing = Routing(torch.tensor([[0.25, 0.5]]), torch.tensor([[0, 1]]))
    return problem, Inputs(torch.tensor([[1.0, 2.0]]), ExpertWeights(w1, w2), routing)


def float64_reference(problem: Problem, inputs: Inputs) -> torch.Tensor:
    return reference.float64_reference(inputs.x_TH, inputs.weights, inputs.routing, problem)


def rounded_reference(problem: Problem, inputs: Inputs) -> torch.Tensor:
    return reference.rounded_reference(inputs.x_TH, inputs.weights, inputs.routing, problem)


def test_small_layer_equals_values_computed_by_hand() -> None:
    """Expert 0 gives silu(1) * 2 times (1, 2), and expert 1 gives silu(2) * 1 times (3, -1)."""
    h_0, h_1 = 1.4621171572600098, 1.7615941559557649
    rows = [[h_0, 2 * h_0], [3 * h_1, -h_1]]
    sums = [0.25 * a + 0.5 * b for a, b in zip(*rows, strict=True)]
    problem, inputs = make_small_layer(scale=2.0)
    unweighted = replace(problem, combine=Combine.TOPK_UNWEIGHTED)
    weighted = replace(problem, combine=Combine.TOPK_WEIGHTED)
    expected = torch.tensor(rows, dtype=torch.float64)
    torch.testing.assert_close(float64_reference(unweighted, inputs)[0], expected)
    torch.testing.assert_close(
        float64_reference(weighted, inputs)[0],
        expected * torch.tensor([[0.5], [1.0]], dtype=torch.float64),
    )
    torch.testing.assert_close(
        float64_reference(problem, inputs)[0].tolist(), [2 * s for s in sums]
    )


def compute_activation(gate: float, up: float, spec: ActivationSpec) -> float:
    """Return one value of an activation, computed from the table in ActivationSpec."""
    sigmoid = lambda value: 1 / (1 + math.exp(-value))  # noqa: E731
    clip = lambda value: max(-limit, min(limit, value))  # noqa: E731
    limit, alpha = spec.limit or 0.0, spec.alpha or 0.0
    match spec.kind:
        case "silu":
            return gate * sigmoid(gate) * up
        case "gelu" | "gelu_tanh" if spec.limit:
            without_limit = ActivationSpec(spec.kind)
            return compute_activation(min(gate, limit), clip(up), without_limit)
        case "gelu":
            return gate * (1 + math.erf(gate / math.sqrt(2))) / 2 * up
        case "gelu_tanh":
            cubic = gate + 0.044715 * gate * gate * gate
            return gate * (1 + math.tanh(math.sqrt(2 / math.pi) * cubic)) / 2 * up
        case "situ":
            soft_clamped_up = limit * math.tanh(up / limit) if limit else up
            return alpha * math.tanh(gate / alpha) * sigmoid(gate) * soft_clamped_up
        case "silu_no_mul" | "gelu_no_mul" | "gelu_tanh_no_mul":
            return compute_activation(gate, 1.0, ActivationSpec(spec.kind.removesuffix("_no_mul")))
        case "swiglu_oai":
            clamped_gate = min(gate, limit)
            return clamped_gate * sigmoid(alpha * clamped_gate) * (clip(up) + 1)
        case "swiglu_clamp_after":
            return min(gate * sigmoid(gate), limit) * clip(up)
        case "swiglu_clamp_before":
            clamped_gate = min(gate, limit)
            return clamped_gate * sigmoid(clamped_gate) * clip(up)
    raise AssertionError(spec.kind)


def compute_pair_row(token: int, slot: int, problem: Problem, inputs: Inputs) -> list[float] | None:
    """Return the row of one pair (token, slot), computed value by value, or None if it is
    skipped.
    """
    weights, spec = inputs.weights, problem.act
    expert = int(inputs.routing.topk_ids_TK[token, slot])
    if not 0 <= expert < problem.experts:
        return None
    if weights.expert_map is not None:
        expert = int(weights.expert_map[expert])
    if not 0 <= expert < len(weights.w1):
        return None
    factor = 1.0
    if problem.apply_router_weight_on_input:
        factor = float(inputs.routing.topk_weights_TK[token, slot])
    x = [factor * value for value in inputs.x_TH[token].tolist()]
    w1, w2 = weights.w1[expert].tolist(), weights.w2[expert].tolist()
    b1 = [0.0] * len(w1) if weights.b1 is None else weights.b1[expert].tolist()
    b2 = [0.0] * len(w2) if weights.b2 is None else weights.b2[expert].tolist()
    gate_up = [
        b + sum(p * q for p, q in zip(row, x, strict=True)) for row, b in zip(w1, b1, strict=True)
    ]
    size = problem.intermediate
    if spec.kind == "relu2":
        h = [max(value, 0.0) ** 2 for value in gate_up]
    elif not spec.gated:
        h = [compute_activation(value, 1.0, spec) for value in gate_up]
    elif spec.interleaved:
        h = [compute_activation(gate_up[2 * i], gate_up[2 * i + 1], spec) for i in range(size)]
    else:
        h = [compute_activation(gate_up[i], gate_up[size + i], spec) for i in range(size)]
    return [
        b + sum(p * q for p, q in zip(row, h, strict=True)) for row, b in zip(w2, b2, strict=True)
    ]


def dequantize_inputs(problem: Problem, inputs: Inputs) -> Inputs:
    """Return the same inputs with weights dequantized to float32."""
    weights = inputs.weights
    if not problem.scheme.quantized:
        return inputs
    w1 = dequantize(
        weights.w1, assert_not_none(weights.w1_scale), weights.w1_zero_point, problem.scheme
    )
    w2 = dequantize(
        weights.w2, assert_not_none(weights.w2_scale), weights.w2_zero_point, problem.scheme
    )
    return replace(inputs, weights=replace(weights, w1=w1, w2=w2))


def assert_not_none(scale: torch.Tensor | None) -> torch.Tensor:
    assert scale is not None
    return scale


def compute_by_loop(problem: Problem, inputs: Inputs) -> torch.Tensor:
    """Return the layer's output, computed pair by pair in Python floats."""
    inputs = dequantize_inputs(problem, inputs)
    tokens, top_k = inputs.routing.topk_ids_TK.shape
    out = []
    for token in range(tokens):
        rows = []
        for slot in range(top_k):
            row = compute_pair_row(token, slot, problem, inputs)
            if row is None:  # the weight of a skipped pair may be NaN
                rows.append([0.0] * problem.hidden)
                continue
            weight = problem.routed_scaling_factor
            if not problem.apply_router_weight_on_input:
                weight *= float(inputs.routing.topk_weights_TK[token, slot])
            if problem.combine is Combine.TOPK_UNWEIGHTED:
                weight = 1.0
            rows.append([weight * value for value in row])
        sums = [sum(column) for column in zip(*rows, strict=True)]
        out.append(sums if problem.combine is Combine.SUM else rows)
    return torch.tensor(out, dtype=torch.float64).reshape(tokens, *problem.output_shape[1:])


def list_small_cases() -> list[tuple[Problem, str]]:
    """Return every variant of the matrix, with sizes that are feasible for Python loops."""
    size = {"tokens": 5, "hidden": 6, "intermediate": 4}
    # test_quant_reference and test_adapters cover quantized layers and LoRA adapters.
    unquantized_cases = [
        (p, r) for p, r in list_axis_variants(BASE) if not p.scheme.quantized and p.adapters is None
    ]
    cases = [(replace(p, **{**size, "tokens": min(p.tokens, 5)}), r) for p, r in unquantized_cases]
    return list(dict.fromkeys(cases))


@pytest.mark.parametrize(
    ("problem", "routing"), list_small_cases(), ids=[f"{p}-{r}" for p, r in list_small_cases()]
)
def test_the_float64_reference_equals_a_loop_over_pairs(problem: Problem, routing: str) -> None:
    # The loop reads quantized weights as float32 values, the float64 reference as float64 ones.
    rtol, atol = (1e-5, 1e-6) if problem.scheme.quantized else (1e-12, 1e-13)
    for strided in (False, True):
        inputs = make_inputs(problem, routing, CPU, strided=strided)
        exact, output_of_loop = float64_reference(problem, inputs), compute_by_loop(problem, inputs)
        torch.testing.assert_close(exact, output_of_loop, rtol=rtol, atol=atol)


def rounded_reference_error(problem: Problem) -> float:
    """Return the relative root mean square error of the rounded reference."""
    inputs = make_inputs(problem, "uniform", CPU)
    exact = float64_reference(problem, inputs)
    return float((rounded_reference(problem, inputs) - exact).norm() / exact.norm())


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [
        (torch.float32, 2e-8, 5e-7),
        (torch.float16, 2e-4, 8e-4),
        (torch.bfloat16, 1.5e-3, 6e-3),
    ],
)
def test_error_of_the_rounded_reference_depends_on_the_dtype(
    dtype: torch.dtype, low: float, high: float
) -> None:
    problem = replace(BASE, tokens=64, hidden=128, intermediate=128, dtype=dtype)
    assert low < rounded_reference_error(problem) < high


def test_error_of_the_tf32_rounded_reference_equals_10_mantissa_bits() -> None:
    """tf32 truncates, so every product is slightly too small and the total error is 2e-3."""
    problem = replace(BASE, tokens=64, hidden=128, intermediate=128, fp32_precision="tf32")
    assert 1e-3 < rounded_reference_error(problem) < 4e-3
    float16_problem = replace(problem, dtype=torch.float16)  # tf32 applies only to float32 operands
    inputs = make_inputs(float16_problem, "uniform", CPU)
    ieee = replace(float16_problem, fp32_precision="ieee")
    assert torch.equal(rounded_reference(float16_problem, inputs), rounded_reference(ieee, inputs))


def test_rounded_reference_rounds_to_the_dtype_at_the_end() -> None:
    problem = replace(BASE, dtype=torch.bfloat16)
    out = rounded_reference(problem, make_inputs(problem, "uniform", CPU))
    assert out.dtype == torch.float64
    assert torch.equal(out, out.bfloat16().double())


def test_skipped_rows_are_exactly_zero() -> None:
    inputs = make_inputs(SMALL, "all_skipped", CPU)
    assert not float64_reference(SMALL, inputs).any()
    assert not rounded_reference(SMALL, inputs).any()


def test_inputs_are_not_changed() -> None:
    inputs, original_inputs = (make_inputs(SMALL, "skips", CPU) for _ in range(2))
    float64_reference(SMALL, inputs)
    rounded_reference(SMALL, inputs)
    for name, tensor in inputs.tensors().items():
        original = original_inputs.tensors()[name]
        torch.testing.assert_close(tensor, original, rtol=0, atol=0, equal_nan=True)


class DivideAsOnGpu(TorchDispatchMode):
    """Divides by a number as torch does on a GPU: by multiplying with its reciprocal."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.div.Tensor and not isinstance(args[1], torch.Tensor):
            return args[0] * args[0].new_tensor(1 / args[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("quant", ["fp8_w8a8_block", "fp8_w8a8_channel"])
def test_the_rounded_reference_is_the_same_on_a_gpu(quant: str) -> None:
    """Scales that differ by an ulp round ties differently, and ties are frequent among bf16
    values.
    """
    problem = replace(BASE, tokens=32, hidden=256, dtype=torch.bfloat16, quant=quant)
    inputs = make_inputs(problem, "uniform", CPU)
    output_on_cpu = reference.rounded_reference(
        inputs.x_TH, inputs.weights, inputs.routing, problem
    )
    with DivideAsOnGpu():
        output_with_gpu_division = reference.rounded_reference(
            inputs.x_TH, inputs.weights, inputs.routing, problem
        )
    assert torch.equal(output_on_cpu, output_with_gpu_division)
