"""Generated inputs of a case are reproducible, scaled so that errors are visible, and surrounded by
guard values.
"""

from dataclasses import replace

import pytest
import torch

from modular_kernel import reference
from modular_kernel.errors import ConfigurationError
from modular_kernel.spec.problem import Combine, Problem
from modular_kernel.testing.cases.inputs import (
    LAYOUTS,
    ROUTING_KINDS,
    Inputs,
    InputVariation,
    choose_fill,
    count_invalid_ids,
    fenced,
    fences_intact,
    make_inputs,
)
from modular_kernel.testing.cases.lists import BASE, Case, command, list_axis_variants
from modular_kernel.testing.cases.value_kinds import (
    VALUES,
    assign_token_groups,
    find_unsupported_reason,
)
from modular_kernel.validate import check_input, check_routing, check_weights

CPU = torch.device("cpu")
VARIANTS = list_axis_variants(BASE)
ACTIVATIONS = tuple(dict.fromkeys(problem.act for problem, _ in VARIANTS))
MANY_TOKENS = replace(BASE, tokens=200, hidden=128, intermediate=256)


def make_cpu_inputs(problem: Problem, routing: str = "uniform", **options: object) -> Inputs:
    return make_inputs(problem, routing, CPU, **options)  # type: ignore[arg-type]


def make_ids(routing: str, problem: Problem = BASE) -> torch.Tensor:
    return make_cpu_inputs(problem, routing).routing.topk_ids_TK.long()


def compute_unweighted_rows(problem: Problem, inputs: Inputs) -> torch.Tensor:
    """Return the output of GEMM 2 for every pair (token, expert), without router weights."""
    unweighted = replace(problem, combine=Combine.TOPK_UNWEIGHTED)
    return reference.float64_reference(inputs.x_TH, inputs.weights, inputs.routing, unweighted)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(("problem", "routing"), VARIANTS, ids=[f"{p}-{r}" for p, r in VARIANTS])
def test_inputs_fit_their_problem(problem: Problem, routing: str, strided: bool) -> None:
    inputs = make_cpu_inputs(problem, routing, strided=strided)
    check_input(inputs.x_TH, problem, "cpu")
    check_weights(inputs.weights, inputs.x_TH, problem)
    check_routing(inputs.routing, inputs.x_TH, problem)
    slots = inputs.routing.slots_T
    used_slots = [] if slots is None else sorted(set(slots.tolist()) - {-1})
    ids = inputs.routing.topk_ids_TK
    used_pairs = (ids >= 0) & (ids < problem.experts)
    for name, tensor in inputs.tensors().items():
        values = tensor[used_slots] if name.startswith("lora_") else tensor
        if name == "topk_weights":  # weights of skipped pairs may have any value
            values = tensor[used_pairs]
        assert values.float().isfinite().all(), name


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_expert_rows_have_a_standard_deviation_of_about_one(activation: object) -> None:
    problem = replace(MANY_TOKENS, activation=activation)
    assert 0.8 < float(compute_unweighted_rows(problem, make_cpu_inputs(problem)).std()) < 1.25


@pytest.mark.parametrize("activation", [a for a in ACTIVATIONS if a.limit], ids=str)
def test_activation_limits_clamp_many_values(activation: object) -> None:
    problem = replace(MANY_TOKENS, activation=activation)
    inputs = make_cpu_inputs(problem)
    values = inputs.x_TH.double() @ inputs.weights.w1[0].double().T
    limit = problem.act.limit
    assert limit is not None
    assert 0.2 < float((values.abs() > limit).double().mean()) < 0.8


@pytest.mark.parametrize(("problem", "routing"), VARIANTS, ids=[f"{p}-{r}" for p, r in VARIANTS])
def test_outputs_are_neither_tiny_nor_huge(problem: Problem, routing: str) -> None:
    inputs = make_cpu_inputs(problem, routing)
    out = reference.float64_reference(inputs.x_TH, inputs.weights, inputs.routing, problem).flatten(
        0, -2
    )
    nonzero_rows = out[(out != 0).any(1)]
    if len(nonzero_rows) >= 10:
        assert 0.2 < float(nonzero_rows.std()) < 6


def test_biases_change_the_output() -> None:
    problem = replace(MANY_TOKENS, bias=True)
    inputs = make_cpu_inputs(problem)
    for name in ("b1", "b2"):
        zero = torch.zeros_like(getattr(inputs.weights, name))
        weights = replace(inputs.weights, **{name: zero})
        without_bias = compute_unweighted_rows(problem, replace(inputs, weights=weights))
        assert (
            without_bias - compute_unweighted_rows(problem, inputs)
        ).norm() > 0.1 * without_bias.norm()


