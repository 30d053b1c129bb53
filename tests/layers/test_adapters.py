"""LoRA adapters of a layer: the specification as a string, refused tensors, and outputs compared
with those of merged weights.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

import modular_kernel as mk
from modular_kernel import reference
from modular_kernel.errors import (
    ConfigurationError,
    DeviceError,
    DtypeError,
    InputError,
    LayoutError,
    ModularKernelError,
    RoutingError,
    ShapeError,
    WeightsError,
)
from modular_kernel.replay.recording import RecordedCall
from modular_kernel.spec.lora import AdapterSpec, slots_from_sequences
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.tensors import ExpertWeights
from modular_kernel.testing.cases.inputs import Inputs, InputVariation, make_inputs

CPU = torch.device("cpu")
PROBLEM = Problem(
    tokens=9, hidden=32, intermediate=24, experts=4, top_k=2, dtype=torch.float32,
    lora="adapters=3,rank=6",
)  # fmt: skip
PAIR = ("MoEPrepareAndFinalizeNoEP", "TorchExperts")
BATCHED_PAIR = ("BatchedPrepareAndFinalize", "NaiveBatchedExperts")
SHARED_FACTORS = ("", ",a13=shared", ",outer=shared", ",a13=shared,outer=shared")


def run(pair: tuple[str, str], problem: Problem, inputs: Inputs, **options: Any) -> torch.Tensor:
    kernel = mk.make_kernel(*pair, problem, machine=Machine(), **options)
    return kernel(inputs.x_TH.clone(), inputs.weights, inputs.routing)


def remove_adapters(problem: Problem, inputs: Inputs) -> tuple[Problem, Inputs]:
    """Return the same layer and call without adapters."""
    names = ("lora_a13", "lora_b13", "lora_a2", "lora_b2")
    weights = replace(inputs.weights, **dict.fromkeys(names))
    return replace(problem, lora="none"), Inputs(
        inputs.x_TH, weights, replace(inputs.routing, adapters_T=None)
    )


@pytest.mark.parametrize("shared", SHARED_FACTORS)
def test_the_text_form_round_trips(shared: str) -> None:
    text = f"adapters=4,rank=32{shared}"
    assert str(AdapterSpec.parse(text)) == text
    assert Problem(1, 8, 8, 2, 1, lora=text).lora == text
    assert AdapterSpec.parse("none") is None
    assert Problem(1, 8, 8, 2, 1).adapters is None


@pytest.mark.parametrize(
    "spec",
    ["", "adapters=4", "rank=4", "adapters=4,rank=4,rank=4", "adapters=4,rank=4,a13=own",
     "adapters=-1,rank=4", "adapters=4,rank=0", "adapters=4,rank=257", "adapters=0,rank=4",
     "adapters=4;rank=4", True, None, 7],
)  # fmt: skip
def test_invalid_texts_are_refused(spec: Any) -> None:
    with pytest.raises(ConfigurationError, match="lora"):
        Problem(1, 8, 8, 2, 1, lora=spec)


def test_maximum_ranks_and_adapters() -> None:
    assert AdapterSpec.parse("adapters=65536,rank=256") == AdapterSpec(65536, 256)
    for text in ("adapters=65537,rank=256", "adapters=65536,rank=257"):
        with pytest.raises(ConfigurationError, match="lora"):
            AdapterSpec.parse(text)


def test_sharing_a_between_gate_and_up_requires_a_gated_activation() -> None:
    with pytest.raises(ConfigurationError, match="a13=shared"):
        replace(PROBLEM, activation="relu2", lora="adapters=1,rank=4,a13=shared")


def merge_slot(problem: Problem, weights: ExpertWeights, slot: int) -> ExpertWeights:
    """Return float64 weights without adapters, with the product B A of one slot added.

    The float64 reference does not share this code.
    """
    spec = problem.adapters
    assert spec is not None
    a13, b13, a2, b2 = (
        getattr(weights, name)[slot].double()
        for name in ("lora_a13", "lora_b13", "lora_a2", "lora_b2")
    )
    e, n = problem.e, problem.w1_rows
    a13 = a13.expand(e, -1, -1)
    rows = torch.arange(n)
    up = rows % 2 if problem.act.interleaved else rows // problem.intermediate
    if not problem.act.gated or spec.a13_shared:
        up = torch.zeros_like(rows)
    a_of_row = a13.unflatten(1, (-1, spec.rank))[:, up]  # (e, N, R, H)
    w1 = weights.w1.double() + torch.einsum("enr,enrh->enh", b13, a_of_row)
    w2 = weights.w2.double() + torch.einsum("ehr,eri->ehi", b2.expand(e, -1, -1), a2)
    names = ("lora_a13", "lora_b13", "lora_a2", "lora_b2")
    return replace(weights, w1=w1, w2=w2, **dict.fromkeys(names))


RANKS_TOP_KS_AND_ACTIVATIONS = (
    (3, 1, "silu"), (16, 2, "swiglu_oai:alpha=1.702,limit=1.0,interleaved=true"), (64, 4, "gelu"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("shared", "rank", "top_k", "activation"),
    [
        *(
            (shared, *parameters)
            for shared in SHARED_FACTORS
            for parameters in RANKS_TOP_KS_AND_ACTIVATIONS
        ),
        *((shared, 5, 2, "relu2") for shared in SHARED_FACTORS if "a13" not in shared),
    ],
)
def test_the_float64_reference_equals_the_reference_with_merged_weights(
    shared: str, rank: int, top_k: int, activation: str
) -> None:
    problem = replace(
        PROBLEM, lora=f"adapters=3,rank={rank}{shared}", top_k=top_k, activation=activation,
        bias=True,
    )  # fmt: skip
    inputs = make_inputs(problem, "skips", CPU)
    exact = reference.float64_reference(inputs.x_TH, inputs.weights, inputs.routing, problem)
    slots_T = inputs.routing.slots_T
    assert slots_T is not None
    problem_without_adapters, inputs_without_adapters = remove_adapters(problem, inputs)
    expected = reference.float64_reference(
        inputs_without_adapters.x_TH,
        inputs_without_adapters.weights,
        inputs_without_adapters.routing,
        problem_without_adapters,
    )
    assert not torch.equal(expected, exact)
    for slot in set(slots_T.tolist()) - {-1}:
        merged_weights = merge_slot(problem, inputs.weights, slot)
        uses_slot = slots_T == slot
        expected[uses_slot] = reference.float64_reference(
            inputs_without_adapters.x_TH,
            merged_weights,
            inputs_without_adapters.routing,
            problem_without_adapters,
        )[uses_slot]
    torch.testing.assert_close(exact, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("pair", [PAIR, BATCHED_PAIR])
@pytest.mark.parametrize("quant", ["none", "fp8_w8a8_channel", "int4_w4a16_group:group=8"])
def test_rows_without_an_adapter_equal_the_layer_without_adapters(
    pair: tuple[str, str], quant: str
) -> None:
    problem = replace(PROBLEM, dtype=torch.bfloat16, quant=quant, tokens=17)
    inputs = make_inputs(problem, "uniform", CPU)
    slots_T = inputs.routing.slots_T
    assert slots_T is not None
    got, expected = run(pair, problem, inputs), run(pair, *remove_adapters(problem, inputs))
    has_no_adapter = slots_T < 0
    assert 0 < int(has_no_adapter.sum()) < 17
    assert torch.equal(got[has_no_adapter], expected[has_no_adapter])
    assert bool((got[~has_no_adapter] != expected[~has_no_adapter]).any(1).all())


@pytest.mark.parametrize("slot_pattern", ["nobody", "without"])
@pytest.mark.parametrize("pair", [PAIR, BATCHED_PAIR])
def test_a_call_without_adapters_equals_the_layer_without_adapters(
    pair: tuple[str, str], slot_pattern: str
) -> None:
    """All adapters are NaN, so that any use of an adapter changes the output."""
    inputs = make_inputs(
        PROBLEM, "uniform", CPU, variation=InputVariation(slot_pattern=slot_pattern)
    )
    assert bool(inputs.weights.lora_a13.isnan().all())  # type: ignore[union-attr]
    assert torch.equal(run(pair, PROBLEM, inputs), run(pair, *remove_adapters(PROBLEM, inputs)))


def test_a_plan_alternates_between_calls_with_and_without_adapters() -> None:
    kernel = mk.make_kernel(*PAIR, PROBLEM, machine=Machine())
    plan, inputs = kernel.plan(), make_inputs(PROBLEM, "uniform", CPU)
    for adapters in (inputs.routing.adapters_T, "none", inputs.routing.adapters_T):
        routing = replace(inputs.routing, adapters_T=adapters)
        assert torch.equal(
            plan(inputs.x_TH, inputs.weights, routing), kernel(inputs.x_TH, inputs.weights, routing)
        )
        with pytest.raises(RoutingError, match="adapters: got None"):
            plan(inputs.x_TH, inputs.weights, replace(routing, adapters_T=None))


def test_a_plan_checks_slots_before_it_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call with missing slots has the same signature as a call without adapters."""
    plan = mk.make_kernel(*PAIR, PROBLEM, machine=Machine()).plan()
    inputs = make_inputs(PROBLEM, "uniform", CPU, variation=InputVariation(slot_pattern="without"))
    plan(inputs.x_TH, inputs.weights, inputs.routing)
    recorded = RecordedCall((), (), ())
    monkeypatch.setattr(plan._recorded, "replayable", True)
    monkeypatch.setattr(plan._recorded, "find", lambda _signature: recorded)
    monkeypatch.setattr(
        plan, "_launch", lambda *_: pytest.fail("the plan launched instead of replaying")
    )
    with pytest.raises(RoutingError, match="adapters: got None"):
        plan(inputs.x_TH, inputs.weights, replace(inputs.routing, adapters_T=None))


