"""Check the results of a reducer on rows and ids that a kernel may never produce.

Rows and router weights of skipped pairs are NaN. The expert map maps experts of other ranks to
values outside [0, e), including e. The values of one token are chosen so that a float32 sum depends
on its order.
"""

import math
from collections.abc import Iterator
from typing import Final

import torch

from modular_kernel.machine import prefer_torch_reference
from modular_kernel.spec.problem import IdSpace, Reduce
from modular_kernel.tensors import DispatchedRouting, ExpertRows
from modular_kernel.testing.verify.trial import Trial
from modular_kernel.utils.optional_imports import DISTRIBUTION_PACKAGES

_NUM_LOCAL: Final = 2
_EXPERT_MAP = (1, -1, _NUM_LOCAL, 0, _NUM_LOCAL + 7, -(2**31))
_IDS = ((0, 2, 3, 0, 4), (-1, 5, 1, 3, 6))
# Router weights and row values, whose products are exact. The products of the first token are 2^24,
# 1 and 1. Summed in the order of k, they give 2^24, because 2^24 + 1 rounds down to 2^24 in
# float32. An order that starts with 1 + 1 gives 2^24 + 2.
_WEIGHTS = ((0.5, math.nan, 2.0, 2.0, math.nan), (math.nan, math.nan, math.nan, 4.0, math.nan))
_VALUES = ((2.0**25, math.nan, 0.5, 0.5, math.nan), (math.nan, math.nan, math.nan, 3.0, math.nan))
_COLUMNS = (1.0, -2.0, 4.0)  # factors of the values in the columns of a row
_SCALE = 0.5


def check_reducer_results(trial: Trial) -> Iterator[str]:
    """Check that a reducer of this project skips pairs, and sums the others in the order of k.

    The torch reference of a reducer may sum in a different order.
    """
    reduce, device = trial.kernel.experts.finalize_weight_and_reduce_impl(), trial.first.device
    is_own = type(reduce).__module__.partition(".")[0] in DISTRIBUTION_PACKAGES
    if reduce.kind in (Reduce.DELEGATE, Reduce.NOOP) or not is_own:
        return
    layouts = {
        None: (_make_rows_by_pair, _make_rows_by_expert),
        Reduce.CONTIGUOUS: (_make_rows_by_pair,),
        Reduce.NAIVE_BATCHED: (_make_rows_by_expert,),
    }[reduce.kind]
    weighted = getattr(reduce, "weighted", True)  # an attribute of KeepTopK
    expected = _compute_expected(weighted=weighted, sums=reduce.kind is not None)
    for make_rows in layouts:
        for is_reference in (False, True)[: 2 if device.type == "cpu" else 1]:
            out = torch.full(expected.shape, math.nan, device=device)
            with prefer_torch_reference(enabled=is_reference):
                reduce.apply(make_rows(device), out)
            rtol = 1e-6 if is_reference else 0.0
            if not torch.allclose(out.cpu(), expected, rtol=rtol, atol=0.0):
                condition = "with torch operations" if is_reference else "in the order of k"
                yield f"got {out[..., 0].tolist()}, need {expected[..., 0].tolist()} {condition}"


def _compute_expected(*, weighted: bool, sums: bool) -> torch.Tensor:
    """Compute the expected output in float32: (T, H) if `sums`, otherwise (T, K, H)."""
    local_ids_TK = torch.tensor([[_get_local_id(expert) for expert in row] for row in _IDS])
    values = torch.tensor(_VALUES)[..., None] * torch.tensor(_COLUMNS)
    if weighted:
        values = values * torch.tensor(_WEIGHTS)[..., None]
    values = values.masked_fill((local_ids_TK < 0)[..., None], 0.0)
    if not sums:
        return values * _SCALE if weighted else values
    summed_values = torch.zeros_like(values[:, 0])
    for pair_values in values.unbind(1):
        summed_values += pair_values
    return summed_values * _SCALE


def _get_local_id(expert: int) -> int:
    """Return the local expert of a global id, or -1 if the pair is skipped."""
    local = _EXPERT_MAP[expert] if 0 <= expert < len(_EXPERT_MAP) else -1
    return local if 0 <= local < _NUM_LOCAL else -1


def _make_rows_by_pair(device: torch.device) -> ExpertRows:
    """Make rows (T, K, H) with global ids and an expert map."""
    routing = DispatchedRouting(
        None,
        torch.tensor(_IDS, dtype=torch.int32, device=device),
        IdSpace.GLOBAL,
        len(_EXPERT_MAP),
        torch.tensor(_EXPERT_MAP, dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
    )
    rows = torch.tensor(_VALUES)[..., None] * torch.tensor(_COLUMNS)
    weights_TK = torch.tensor(_WEIGHTS, device=device)
    return ExpertRows(rows.to(device), None, weights_TK, _SCALE, routing, _NUM_LOCAL)


def _make_rows_by_expert(device: torch.device) -> ExpertRows:
    """Make rows (e, C, H). Row 0 of each expert, which no pair uses, is NaN."""
    row_of_pair = torch.full((len(_IDS), len(_IDS[0])), -1, dtype=torch.int32)
    capacity = 1 + row_of_pair.numel()
    rows = torch.full((_NUM_LOCAL * capacity, len(_COLUMNS)), math.nan)
    counts = [1] * _NUM_LOCAL
    for token, experts in enumerate(_IDS):
        for k, local in enumerate(map(_get_local_id, experts)):
            if local >= 0:
                row = local * capacity + counts[local]
                counts[local] += 1
                row_of_pair[token, k] = row
                rows[row] = _VALUES[token][k] * torch.tensor(_COLUMNS)
    rows_eCH = rows.view(_NUM_LOCAL, capacity, len(_COLUMNS)).to(device)
    return ExpertRows(
        rows_eCH, row_of_pair.to(device), torch.tensor(_WEIGHTS, device=device), _SCALE
    )
