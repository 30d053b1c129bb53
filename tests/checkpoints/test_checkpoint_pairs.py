"""Every pair of checkpoint features gives correct values or a documented refusal.

Features are formats and their options, file layouts, biases, rank shares and placements. Features
that work alone can fail in combination: for example, act-order moves rows of w1, and must then also
move the elements of b1. A row is one combination of feature values.
"""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_rows import DRAWN, EXPERTS, LAYOUTS, METHODS, Written, write_row
from covering_rows import Refusal, name_of
from test_checkpoint_values import REFERENCE_PARTS, dequantize_w1_w2

import modular_kernel as mk
from modular_kernel.catalog import this_machine
from modular_kernel.checkpoints import loading
from modular_kernel.checkpoints.loading import LoadedExperts
from modular_kernel.machine import prefer_torch_reference
from modular_kernel.models.families import FAMILIES
from modular_kernel.spec.placement import Placement

TOKENS = 9
# Maximum relative error of the summed output for each dtype of the layer, and with 8-bit
# activations.
MAX_ERRORS, MAX_W8A8_ERROR = {None: 1e-2, "float32": 1e-5}, 8e-2


@pytest.fixture
def written(row: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Written:
    """Write the checkpoint of a row. The family is patched to have biases only if the row does."""
    family = row["family"]
    monkeypatch.setitem(FAMILIES, family, replace(FAMILIES[family], bias=row["bias"]))
    if row["pieces"]:
        monkeypatch.setattr(loading, "_VALUES_PER_STEP", 1 << 12)
    return write_row(tmp_path, row)


def make_placement(row: dict[str, Any]) -> Any:
    if row["placement"] == "round_robin":
        return Placement.round_robin(EXPERTS, row["ep"])
    if row["placement"] == "reversed":
        return Placement(tuple(slots[::-1] for slots in Placement.linear(EXPERTS, row["ep"]).slots))
    return "linear"


def load_rank(folder: Path, row: dict[str, Any], e: int, t: int) -> LoadedExperts:
    return mk.load_experts(
        folder,
        row["layers"] - 1,
        ep=(e, row["ep"]),
        tp=(t, row["tp"]),
        dtype=row["dtype"],
        placement=make_placement(row),
        quantize_inputs=row["inputs"],
    )


def load_all_ranks(folder: Path, row: dict[str, Any]) -> list[LoadedExperts]:
    return [load_rank(folder, row, e, t) for e, t in product(range(row["ep"]), range(row["tp"]))]


def compute_summed_output_error(
    loaded: list[LoadedExperts], written: Written, **fields: Any
) -> float:
    """Return the relative error of the sum of all ranks' outputs. Every rank gets all tokens."""
    x, weights, ids = written.sample.inputs(TOKENS)
    total = torch.zeros_like(x)
    for rank in loaded:
        problem, rank_weights = rank.partial(TOKENS, **fields)
        kernel = mk.make_kernel(*REFERENCE_PARTS, problem, machine=this_machine(device="cpu"))
        with prefer_torch_reference():
            total += kernel(x.to(problem.dtype), rank_weights, mk.Routing(weights, ids)).double()
    x = x.to(loaded[0].problem_fields["dtype"]).double()
    want = written.sample.expected_output(x, weights, ids)
    return float((total - want).norm() / want.norm())


def check_values(loaded: list[LoadedExperts], written: Written, row: dict[str, Any]) -> None:
    """Compare the dequantized weights of each expert with the sample. Act-order may reorder rows of
    w1 and columns of w2.
    """
    method, layout = METHODS[row["method"]], LAYOUTS[row["family"]]
    w1, w2 = written.sample.w1, written.sample.w2
    for rank in loaded:
        projections = 2 if layout.gated else 1
        rows = torch.arange(*rank.columns)
        got_w1, got_w2 = remove_padding(rank, projections)
        # The scales of gate and up are merged into the larger one, so the half with the smaller
        # scale is rounded again.
        rounded = method.scales == "tensor" and not method.weight_only
        rtol = 2.0**-4 if rounded and layout.gated and not layout.fused else 1e-6
        for slot, e in enumerate(rank.placement.slots[rank.ep[0]]):
            order = match_columns(got_w2[slot], w2[e][:, rows]) if row["act-order"] else None
            source_rows = rows if order is None else rows[order]
            gate_up_rows = torch.cat(
                [source_rows + i * row["intermediate"] for i in range(projections)]
            )
            atol = 1e-3 if rtol > 1e-3 else 1e-12
            torch.testing.assert_close(got_w1[slot], w1[e][gate_up_rows], rtol=rtol, atol=atol)
            torch.testing.assert_close(got_w2[slot], w2[e][:, source_rows], rtol=1e-6, atol=1e-12)


def remove_padding(rank: LoadedExperts, projections: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return w1 and w2 without the padding of the rank's share, after a check that it is 0."""
    width = rank.columns[1] - rank.columns[0]
    w1, w2 = dequantize_w1_w2(rank)
    gate_up = w1.unflatten(1, (projections, -1))
    for padding in (gate_up[:, :, width:], w2[..., width:]):
        assert not padding.any()
    return gate_up[:, :, :width].flatten(1, 2), w2[..., :width]


def match_columns(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """For each column of `got`, return the index of the equal column of `want`.

    Every column of `want` must occur once.
    """
    order = torch.cdist(got.T.contiguous(), want.T.contiguous()).argmin(1)
    assert sorted(order.tolist()) == list(range(len(order)))
    return order


def check_input_scales(loaded: list[LoadedExperts], written: Written) -> None:
    """Compare static activation scales, of which nvfp4 has one per expert and other schemes have
    one for all experts.
    """
    for rank in loaded:
        weights = rank.weights
        if weights.a1_scale is None:
            continue
        assert written.input_scales is not None
        slots = list(rank.placement.slots[rank.ep[0]])
        for name, scales in zip(("a1_scale", "a2_scale"), written.input_scales, strict=True):
            by_expert = scales.amax(1)[slots]
            got = getattr(weights, name).double()
            want = (
                by_expert if len(got) > 1 or got.shape == by_expert.shape else scales.amax()[None]
            )
            if "nvfp4" not in rank.problem_fields["quant"]:
                want = scales.amax()[None]
            torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


def test_rows_cover_every_pair_of_values_and_every_rule() -> None:
    assert DRAWN.unmet() == []
    allowed = (
        "refused: ",
        "a block ",
        "blocks ",
        "mxfp4 ",
        "columns of one group",
        "channels of int8",
    )
    for reason in DRAWN.impossible().values():
        assert reason.startswith(allowed) or " has no " in reason, reason


@pytest.mark.share(4)
@pytest.mark.parametrize("row", DRAWN.accepted, ids=name_of)
def test_accepted_combination_has_the_values_of_its_files(
    row: dict[str, Any], written: Written
) -> None:
    loaded = load_all_ranks(written.sample.folder, row)
    check_values(loaded, written, row)
    check_input_scales(loaded, written)
    assert {rank.problem_fields["bias"] for rank in loaded} == {row["bias"]}
    if not row["inputs"]:  # other tests cover 4-bit activations
        bound = MAX_ERRORS[row["dtype"]] if METHODS[row["method"]].weight_only else MAX_W8A8_ERROR
        assert compute_summed_output_error(loaded, written) <= bound


@pytest.mark.share(4)
@pytest.mark.parametrize(
    ("rule", "row"), [pytest.param(*pair, id=name_of(pair)) for pair in DRAWN.refused]
)
def test_refused_combination_has_the_error_of_its_rule(
    rule: Refusal, row: dict[str, Any], written: Written
) -> None:
    for e, t in product(range(row["ep"]), range(row["tp"])):
        with pytest.raises(rule.error, match=rule.message):
            load_rank(written.sample.folder, row, e, t)