@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_router_weights_are_positive_and_unequal(top_k: int, on_input: bool) -> None:
    problem = replace(MANY_TOKENS, top_k=top_k, experts=9, apply_router_weight_on_input=on_input)
    weights = make_cpu_inputs(problem).routing.topk_weights_TK
    assert weights.dtype == torch.float32
    assert bool((weights > 0).all())
    assert float((weights - 1).abs().median()) > 0.15
    assert float(weights.std()) > 0.3 * float(weights.mean())
    if top_k > 1:
        assert float((weights.amax(1) / weights.amin(1)).median()) > 1.3


def test_inputs_are_equal_only_for_equal_arguments() -> None:
    problem = replace(BASE, bias=True, expert_map=True)
    first, second, other_seed = (
        make_cpu_inputs(problem),
        make_cpu_inputs(problem),
        make_cpu_inputs(problem, seed=1),
    )
    for name, tensor in first.tensors().items():
        assert torch.equal(tensor, second.tensors()[name])
        assert not torch.equal(tensor, other_seed.tensors()[name])
        assert tensor.data_ptr() != second.tensors()[name].data_ptr()


def test_strided_inputs_have_an_equivalent_expert_map() -> None:
    """Map entries outside the rows of the weights are replaced by other values that also mean
    "skip".
    """
    problem = replace(BASE, experts=17, top_k=5, local_experts=3, expert_map=True)
    contiguous, strided = make_cpu_inputs(problem), make_cpu_inputs(problem, strided=True)
    original_map, replaced_map = contiguous.weights.expert_map, strided.weights.expert_map
    assert original_map is not None
    assert replaced_map is not None
    is_local = original_map >= 0
    assert torch.equal(original_map[is_local], replaced_map[is_local])
    skip_values = set(replaced_map[~is_local].tolist())
    assert not skip_values & {0, 1, 2}
    assert {3, -1, 10, -2, 2**31 - 1, -(2**31)} == skip_values
    weights = replace(contiguous.weights, expert_map=replaced_map)
    outputs = [
        reference.float64_reference(contiguous.x_TH, weights_with_map, contiguous.routing, problem)
        for weights_with_map in (contiguous.weights, weights)
    ]
    assert torch.equal(*outputs)
    assert bool((outputs[0] != 0).any())


def test_strided_inputs_are_views_of_the_same_values() -> None:
    problem = replace(BASE, bias=True)
    contiguous, strided = make_cpu_inputs(problem), make_cpu_inputs(problem, strided=True)
    for name in ("x", "topk_weights", "topk_ids"):
        assert torch.equal(contiguous.tensors()[name].double(), strided.tensors()[name].double())
    assert strided.x_TH.stride() == (problem.hidden + 16, 1)
    assert strided.weights.w1.mT.is_contiguous()
    assert strided.weights.w2.mT.is_contiguous()
    assert strided.routing.topk_ids_TK.dtype == torch.int64
    assert contiguous.routing.topk_ids_TK.dtype == torch.int32


def test_uniform_experts_are_distinct_and_all_used() -> None:
    ids = make_ids("uniform", MANY_TOKENS)
    assert bool((ids[:, 0] != ids[:, 1]).all())
    assert set(ids.flatten().tolist()) == set(range(BASE.experts))


def test_experts_repeat_if_top_k_exceeds_their_number() -> None:
    ids = make_ids("uniform", replace(BASE, top_k=8))
    assert all(set(row) == set(range(BASE.experts)) for row in ids.tolist())


def test_all_to_one_routes_every_token_to_the_same_experts() -> None:
    ids = make_ids("all_to_one")
    assert len(ids.unique(dim=0)) == 1
    assert len(set(ids[0].tolist())) == BASE.top_k


def test_all_to_one_selects_a_local_expert() -> None:
    inputs = make_cpu_inputs(replace(BASE, expert_map=True, local_experts=1), "all_to_one")
    assert inputs.weights.expert_map is not None
    assert int(inputs.weights.expert_map[inputs.routing.topk_ids_TK[0, 0].long()]) == 0


def test_zipf_is_skewed() -> None:
    counts = (
        make_ids("zipf", replace(MANY_TOKENS, top_k=1, experts=16)).flatten().bincount(minlength=16)
    )
    assert counts[0] > 4 * counts[8:].double().mean()


def test_empty_experts_have_no_pairs() -> None:
    assert set(make_ids("empty_experts", MANY_TOKENS).flatten().tolist()) == {0, 2, 4}


def test_duplicates_repeat_an_expert_in_a_row() -> None:
    ids = make_ids("duplicates", replace(BASE, top_k=3))
    distinct = [len(set(row)) for row in ids.tolist()]
    assert {1, 2, 3} <= set(distinct)


