"""Generated inputs of a case are reproducible, scaled so that errors are visible, and guarded at
both ends.
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
MANY = replace(BASE, tokens=200, hidden=128, intermediate=256)


def made(problem: Problem, routing: str = "uniform", **options: object) -> Inputs:
    return make_inputs(problem, routing, CPU, **options)  # type: ignore[arg-type]


def ids_of(routing: str, problem: Problem = BASE) -> torch.Tensor:
    return made(problem, routing).routing.topk_ids_TK.long()


def rows(problem: Problem, inputs: Inputs) -> torch.Tensor:
    """Return the output of GEMM 2 for every pair, unweighted."""
    unweighted = replace(problem, combine=Combine.TOPK_UNWEIGHTED)
    return reference.float64_reference(inputs.x_TH, inputs.weights, inputs.routing, unweighted)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(("problem", "routing"), VARIANTS, ids=[f"{p}-{r}" for p, r in VARIANTS])
def test_inputs_fit_their_problem(problem: Problem, routing: str, strided: bool) -> None:
    inputs = made(problem, routing, strided=strided)
    check_input(inputs.x_TH, problem, "cpu")
    check_weights(inputs.weights, inputs.x_TH, problem)
    check_routing(inputs.routing, inputs.x_TH, problem)
    slots = inputs.routing.slots_T
    named = [] if slots is None else sorted(set(slots.tolist()) - {-1})
    ids = inputs.routing.topk_ids_TK
    used = (ids >= 0) & (ids < problem.experts)
    for name, tensor in inputs.tensors().items():  # adapters that no token names hold NaN
        read = tensor[named] if name.startswith("lora_") else tensor
        if name == "topk_weights":  # those of other pairs may be anything
            read = tensor[used]
        assert read.float().isfinite().all(), name


@pytest.mark.parametrize("act", ACTIVATIONS, ids=str)
def test_expert_rows_have_a_standard_deviation_of_about_one(act: object) -> None:
    problem = replace(MANY, activation=act)
    assert 0.8 < float(rows(problem, made(problem)).std()) < 1.25


@pytest.mark.parametrize("act", [a for a in ACTIVATIONS if a.limit], ids=str)
def test_activation_limits_clamp_many_values(act: object) -> None:
    problem = replace(MANY, activation=act)
    inputs = made(problem)
    values = inputs.x_TH.double() @ inputs.weights.w1[0].double().T
    limit = problem.act.limit
    assert limit is not None
    assert 0.2 < float((values.abs() > limit).double().mean()) < 0.8


@pytest.mark.parametrize(("problem", "routing"), VARIANTS, ids=[f"{p}-{r}" for p, r in VARIANTS])
def test_outputs_are_neither_tiny_nor_huge(problem: Problem, routing: str) -> None:
    inputs = made(problem, routing)
    out = reference.float64_reference(inputs.x_TH, inputs.weights, inputs.routing, problem).flatten(
        0, -2
    )
    live = out[(out != 0).any(1)]
    if len(live) >= 10:
        assert 0.2 < float(live.std()) < 6


def test_biases_change_the_output() -> None:
    problem = replace(MANY, bias=True)
    inputs = made(problem)
    for name in ("b1", "b2"):
        zero = torch.zeros_like(getattr(inputs.weights, name))
        weights = replace(inputs.weights, **{name: zero})
        without = rows(problem, replace(inputs, weights=weights))
        assert (without - rows(problem, inputs)).norm() > 0.1 * without.norm()


@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_router_weights_are_positive_and_unequal(top_k: int, on_input: bool) -> None:
    problem = replace(MANY, top_k=top_k, experts=9, apply_router_weight_on_input=on_input)
    weights = made(problem).routing.topk_weights_TK
    assert weights.dtype == torch.float32
    assert bool((weights > 0).all())
    assert float((weights - 1).abs().median()) > 0.15
    assert float(weights.std()) > 0.3 * float(weights.mean())
    if top_k > 1:
        assert float((weights.amax(1) / weights.amin(1)).median()) > 1.3


def test_inputs_are_equal_only_for_equal_arguments() -> None:
    problem = replace(BASE, bias=True, expert_map=True)
    one, two, other = made(problem), made(problem), made(problem, seed=1)
    for name, tensor in one.tensors().items():
        assert torch.equal(tensor, two.tensors()[name])
        assert not torch.equal(tensor, other.tensors()[name])
        assert tensor.data_ptr() != two.tensors()[name].data_ptr()


def test_a_strided_call_has_an_equivalent_expert_map() -> None:
    """Any map entry outside the rows of the weights skips; the float64 reference computes the same
    for both maps.
    """
    problem = replace(BASE, experts=17, top_k=5, local_experts=3, expert_map=True)
    plain, strided = made(problem), made(problem, strided=True)
    old, new = plain.weights.expert_map, strided.weights.expert_map
    assert old is not None
    assert new is not None
    here = old >= 0
    assert torch.equal(old[here], new[here])
    away = set(new[~here].tolist())
    assert not away & {0, 1, 2}
    assert {3, -1, 10, -2, 2**31 - 1, -(2**31)} == away
    weights = replace(plain.weights, expert_map=new)
    told = [
        reference.float64_reference(plain.x_TH, each, plain.routing, problem)
        for each in (plain.weights, weights)
    ]
    assert torch.equal(*told)
    assert bool((told[0] != 0).any())


def test_strided_means_views_of_the_same_values() -> None:
    problem = replace(BASE, bias=True)
    plain, strided = made(problem), made(problem, strided=True)
    for name in ("x", "topk_weights", "topk_ids"):
        assert torch.equal(plain.tensors()[name].double(), strided.tensors()[name].double())
    assert strided.x_TH.stride() == (problem.hidden + 16, 1)
    assert strided.weights.w1.mT.is_contiguous()
    assert strided.weights.w2.mT.is_contiguous()
    assert strided.routing.topk_ids_TK.dtype == torch.int64
    assert plain.routing.topk_ids_TK.dtype == torch.int32


def test_uniform_experts_are_distinct_and_all_used() -> None:
    ids = ids_of("uniform", MANY)
    assert bool((ids[:, 0] != ids[:, 1]).all())
    assert set(ids.flatten().tolist()) == set(range(BASE.experts))


def test_experts_repeat_if_top_k_exceeds_their_number() -> None:
    ids = ids_of("uniform", replace(BASE, top_k=8))
    assert all(set(row) == set(range(BASE.experts)) for row in ids.tolist())


def test_all_to_one_gives_k_experts_every_token() -> None:
    ids = ids_of("all_to_one")
    assert len(ids.unique(dim=0)) == 1
    assert len(set(ids[0].tolist())) == BASE.top_k


def test_all_to_one_selects_a_local_expert() -> None:
    inputs = made(replace(BASE, expert_map=True, local_experts=1), "all_to_one")
    assert inputs.weights.expert_map is not None
    assert int(inputs.weights.expert_map[inputs.routing.topk_ids_TK[0, 0].long()]) == 0


def test_zipf_is_skewed() -> None:
    counts = ids_of("zipf", replace(MANY, top_k=1, experts=16)).flatten().bincount(minlength=16)
    assert counts[0] > 4 * counts[8:].double().mean()


def test_empty_experts_get_nothing() -> None:
    assert set(ids_of("empty_experts", MANY).flatten().tolist()) == {0, 2, 4}


def test_duplicates_repeat_an_expert_in_a_row() -> None:
    ids = ids_of("duplicates", replace(BASE, top_k=3))
    distinct = [len(set(row)) for row in ids.tolist()]
    assert {1, 2, 3} <= set(distinct)


def test_skips_include_a_token_with_all_pairs_skipped() -> None:
    ids = ids_of("skips", replace(BASE, top_k=8))
    assert (ids == -1).all(1).nonzero().flatten().tolist() == [BASE.tokens // 2]
    assert bool((ids_of("skips") >= 0).all(1).any())
    assert count_invalid_ids(made(BASE, "skips").routing, BASE) == 0


def test_all_skipped() -> None:
    assert bool((ids_of("all_skipped") == -1).all())


def test_invalid_ids_are_below_and_above_the_range_and_counted() -> None:
    ids = ids_of("out_of_range")
    low, high = int((ids < -1).sum()), int((ids >= BASE.experts).sum())
    assert min(low, high) > 0
    assert count_invalid_ids(made(BASE, "out_of_range").routing, BASE) == low + high
    assert int(ids.min()) == -(2**31)
    assert int(ids.max()) == 2**31 - 1


@pytest.mark.parametrize("routing", ["skips", "all_skipped", "out_of_range"])
def test_skipped_pairs_have_router_weights_that_would_change_the_output(routing: str) -> None:
    inputs = made(BASE, routing)
    ids = inputs.routing.topk_ids_TK
    unused = (ids < 0) | (ids >= BASE.experts)
    weights = inputs.routing.topk_weights_TK[unused]
    for of_kind in (weights.isnan(), weights == 7, weights == torch.inf, weights == -torch.inf):
        assert bool(of_kind.any())


@pytest.mark.parametrize("routing", ROUTING_KINDS)
@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_every_kind_of_routing_for_few_tokens(routing: str, tokens: int) -> None:
    assert made(BASE.with_tokens(tokens), routing).routing.topk_ids_TK.shape == (tokens, 2)


def test_an_unknown_routing_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="routing: got sideways"):
        made(BASE, "sideways")


@pytest.mark.parametrize("local", [1, 3, 5])
def test_expert_map_places_experts_at_random(local: int) -> None:
    expert_map = made(replace(BASE, expert_map=True, local_experts=local)).weights.expert_map
    assert expert_map is not None
    assert sorted(expert_map.tolist()) == [-1] * (BASE.experts - local) + list(range(local))
    maps = {
        tuple(made(replace(BASE, expert_map=True, local_experts=local), seed=s).weights.expert_map)
        for s in range(8)
    }
    assert len(maps) > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(0, 4), (1, 3), (5, 96), (2, 3, 4)])
def test_guard_values_surround_inputs(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = torch.ones(shape, dtype=dtype)
    inside = fenced(values)
    assert torch.equal(inside, values)
    assert inside.is_contiguous()
    inside.zero_()
    assert fences_intact(inside)
    for offset in (inside.storage_offset() - 1, inside.storage_offset() + inside.numel()):
        broken = fenced(values)
        broken.as_strided((1,), (1,), offset).fill_(1)
        assert not fences_intact(broken)


def test_reading_past_an_input_returns_guard_values() -> None:
    seen = set()
    for seed in (0, 1, 2, 1000, 1001, 1002):
        inputs = made(replace(BASE, bias=True), seed=seed)
        for name in ("x", "w1", "w2", "b1", "b2", "topk_weights"):
            tensor = inputs.tensors()[name]
            past = tensor.storage_offset() + tensor.numel()
            found = float(tensor.as_strided((1,), (1,), past))
            assert repr(found) == repr(choose_fill(seed).real)
            seen.add(repr(found))
    assert len(seen) == 3


def test_cases_differ_and_are_reproducible_by_name() -> None:
    cases = [Case("P", "X", problem, routing) for problem, routing in VARIANTS]
    assert 120 <= len(cases) <= 180
    assert (
        len({str(case) for case in cases}) == len({command(case) for case in cases}) == len(cases)
    )


def test_a_command_lists_options_that_are_not_defaults() -> None:
    plain = command(Case("P", "X", BASE))
    assert plain == (
        "mk test --one --pf-type P --experts-type X --tokens 19 --hidden 48 --intermediate 80 "
        "--experts 5 --top-k 2 --dtype float32 --quant none --activation silu "
        "--routing uniform --seed 0"
    )
    problem = replace(
        BASE, bias=True, local_experts=3, combine=Combine.TOPK_WEIGHTED, ids_dtype=torch.int64
    )
    line = command(Case("P", "X", problem, "skips", seed=7))
    wanted = "--local-experts 3 --ids-dtype int64 --bias --combine topk_weighted"
    assert line == plain.replace("--routing uniform --seed 0", f"{wanted} --routing skips --seed 7")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("quant", ["none", "fp8_w8a8_block:block=48x64", "mxfp4_w4a16"])
def test_layouts_are_views_of_the_same_values(quant: str, layout: str) -> None:
    problem = replace(BASE, quant=quant, dtype=torch.bfloat16)
    plain, laid = made(problem), made(problem, variation=InputVariation(layout))
    for name, tensor in laid.tensors().items():
        assert torch.equal(tensor.double(), plain.tensors()[name].double())
    check_weights(laid.weights, laid.x_TH, problem)
    w1 = laid.weights.w1
    assert w1.is_contiguous() is (layout in ("plain", "shifted"))
    assert w1.mT.is_contiguous() is (layout == "transposed")
    assert (w1.data_ptr() % 16 == 0) is (layout != "shifted")
    assert laid.x_TH.is_contiguous() is (layout in ("plain", "shifted"))


def test_ids_beyond_int32_equal_valid_ids_in_their_low_bits() -> None:
    routing = made(MANY, "beyond_int32").routing
    ids = routing.topk_ids_TK
    assert ids.dtype == torch.int64
    far = (ids < -(2**31)) | (ids >= 2**31)
    low = ids[far].to(torch.int32)
    assert bool(((low >= 0) & (low < MANY.experts)).any())
    assert count_invalid_ids(routing, MANY) == int(far.sum()) > 0
    with pytest.raises(ConfigurationError, match="int64"):
        made(replace(MANY, ids_dtype=torch.int32), "beyond_int32")


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_inputs_include_extreme_values(values: str, dtype: torch.dtype) -> None:
    # The peak of a token grows with its place: few tokens keep float16 finite.
    problem = replace(MANY, dtype=dtype).with_tokens(8 if values == "peaks" else MANY.tokens)
    if values == "ties":  # of activations that are quantized
        problem = replace(problem, quant="fp8_w8a8_channel")
    faintest = values == "faint" and dtype is torch.float16
    assert (find_unsupported_reason(problem, values) is not None) is faintest
    inputs = made(problem, "uniform", variation=InputVariation(values=values))
    if faintest:  # as the reason says
        assert not bool(inputs.x_TH.any())
        return
    rounded_reference = reference.rounded_reference(
        inputs.x_TH, inputs.weights, inputs.routing, problem
    )
    finite = rounded_reference.isfinite().all(1)
    groups = assign_token_groups(values, problem.tokens)
    assert bool(finite[groups == 0].all())
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
def test_router_weights_of_an_expert_never_cancel(experts: int) -> None:
    """If E is smaller than K, all pairs of a token may have the same expert."""
    problem = replace(MANY, experts=experts, top_k=16)
    routing = made(problem, "duplicates", variation=InputVariation(values="signed")).routing
    for expert in range(experts):
        weights = routing.topk_weights_TK[routing.topk_ids_TK == expert]
        sign = -1.0 if expert % 3 == 1 else 1.0
        assert set(weights.sign().tolist()) == {sign, 0.0}


def test_an_unknown_layout_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="layout"):
        InputVariation("folded")
    with pytest.raises(ConfigurationError, match="values"):
        InputVariation(values="odd")