def slice_intermediate(weights: ExpertWeights, columns: slice, intermediate: int) -> ExpertWeights:
    """Return a TP rank's slice: rows of w1 and lora_b13, columns of w2 and lora_a2."""
    assert weights.lora_b13 is not None
    assert weights.lora_a2 is not None
    rows = torch.arange(2 * intermediate).view(2, intermediate)[:, columns].flatten()
    return replace(
        weights,
        w1=weights.w1[:, rows],
        w2=weights.w2[:, :, columns],
        lora_b13=weights.lora_b13[:, :, rows],
        lora_a2=weights.lora_a2[..., columns],
    )


def test_outputs_of_tensor_parallel_ranks_sum_to_the_layer() -> None:
    inputs = make_inputs(PROBLEM, "skips", CPU)
    expected = reference.float64_reference(inputs.x_TH, inputs.weights, inputs.routing, PROBLEM)
    rank_problem, got = replace(PROBLEM, intermediate=12), torch.zeros_like(expected)
    for columns in (slice(0, 12), slice(12, 24)):
        rank_inputs = Inputs(
            inputs.x_TH, slice_intermediate(inputs.weights, columns, 24), inputs.routing
        )
        got += run(PAIR, rank_problem, rank_inputs).double()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


BAD_TENSORS: list[tuple[str, dict[str, Any], dict[str, Any], type[InputError], str]] = [
    ("slots are None", {"adapters_T": None}, {}, RoutingError, "adapters: got None, need"),
    ("unknown word", {"adapters_T": "all"}, {}, RoutingError, "adapters: got 'all'"),
    ("int64", {"adapters_T": torch.zeros(9).long()}, {}, DtypeError, "adapters: got int64"),
    ("too few", {"adapters_T": torch.zeros(8).int()}, {}, ShapeError, "adapters: got"),
    ("a list", {"adapters_T": [0] * 9}, {}, DtypeError, "adapters: got list"),
    ("gaps", {"adapters_T": torch.zeros(18).int()[::2]}, {}, LayoutError, "adapters: got"),
    ("meta", {"adapters_T": torch.zeros(9, device="meta").int()}, {}, DeviceError, "adapters"),
    ("missing", {}, {"lora_b2": None}, WeightsError, "lora_b2: got None"),
    ("rank", {}, {"lora_a2": torch.zeros(3, 4, 5, 24)}, ShapeError, "lora_a2: got"),
    ("one A", {}, {"lora_a13": torch.zeros(3, 4, 6, 32)}, ShapeError, "lora_a13: got"),
    ("experts", {}, {"lora_b13": torch.zeros(3, 1, 48, 6)}, ShapeError, "lora_b13: got"),
    ("slots", {}, {"lora_b2": torch.zeros(2, 4, 32, 6)}, ShapeError, "lora_b2: got"),
    ("half", {}, {"lora_b2": torch.zeros(3, 4, 32, 6).half()}, DtypeError, "lora_b2: got float16"),
    ("on meta", {}, {"lora_b2": torch.zeros(3, 4, 32, 6, device="meta")}, DeviceError, "lora_b2"),
    ("columns", {}, {"lora_b2": torch.zeros(3, 4, 6, 32).mT}, LayoutError, "lora_b2: got strides"),
]  # fmt: skip


