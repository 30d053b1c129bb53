"""The kernels and torch references of permute, assign_rows, the reductions and the activations."""

import pytest
import torch
from ops_fixtures import DEVICE, make_path_fixture, random_normal

from modular_kernel import reference
from modular_kernel.errors import ShapeError
from modular_kernel.ops import activation, batch, permute, reduce
from modular_kernel.ops.count import local_ids
from modular_kernel.spec.problem import GATED, UNGATED, ActivationSpec, IdSpace
from modular_kernel.tensors import DispatchedRouting
from modular_kernel.workspace import Workspace

NAN = float("nan")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


path = make_path_fixture(reduce, activation, batch, permute)


def place_nan_before(rows: torch.Tensor) -> torch.Tensor:
    """Return a copy of the rows with NaN in memory before them, where row -1 would be."""
    return torch.cat([torch.full_like(rows[:1], NAN), rows])[1:]


def make_routing(
    ids: list[list[int]], experts: int, mapping: list[int] | None = None
) -> DispatchedRouting:
    table = None if mapping is None else torch.tensor(mapping, dtype=torch.int32, device=DEVICE)
    counter = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    return DispatchedRouting(
        None, torch.tensor(ids, device=DEVICE), IdSpace.GLOBAL, experts, table, counter
    )


def assign_rows(
    dispatched: DispatchedRouting, capacity: int, num_local: int
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, top_k = dispatched.topk_ids_TK.shape
    rows = torch.full((tokens, top_k), 12345, dtype=torch.int32, device=DEVICE)
    counts = torch.full((num_local,), 12345, dtype=torch.int32, device=DEVICE)
    spec = batch.assign_rows_scratch(tokens, top_k, num_local)
    scratch = Workspace({"s": spec}, torch.device(DEVICE), poison=True)
    batch.assign_rows(
        dispatched,
        capacity=capacity,
        row_of_pair_TK=rows,
        counts_e=counts,
        scratch=scratch.take("s", spec.shape),
    )
    scratch.check_red_zones()
    return rows.cpu(), counts.cpu()


@pytest.mark.usefixtures("path")
def test_rows_are_in_token_order_and_duplicates_share_a_row() -> None:
    ids = [[0, 2], [2, 2], [-1, 0], [1, 99], [2, 0]]
    rows, counts = assign_rows(make_routing(ids, 3), 5, 3)
    assert rows.tolist() == [[0, 10], [11, 11], [-1, 1], [5, -1], [12, 2]]
    assert counts.tolist() == [3, 1, 3]


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_rows_are_assigned_over_several_chunks(top_k: int) -> None:
    tokens, experts = 130, 5
    ids = torch.randint(-1, experts, (tokens, top_k), generator=torch.Generator().manual_seed(3))
    rows, counts = assign_rows(make_routing(ids.tolist(), experts), tokens, experts)
    used = [0] * experts
    for token, row in enumerate(ids.tolist()):
        for expert in dict.fromkeys(row):
            slots = [k for k, i in enumerate(row) if i == expert]
            expected = -1 if expert < 0 else expert * tokens + used[expert]
            assert rows[token, slots].tolist() == [expected] * len(slots)
            if expert >= 0:
                used[expert] += 1
    assert counts.tolist() == used


@pytest.mark.usefixtures("path")
def test_expert_map_skips_pairs_and_invalid_ids_are_counted() -> None:
    dispatched = make_routing([[0, 1], [3, 4], [2, -2]], 4, mapping=[-1, 1, -1, 0])
    rows, counts = assign_rows(dispatched, 3, 2)
    assert rows.tolist() == [[-1, 3], [0, -1], [-1, -1]]
    assert counts.tolist() == [1, 1]
    assert int(dispatched.invalid_ids) == 2


def test_local_ids_count_invalid_ids() -> None:
    dispatched = make_routing([[0, 1], [4, -1], [-2, 3]], 4, mapping=[2, -1, 0, 1])
    assert local_ids(dispatched, 2).tolist() == [[-1, -1], [-1, -1], [-1, 1]]
    assert int(dispatched.invalid_ids) == 2


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("hidden", [1, 17, 1025])
@pytest.mark.parametrize("dtype", DTYPES)
def test_permute_writes_only_rows_of_pairs(hidden: int, dtype: torch.dtype) -> None:
    x = random_normal(4, hidden + 3, dtype=dtype)[:, :hidden]  # rows are strided
    row_of_pair = torch.tensor(
        [[5, 0], [-1, 2], [3, 3], [-1, -1]], dtype=torch.int32, device=DEVICE
    )
    rows = torch.full((6, hidden), NAN, dtype=dtype, device=DEVICE)
    permute.permute_tokens(x, row_of_pair, None, rows_RH=rows)
    for row, token in ((5, 0), (0, 0), (2, 1), (3, 2)):
        assert torch.equal(rows[row], x[token])
    assert bool(rows[[1, 4]].isnan().all())


@pytest.mark.usefixtures("path")
def test_permute_applies_weights_in_float32() -> None:
    x, weights = random_normal(3, 8, dtype=torch.bfloat16), random_normal(3, 1, seed=1)
    row_of_pair = torch.tensor([[2], [0], [1]], dtype=torch.int32, device=DEVICE)
    rows = torch.empty(3, 8, dtype=torch.bfloat16, device=DEVICE)
    permute.permute_tokens(x, row_of_pair, weights, rows_RH=rows)
    assert torch.equal(rows[[2, 0, 1]], (x.float() * weights).to(torch.bfloat16))


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("hidden", [3, 2049])
@pytest.mark.parametrize("top_k", [1, 2, 5, 22, 32])
def test_moe_sum_reduce_equals_the_scaled_sum(hidden: int, top_k: int) -> None:
    rows = random_normal(7, top_k, hidden, dtype=torch.bfloat16)
    out = torch.full((7, hidden), NAN, dtype=torch.bfloat16, device=DEVICE)
    reduce.moe_sum_reduce(rows, out, 2.5)
    exact = rows.double().sum(1) * 2.5
    assert float((out.double() - exact).norm() / exact.norm()) < 2**-8


@pytest.mark.usefixtures("path")
def test_sum_does_not_read_rows_of_skipped_pairs() -> None:
    dispatched = make_routing([[0, -1], [9, 1], [-1, -1]], 2)
    rows, weights = place_nan_before(random_normal(3, 2, 5)), random_normal(3, 2, seed=1)
    for token, slot in ((0, 1), (1, 0), (2, 0), (2, 1)):
        rows[token, slot] = weights[token, slot] = NAN
    out = torch.full((3, 5), NAN, device=DEVICE)
    reduce.weight_and_sum(rows, weights, scale=0.5, out=out, routing=dispatched, num_local=2)
    zero = torch.zeros(5, device=DEVICE)
    expected = torch.stack([rows[0, 0] * weights[0, 0], rows[1, 1] * weights[1, 1], zero])
    torch.testing.assert_close(out, 0.5 * expected)


@pytest.mark.usefixtures("path")
def test_gather_and_sum_reads_only_rows_of_pairs() -> None:
    rows, weights = place_nan_before(random_normal(6, 4)), random_normal(2, 3, seed=1)
    rows[[1, 4]] = NAN
    weights[1, 2] = NAN  # the weight of a skipped pair
    row_of_pair = torch.tensor([[5, 0, 0], [2, 3, -1]], dtype=torch.int32, device=DEVICE)
    out = torch.full((2, 4), NAN, device=DEVICE)
    reduce.gather_weight_and_sum(rows, row_of_pair, weights, scale=2.0, out=out)
    first = weights[0, 0] * rows[5] + (weights[0, 1] + weights[0, 2]) * rows[0]
    second = weights[1, 0] * rows[2] + weights[1, 1] * rows[3]
    torch.testing.assert_close(out, 2.0 * torch.stack([first, second]))


@pytest.mark.usefixtures("path")
def test_unreduced_rows_are_token_major_and_zero_for_skipped_pairs() -> None:
    rows, weights = place_nan_before(random_normal(5, 4)), random_normal(2, 2, seed=1)
    rows[0] = NAN
    row_of_pair = torch.tensor([[4, -1], [1, 1]], dtype=torch.int32, device=DEVICE)
    out = torch.full((2, 2, 4), NAN, device=DEVICE)
    reduce.gather_rows(rows, row_of_pair, weights, scale=3.0, out=out)
    expected = torch.stack([rows[4], 0 * rows[4], rows[1], rows[1]]).view(2, 2, 4)
    torch.testing.assert_close(out, 3.0 * weights[..., None] * expected)
    reduce.gather_rows(rows, row_of_pair, None, scale=1.0, out=out)
    assert torch.equal(out, expected)


@pytest.mark.usefixtures("path")
def test_scale_rows_works_in_place() -> None:
    rows, weights = random_normal(3, 2, 5), random_normal(3, 2, seed=1)
    expected = 2.0 * weights[..., None] * rows
    reduce.scale_rows(rows, weights, scale=2.0, out=rows)
    torch.testing.assert_close(rows, expected)
    reduce.scale_rows(rows, None, scale=1.0, out=rows)
    torch.testing.assert_close(rows, expected)


SPECS = [ActivationSpec.parse(kind) for kind in GATED + UNGATED]
SPECS += [
    ActivationSpec.parse(text)
    for text in (
        "silu:interleaved=true",
        "swiglu_oai:interleaved=false",
        "gelu:limit=7",
        "gelu_tanh:limit=7",
        "situ:alpha=50,limit=25",
        "situ:limit=2,interleaved=true",
    )
]


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_are_rounded_once(spec: ActivationSpec, dtype: torch.dtype) -> None:
    """The error is at most that of one rounding. Inputs reach 12, so a limit of 7 clamps some."""
    intermediate = 33
    x = (4 * random_normal(6, intermediate * (2 if spec.gated else 1))).to(dtype)
    out = torch.full((6, intermediate), NAN, dtype=dtype, device=DEVICE)
    activation.gated_activation(x, spec, out)
    exact = reference.activation(x.double(), spec)
    rounded = exact.to(dtype).double()
    allowed = 1.05 * (rounded - exact).norm() + 1e-6 * exact.norm()
    assert float((out.double() - exact).norm()) <= float(allowed)


def test_an_activation_of_the_wrong_width_is_refused() -> None:
    with pytest.raises(ShapeError, match="need"):
        activation.gated_activation(torch.zeros(2, 6), ActivationSpec("silu"), torch.zeros(2, 6))


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("groups", [1, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_scales_move_with_their_rows(dtype: torch.dtype, groups: int) -> None:
    x = (40 * random_normal(3, 1100)).to(dtype)
    scale = random_normal(3, groups)
    row_of_pair = torch.tensor([[4, -1], [0, 6], [-1, -1]], dtype=torch.int32, device=DEVICE)
    rows = torch.zeros(7, 1100, dtype=torch.uint8, device=DEVICE).view(dtype)
    scales = torch.full((7, groups), -3.0, device=DEVICE)
    permute.permute_tokens(x, row_of_pair, None, rows_RH=rows, scale_TG=scale, scale_rows_RG=scales)
    expected, expected_scale = (
        torch.zeros_like(rows.view(torch.uint8)),
        torch.full_like(scales, -3.0),
    )
    for row, token in ((4, 0), (0, 1), (6, 1)):
        expected[row], expected_scale[row] = x.view(torch.uint8)[token], scale[token]
    assert torch.equal(rows.view(torch.uint8), expected)
    assert torch.equal(scales, expected_scale)
