"""`ep_scatter` sorts rows by expert into blocks, and `ep_gather` computes weighted sums of rows."""

from typing import Any

import pytest
import torch

from experts.compat.ep_scatter import ALIGNMENT, ep_gather, ep_scatter, padded_counts
from modular_kernel.errors import (
    CapacityError,
    DtypeError,
    InputError,
    LayoutError,
    RoutingError,
    ShapeError,
)

R, H, E, G = 9, 32, 4, 2
ARGUMENT_NAMES = (
    "recv_x", "recv_x_scale", "recv_topk", "num_recv_tokens_per_expert", "expert_start_loc",
    "output_tensor", "output_tensor_scale", "m_indices", "output_index",
)  # fmt: skip


def make_scatter_arguments(
    top_k: int = 2, *, scales: bool = True, ids: Any = None
) -> dict[str, Any]:
    g = torch.Generator().manual_seed(top_k)
    if ids is None:
        ids = torch.randint(-1, E - 1, (R, top_k), generator=g)  # the last expert has no rows
    counts = [int((ids == expert).sum()) for expert in range(E)]
    rows = sum(padded_counts(counts)) + 3
    values = (
        torch.randn(len(ids), H, generator=g), torch.rand(len(ids), G, generator=g), ids, counts,
        torch.full((E,), -7, dtype=torch.int32), torch.full((rows, H), torch.nan),
        torch.full((rows, G), torch.nan), torch.full((rows,), -7, dtype=torch.int32),
        torch.full(tuple(ids.shape), -7, dtype=torch.int32),
    )  # fmt: skip
    arguments = dict(zip(ARGUMENT_NAMES, values, strict=True))
    return arguments if scales else arguments | {"recv_x_scale": None, "output_tensor_scale": None}


@pytest.mark.parametrize("scales", [True, False])
@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_ep_scatter_sorts_rows_by_expert(top_k: int, scales: bool) -> None:
    arguments = make_scatter_arguments(top_k, scales=scales)
    ep_scatter(*arguments.values())
    ids, counts = arguments["recv_topk"], arguments["num_recv_tokens_per_expert"]
    starts = [sum(padded_counts(counts[:expert])) for expert in range(E)]
    assert arguments["expert_start_loc"].tolist() == starts
    expected_experts = [-1] * len(arguments["m_indices"])
    for expert, (start, count) in enumerate(zip(starts, counts, strict=True)):
        expected_experts[start : start + count] = [expert] * count
        pairs = (ids == expert).nonzero().tolist()  # in the order of rows
        assert [int(arguments["output_index"][r, k]) for r, k in pairs] == list(
            range(start, start + count)
        )
        rows = torch.tensor([row for row, _ in pairs], dtype=torch.long)
        block = slice(start, start + count)
        assert torch.equal(arguments["output_tensor"][block], arguments["recv_x"][rows])
        if scales:
            assert torch.equal(
                arguments["output_tensor_scale"][block], arguments["recv_x_scale"][rows]
            )
    assert arguments["m_indices"].tolist() == expected_experts
    assert torch.equal(arguments["output_index"] < 0, ids < 0)
    padding = arguments["m_indices"] < 0
    assert bool(arguments["output_tensor"][padding].isnan().all())


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_gathering_scattered_rows_applies_router_weights(top_k: int) -> None:
    arguments = make_scatter_arguments(top_k)
    ep_scatter(*arguments.values())
    weights = torch.rand(R, top_k)
    out = torch.full((R, H), torch.nan)
    ep_gather(
        arguments["output_tensor"], arguments["recv_topk"], weights, arguments["output_index"], out
    )
    sums = weights.double().masked_fill(arguments["recv_topk"] < 0, 0).sum(1, keepdim=True)
    assert torch.allclose(out.double(), arguments["recv_x"].double() * sums, atol=1e-5)


def test_counts_are_padded_to_blocks_of_deep_gemm() -> None:
    assert padded_counts([0, 1, ALIGNMENT, ALIGNMENT + 1]) == [0, 128, 128, 256]


def test_empty_input_is_accepted() -> None:
    arguments = make_scatter_arguments(ids=torch.empty(0, 2, dtype=torch.int64))
    ep_scatter(**arguments)
    assert arguments["m_indices"].tolist() == [-1] * 3
    out = torch.empty(0, H)
    ep_gather(arguments["output_tensor"], arguments["recv_topk"], torch.empty(0, 2),
              arguments["output_index"], out)  # fmt: skip


INVALID_ARGUMENTS: tuple[tuple[dict[str, Any], type[InputError], str], ...] = (
    ({"num_recv_tokens_per_expert": [1, 1, 1, 0]}, RoutingError, "num_recv_tokens_per_expert"),
    ({"num_recv_tokens_per_expert": [-1, 1, 1, 1]}, RoutingError, "got -1, need >= 0"),
    ({"recv_topk": torch.full((R, 2), E)}, RoutingError, "num_recv_tokens_per_expert"),
    ({"recv_topk": torch.zeros(R, 2)}, DtypeError, "recv_topk: got torch.float32"),
    ({"recv_topk": torch.zeros(R - 1, 2, dtype=torch.int32)}, ShapeError, "recv_topk: got"),
    ({"recv_x_scale": None}, ShapeError, "got one of them, need both or neither"),
    ({"output_tensor": torch.empty(387, H + 1)}, ShapeError, "output_tensor: got"),
    ({"output_tensor": torch.empty(387, H).half()}, DtypeError, "output_tensor: got torch.float16"),
    ({"m_indices": torch.empty(387)}, DtypeError, "m_indices: got torch.float32"),
    ({"output_index": torch.empty(2, R, dtype=torch.int32).T}, LayoutError, "output_index: got"),
)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    INVALID_ARGUMENTS,
    ids=[f"{'-'.join(changes)}-{error.__name__}" for changes, error, _ in INVALID_ARGUMENTS],
)
def test_invalid_arguments_are_refused(
    changes: dict[str, Any], error: type[InputError], message: str
) -> None:
    with pytest.raises(error, match=message):
        ep_scatter(**make_scatter_arguments() | changes)


def test_the_capacity_is_checked_before_writing() -> None:
    arguments = make_scatter_arguments()
    too_few_rows = sum(padded_counts(arguments["num_recv_tokens_per_expert"])) - 1
    for name in ("output_tensor", "output_tensor_scale", "m_indices"):
        arguments[name] = arguments[name][:too_few_rows]
    with pytest.raises(CapacityError, match=f"output_tensor: got {too_few_rows} rows, need >= "):
        ep_scatter(**arguments)
    assert arguments["expert_start_loc"].tolist() == [-7] * E


def test_missing_rows_are_not_gathered() -> None:
    index = torch.tensor([[5]], dtype=torch.int32)
    with pytest.raises(RoutingError, match="input_index: got 5, need -1 to 4"):
        ep_gather(torch.zeros(5, H), index, torch.ones(1, 1), index, torch.zeros(1, H))