@pytest.mark.parametrize(("routing", "weights", "error", "message"), [b[1:] for b in BAD_TENSORS],
                         ids=[b[0] for b in BAD_TENSORS])  # fmt: skip
def test_bad_tensors_are_refused_by_name_before_anything_runs(
    routing: dict[str, Any], weights: dict[str, Any], error: type[InputError], message: str
) -> None:
    inputs = make_inputs(PROBLEM, "uniform", CPU)
    kernel = mk.make_kernel(*PAIR, PROBLEM, machine=Machine())
    out = torch.full_like(inputs.x_TH, 7.0)
    for layer in (kernel, kernel.plan()):
        with pytest.raises(error) as caught:
            layer(
                inputs.x_TH,
                replace(inputs.weights, **weights),
                replace(inputs.routing, **routing),
                out=out,
            )
        assert message in str(caught.value)
    assert bool((out == 7).all())


def test_a_layer_without_adapters_refuses_their_tensors() -> None:
    inputs = make_inputs(PROBLEM, "uniform", CPU)
    problem_without_adapters, inputs_without_adapters = remove_adapters(PROBLEM, inputs)
    with pytest.raises(WeightsError, match="lora_a13, lora_b13"):
        run(
            PAIR,
            problem_without_adapters,
            Inputs(inputs.x_TH, inputs.weights, inputs_without_adapters.routing),
        )
    with pytest.raises(RoutingError, match="adapters: got slots"):
        run(
            PAIR,
            problem_without_adapters,
            Inputs(inputs.x_TH, inputs_without_adapters.weights, inputs.routing),
        )