def test_skips_include_a_token_with_all_pairs_skipped() -> None:
    ids = make_ids("skips", replace(BASE, top_k=8))
    assert (ids == -1).all(1).nonzero().flatten().tolist() == [BASE.tokens // 2]
    assert bool((make_ids("skips") >= 0).all(1).any())
    assert count_invalid_ids(make_cpu_inputs(BASE, "skips").routing, BASE) == 0


def test_all_skipped_has_no_valid_id() -> None:
    assert bool((make_ids("all_skipped") == -1).all())


def test_invalid_ids_are_below_and_above_the_range_and_counted() -> None:
    ids = make_ids("out_of_range")
    num_below, num_above = int((ids < -1).sum()), int((ids >= BASE.experts).sum())
    assert min(num_below, num_above) > 0
    assert (
        count_invalid_ids(make_cpu_inputs(BASE, "out_of_range").routing, BASE)
        == num_below + num_above
    )
    assert int(ids.min()) == -(2**31)
    assert int(ids.max()) == 2**31 - 1


@pytest.mark.parametrize("routing", ["skips", "all_skipped", "out_of_range"])
def test_skipped_pairs_have_router_weights_that_would_change_the_output(routing: str) -> None:
    inputs = make_cpu_inputs(BASE, routing)
    ids = inputs.routing.topk_ids_TK
    is_skipped = (ids < 0) | (ids >= BASE.experts)
    weights = inputs.routing.topk_weights_TK[is_skipped]
    for is_kind in (weights.isnan(), weights == 7, weights == torch.inf, weights == -torch.inf):
        assert bool(is_kind.any())


@pytest.mark.parametrize("routing", ROUTING_KINDS)
@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_every_kind_of_routing_for_few_tokens(routing: str, tokens: int) -> None:
    assert make_cpu_inputs(BASE.with_tokens(tokens), routing).routing.topk_ids_TK.shape == (
        tokens,
        2,
    )


def test_an_unknown_routing_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="routing: got sideways"):
        make_cpu_inputs(BASE, "sideways")


@pytest.mark.parametrize("local_experts", [1, 3, 5])
def test_expert_map_places_experts_at_random(local_experts: int) -> None:
    expert_map = make_cpu_inputs(
        replace(BASE, expert_map=True, local_experts=local_experts)
    ).weights.expert_map
    assert expert_map is not None
    assert sorted(expert_map.tolist()) == [-1] * (BASE.experts - local_experts) + list(
        range(local_experts)
    )
    maps = {
        tuple(
            make_cpu_inputs(
                replace(BASE, expert_map=True, local_experts=local_experts), seed=s
            ).weights.expert_map
        )
        for s in range(8)
    }
    assert len(maps) > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(0, 4), (1, 3), (5, 96), (2, 3, 4)])