@pytest.mark.parametrize("slot", [3, -2])
def test_checked_mode_names_a_slot_out_of_range(slot: int) -> None:
    inputs = make_inputs(PROBLEM, "uniform", CPU)
    assert inputs.routing.slots_T is not None
    inputs.routing.slots_T[4] = slot
    with pytest.raises(RoutingError, match=f"1 slot, the first {slot} of token 4"):
        run(PAIR, PROBLEM, inputs, checked=True)
    changed_slots_T = inputs.routing.slots_T.clone().clamp(min=-1)
    changed_slots_T[4] = -1
    without_token_4 = Inputs(
        inputs.x_TH, inputs.weights, replace(inputs.routing, adapters_T=changed_slots_T)
    )
    assert torch.equal(run(PAIR, PROBLEM, inputs), run(PAIR, PROBLEM, without_token_4))


def test_an_output_that_overlaps_the_slots_is_refused() -> None:
    inputs = make_inputs(replace(PROBLEM, hidden=32), "uniform", CPU)
    memory = torch.zeros(9 * 32)
    slots_T = memory.view(torch.int32)[:9]
    slots_T.fill_(-1)
    kernel = mk.make_kernel(*PAIR, PROBLEM, machine=Machine())
    routing = replace(inputs.routing, adapters_T=slots_T)
    with pytest.raises(ConfigurationError, match="memory of adapters"):
        kernel(inputs.x_TH, inputs.weights, routing, out=memory.view(9, 32))


def test_tokens_get_the_slots_of_their_sequences() -> None:
    starts, slots = torch.tensor([0, 3, 3, 5]), torch.tensor([2, 0, -1])
    got = slots_from_sequences(starts, slots, 7)
    assert got.dtype is torch.int32
    assert got.tolist() == [2, 2, 2, -1, -1, -1, -1]
    assert slots_from_sequences(starts.int(), slots.int(), 5).tolist() == [2, 2, 2, -1, -1]
    assert slots_from_sequences(torch.tensor([0]), slots[:0], 2).tolist() == [-1, -1]
    with pytest.raises(ShapeError, match="sequences: got"):
        slots_from_sequences(starts[:-1], slots, 7)
    with pytest.raises(DtypeError, match="slots of sequences"):
        slots_from_sequences(starts, slots.float(), 7)


def test_slots_from_sequences_in_every_integer_dtype() -> None:
    starts, slots = torch.tensor([0, 3, 100]), torch.tensor([2, 1])
    expected = [2] * 3 + [1] * 97 + [-1] * 200
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int64):
        assert slots_from_sequences(starts.to(dtype), slots.to(dtype), 300).tolist() == expected
    # A slot that exceeds 32 bits must not wrap around to a valid slot.
    assert slots_from_sequences(starts, slots + (1 << 32), 100).tolist() == [(1 << 31) - 1] * 100


@pytest.mark.parametrize(
    ("starts", "slots", "tokens", "error"),
    [
        (torch.tensor([0, 3]), torch.tensor([1]), -1, "tokens: got -1, need an int >= 0"),
        (torch.tensor([0, 3]), torch.tensor([1]), 2.5, "tokens: got 2.5, need"),
        ([0, 3], torch.tensor([1]), 4, "starts of sequences: got list"),
        (torch.tensor([0, 3]) + 0j, torch.tensor([1]), 4, "starts of sequences: got torch.complex"),
        (
            torch.tensor([0, 3], device="meta"),
            torch.tensor([1]),
            4,
            "starts of sequences: got meta, without memory",
        ),
    ],
)
def test_invalid_sequences_are_refused(starts: Any, slots: Any, tokens: Any, error: str) -> None:
    with pytest.raises(ModularKernelError, match=error):
        slots_from_sequences(starts, slots, tokens)


@pytest.mark.parametrize("starts", [[0, 5, 2], [1, 2, 5], [0, 2, 50], [-1, 2, 5]])
def test_starts_that_do_not_ascend_from_0_are_refused_on_the_cpu(starts: list[int]) -> None:
    with pytest.raises(
        ConfigurationError, match=r"starts of sequences: .*ascending from 0, up to 5"
    ):
        slots_from_sequences(torch.tensor(starts), torch.tensor([0, 1]), 5)