def test_guard_values_surround_inputs(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = torch.ones(shape, dtype=dtype)
    tensor = fenced(values)
    assert torch.equal(tensor, values)
    assert tensor.is_contiguous()
    tensor.zero_()
    assert fences_intact(tensor)
    for offset in (tensor.storage_offset() - 1, tensor.storage_offset() + tensor.numel()):
        overwritten = fenced(values)
        overwritten.as_strided((1,), (1,), offset).fill_(1)
        assert not fences_intact(overwritten)


def test_reading_past_an_input_returns_guard_values() -> None:
    guard_values = set()
    for seed in (0, 1, 2, 1000, 1001, 1002):
        inputs = make_cpu_inputs(replace(BASE, bias=True), seed=seed)
        for name in ("x", "w1", "w2", "b1", "b2", "topk_weights"):
            tensor = inputs.tensors()[name]
            offset = tensor.storage_offset() + tensor.numel()
            value = float(tensor.as_strided((1,), (1,), offset))
            assert repr(value) == repr(choose_fill(seed).real)
            guard_values.add(repr(value))
    assert len(guard_values) == 3


def test_cases_differ_and_are_reproducible_by_name() -> None:
    cases = [Case("P", "X", problem, routing) for problem, routing in VARIANTS]
    assert 120 <= len(cases) <= 180
    assert (
        len({str(case) for case in cases}) == len({command(case) for case in cases}) == len(cases)
    )


def test_a_command_lists_options_that_are_not_defaults() -> None:
    default_command = command(Case("P", "X", BASE))
    assert default_command == (
        "mk test --one --pf-type P --experts-type X --tokens 19 --hidden 48 --intermediate 80 "
        "--experts 5 --top-k 2 --dtype float32 --quant none --activation silu "
        "--routing uniform --seed 0"
    )
    problem = replace(
        BASE, bias=True, local_experts=3, combine=Combine.TOPK_WEIGHTED, ids_dtype=torch.int64
    )
    command_line = command(Case("P", "X", problem, "skips", seed=7))
    options = "--local-experts 3 --ids-dtype int64 --bias --combine topk_weighted"
    assert command_line == default_command.replace(
        "--routing uniform --seed 0", f"{options} --routing skips --seed 7"
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("quant", ["none", "fp8_w8a8_block:block=48x64", "mxfp4_w4a16"])
def test_layouts_are_views_of_the_same_values(quant: str, layout: str) -> None:
    problem = replace(BASE, quant=quant, dtype=torch.bfloat16)
    contiguous, with_layout = (
        make_cpu_inputs(problem),
        make_cpu_inputs(problem, variation=InputVariation(layout)),
    )
    for name, tensor in with_layout.tensors().items():
        assert torch.equal(tensor.double(), contiguous.tensors()[name].double())
    check_weights(with_layout.weights, with_layout.x_TH, problem)
    w1 = with_layout.weights.w1
    assert w1.is_contiguous() is (layout in ("plain", "shifted"))
    assert w1.mT.is_contiguous() is (layout == "transposed")
    assert (w1.data_ptr() % 16 == 0) is (layout != "shifted")
    assert with_layout.x_TH.is_contiguous() is (layout in ("plain", "shifted"))


def test_ids_beyond_int32_equal_valid_ids_in_their_low_bits() -> None:
    routing = make_cpu_inputs(MANY_TOKENS, "beyond_int32").routing
    ids = routing.topk_ids_TK
    assert ids.dtype == torch.int64
    is_beyond_int32 = (ids < -(2**31)) | (ids >= 2**31)
    low_bits = ids[is_beyond_int32].to(torch.int32)
    assert bool(((low_bits >= 0) & (low_bits < MANY_TOKENS.experts)).any())
    assert count_invalid_ids(routing, MANY_TOKENS) == int(is_beyond_int32.sum()) > 0
    with pytest.raises(ConfigurationError, match="int64"):
        make_cpu_inputs(replace(MANY_TOKENS, ids_dtype=torch.int32), "beyond_int32")


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_inputs_include_extreme_values(values: str, dtype: torch.dtype) -> None:
    # The peak of a token grows with its index, so float16 needs few tokens to stay finite.
    problem = replace(MANY_TOKENS, dtype=dtype).with_tokens(
        8 if values == "peaks" else MANY_TOKENS.tokens
    )
    if values == "ties":  # this kind requires quantized activations
        problem = replace(problem, quant="fp8_w8a8_channel")
    underflows = values == "faint" and dtype is torch.float16
    assert (find_unsupported_reason(problem, values) is not None) is underflows
    inputs = make_cpu_inputs(problem, "uniform", variation=InputVariation(values=values))
    if underflows:  # all inputs underflow to zero
        assert not bool(inputs.x_TH.any())
        return
    rounded_reference = reference.rounded_reference(
        inputs.x_TH, inputs.weights, inputs.routing, problem
    )
    is_finite = rounded_reference.isfinite().all(1)
    groups = assign_token_groups(values, problem.tokens)
    assert bool(is_finite[groups == 0].all())
    assert (groups > 0).any() == (values in ("large", "nan_token", "inf_token"))
    if values == "large":
        assert not bool(rounded_reference[groups == 2].isfinite().all(1).any())
        assert float(rounded_reference[groups == 1].abs().amax()) > 1e4
    elif values in ("nan_token", "inf_token"):
        assert not bool(rounded_reference[groups == 1].isfinite().any())
    weights = inputs.routing.topk_weights_TK
    assert bool((weights < 0).any()) is bool((weights == 0).any()) is (values == "signed")
    assert bool((inputs.x_TH == 0).all(1).any()) is (values == "zero_rows")


@pytest.mark.parametrize("experts", [1, 2, 5])
def test_signed_router_weights_of_an_expert_never_cancel(experts: int) -> None:
    """If E is smaller than K, all pairs of a token may have the same expert."""
    problem = replace(MANY_TOKENS, experts=experts, top_k=16)
    routing = make_cpu_inputs(
        problem, "duplicates", variation=InputVariation(values="signed")
    ).routing
    for expert in range(experts):
        weights = routing.topk_weights_TK[routing.topk_ids_TK == expert]
        sign = -1.0 if expert % 3 == 1 else 1.0
        assert set(weights.sign().tolist()) == {sign, 0.0}


def test_an_unknown_layout_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="layout"):
        InputVariation("folded")
    with pytest.raises(ConfigurationError, match="values"):
        InputVariation(values="odd")
