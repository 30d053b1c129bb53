"""Check the operations that parts share, on inputs that the calls of a case may not have.

The operations of `modular_kernel.ops` quantize rows, count and number pairs, and copy, sum or clear
rows. A pair is a token together with one of its K experts. Each operation runs with its kernels and
with its torch reference, also under lowered limits (`lowered_limits`), and the bits of the outputs
are compared. Sums have terms that are exact in float32, so that their order does not matter.

`checks.check_shared_operations` reports the first difference. It is computed once per process.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial

import torch

from modular_kernel.errors import InputError
from modular_kernel.ops.batch import assign_rows, assign_rows_scratch
from modular_kernel.ops.count import count_pairs, counts_spec, uncounted_local_ids
from modular_kernel.ops.expert_slots import Numbering, Pairs, number_pairs
from modular_kernel.ops.permute import permute_tokens
from modular_kernel.ops.permute_quantize import permute_and_quantize
from modular_kernel.ops.quantize import (
    QuantizedRows,
    quantize_rows,
    quantize_specs,
    take_quantized,
)
from modular_kernel.ops.reduce import gather_rows, gather_weight_and_sum, scale_rows, weight_and_sum
from modular_kernel.ops.slots_and_quantize import number_and_quantize
from modular_kernel.ops.sort import sort_pairs, sort_specs
from modular_kernel.ops.valid_rows import BatchedRows, PairRows, ValidRows
from modular_kernel.ops.zero_rows import zero_rows
from modular_kernel.replay.launch.runtime import use_triton
from modular_kernel.spec.placement import Placement
from modular_kernel.spec.problem import IdSpace
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.tensors import DispatchedRouting, Routing
from modular_kernel.testing.verify.operation_cases import compare_cases
from modular_kernel.workspace import Workspace

_CPU = torch.device("cpu")
_FILL = 0x5A  # byte of memory that has not been written
_EXPERTS, _LOCAL_EXPERTS = 6, 3
# Maps experts to local experts. Values outside [0, _LOCAL_EXPERTS) mark experts on other ranks.
_EXPERT_MAP = (2, -1, 0, _LOCAL_EXPERTS, 1, -(2**31))
_SEGMENTS, _CAPACITY = 3, 5
_COUNTS = (2, 0, _CAPACITY)  # rows in use of each segment
# Schemes, and numbers of columns. The last group of most rows has fewer columns than the others.
_SCHEMES = (
    ("fp8_w8a8_block:block=48x48", 200),
    ("fp8_w8a8_block:block=32x32", 192),  # several groups fit a tile
    ("int8_w8a8_block:block=96x96", 200),  # a group exceeds the columns of a tile
    ("fp8_w8a8_channel", 200),
    ("int8_w8a8_channel", 200),
    ("fp8_w8a8_tensor", 200),
    ("fp8_w8a8_tensor:static=true", 200),
)
# Factors of values, all below 1, so that no masked lane may count as a larger value.
_FACTOR = 2.0**-6

Tensors = Mapping[str, torch.Tensor]


@cache
def find_wrong_operations() -> tuple[str, ...]:
    """Return a message for each operation whose kernels and torch reference differ."""
    if not use_triton(torch.zeros(1)):
        return ()
    outcomes = compare_cases(list_cases())
    return tuple(outcome for outcome, expected in outcomes if outcome != expected)


def list_cases() -> Mapping[str, Callable[[], Tensors]]:
    """Return the cases by name. Each returns the outputs of an operation."""
    cases: dict[str, Callable[[], Tensors]] = {}
    for scheme_text, columns in _SCHEMES:
        for source in ("all", "pairs", "batched"):
            name = f"quantize_rows {scheme_text}, {source} rows"
            cases[name] = partial(_quantize_rows, scheme_text, columns, source)
        if scheme_text != "fp8_w8a8_tensor":
            cases[f"permute_and_quantize {scheme_text}"] = partial(
                _permute_and_quantize, scheme_text, columns
            )
            cases[f"number_and_quantize {scheme_text}"] = partial(
                _number_and_quantize, scheme_text, columns
            )
    for space in IdSpace:
        for has_map in (False, True):
            name = f"{space.name} ids, expert map {has_map}"
            cases[f"pairs, {name}"] = partial(_place_pairs, space, has_map=has_map)
    cases |= {
        "number_pairs": _number_pairs,
        "permute_tokens": _permute_tokens,
        "reduce": _reduce_rows,
    }
    return cases | {"zero_rows": _zero_rows, "wrong shapes": _check_rejections}


def _draw_random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(shape, generator=generator, dtype=torch.float32, device=_CPU) - 0.5
    # The maximum of every set of rows and columns is near the end of the set.
    for dim, size in enumerate(shape):
        factors = torch.arange(1, size + 1, dtype=torch.float32, device=_CPU) / size
        values *= factors.view([-1 if i == dim else 1 for i in range(len(shape))])
    return (values * _FACTOR).to(dtype)


def _make_unwritten(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor filled with _FILL, which marks elements that have not been written."""
    out = torch.empty(shape, dtype=dtype, device=_CPU)
    out.view(torch.uint8).fill_(_FILL)
    return out


def _make_routing(
    tokens: int, top_k: int, space: IdSpace = IdSpace.GLOBAL, *, has_map: bool = True
) -> DispatchedRouting:
    """Return a routing with skipped pairs, repeated experts, and ids that are out of range."""
    generator = torch.Generator().manual_seed(tokens)
    ids_TK = torch.randint(
        -2, _EXPERTS + 2, (tokens, top_k), generator=generator, dtype=torch.int32, device=_CPU
    )
    expert_map = torch.tensor(_EXPERT_MAP, dtype=torch.int32, device=_CPU) if has_map else None
    count = torch.zeros(1, dtype=torch.int32, device=_CPU)
    return DispatchedRouting(None, ids_TK, space, _EXPERTS, expert_map, count)


def _make_quantized_rows(
    scheme: QuantScheme, rows: int, columns: int, *, segments: int = 1, along_rows: bool
) -> QuantizedRows:
    """Return buffers for quantized rows, with a static scale if the scheme has one."""
    workspace = Workspace(quantize_specs("x", scheme, rows, columns, segments=segments), _CPU)
    scale = torch.tensor([_FACTOR / 300], dtype=torch.float32, device=_CPU)
    out = take_quantized(
        workspace,
        "x",
        scheme,
        (rows, columns),
        segments=segments,
        static_scale=scale if scheme.static else None,
        along_rows=along_rows,
    )
    for tensor in (out.q_RK, out.scale, out.partials):
        if tensor is not None and tensor is not scale:
            tensor.view(torch.uint8).fill_(_FILL)
    return out


def _quantize_rows(scheme_text: str, columns: int, source: str) -> Tensors:
    """Quantize rows with both layouts of the scales, and with weights of the rows."""
    scheme, written = QuantScheme.parse(scheme_text), dict[str, torch.Tensor]()
    rows, segments = 7, 1
    valid_rows: ValidRows = None
    if source == "pairs":
        routing = _make_routing(7, 2)
        rows, valid_rows = 14, PairRows(routing, _LOCAL_EXPERTS)
    elif source == "batched":
        rows, segments = _SEGMENTS * _CAPACITY, _SEGMENTS
        counts_e = torch.tensor(_COUNTS, dtype=torch.int32, device=_CPU)
        valid_rows = BatchedRows(counts_e)
    x_RK = _draw_random(rows, columns + 8)[:, :columns]
    weights_R = _draw_random(rows, dtype=torch.float32, seed=1) * 3
    for along_rows in (False, True):
        for row_weights_R in (None, weights_R):
            out = _make_quantized_rows(
                scheme, rows, columns, segments=segments, along_rows=along_rows
            )
            quantize_rows(x_RK, scheme, out=out, valid_rows=valid_rows, row_weights_R=row_weights_R)
            name = f"along rows {along_rows}, weights {row_weights_R is not None}"
            written[f"values, {name}"] = out.q_RK
            written[f"scales, {name}"] = out.scale
    return written


def _make_row_of_pair(tokens: int, top_k: int) -> torch.Tensor:
    """Return the row of each pair, in reverse order. Some pairs have none."""
    rows = torch.arange(tokens * top_k - 1, -1, -1, dtype=torch.int32, device=_CPU)
    rows[::4] = -1
    return rows.view(tokens, top_k)


def _permute_and_quantize(scheme_text: str, columns: int) -> Tensors:
    scheme, written = QuantScheme.parse(scheme_text), dict[str, torch.Tensor]()
    tokens, top_k = 4, 3
    x_TH, row_of_pair_TK = _draw_random(tokens, columns), _make_row_of_pair(tokens, top_k)
    weights_TK = _draw_random(tokens, top_k, dtype=torch.float32, seed=1) * 3
    for along_rows in (False, True):
        for weights in (None, weights_TK):
            out = _make_quantized_rows(scheme, tokens * top_k, columns, along_rows=along_rows)
            permute_and_quantize(x_TH, row_of_pair_TK, weights, scheme, out=out)
            name = f"along rows {along_rows}, weights {weights is not None}"
            written |= {f"values, {name}": out.q_RK, f"scales, {name}": out.scale}
    return written


def _list_numberings() -> tuple[Numbering, ...]:
    linear = Placement.linear(_EXPERTS, 3)
    uneven = Placement(((0, 1, 2), (3, 4), (5,)))
    return (
        Numbering.of(linear, _CPU),
        Numbering.of(linear, _CPU, 5, num_sinks=2),
        Numbering.of(uneven, _CPU),
        Numbering.of(linear.with_copies({0: (2,), 5: (0, 1)}), _CPU, 1),
    )


def _make_pairs(numbering: Numbering, tokens: int, top_k: int) -> Pairs:
    """Return pairs with exact weights, whose rows have gaps, and outputs to write."""
    ids_TK = _make_routing(tokens, top_k + 1).topk_ids_TK[:, :top_k]
    generator = torch.Generator().manual_seed(1)
    weights_TK = torch.randint(1, 9, (tokens, top_k + 2), generator=generator, device=_CPU)
    return Pairs(
        Routing(weights_TK.float()[:, :top_k] / 8, ids_TK),
        numbering,
        _make_unwritten(tokens, top_k, dtype=torch.int32),
        _make_unwritten(tokens, top_k, dtype=torch.float32),
        torch.zeros(1, dtype=torch.int32, device=_CPU),
        join=numbering.num_sinks > 0,
        factor=0.5,
    )


def _number_pairs() -> Tensors:
    """Assign numbers to the pairs of few and of many tokens."""
    written = dict[str, torch.Tensor]()
    for index, numbering in enumerate(_list_numberings()):
        for tokens, top_k in ((1, 1), (5, 3), (40, 3)):
            pairs = _make_pairs(numbering, tokens, top_k)
            number_pairs(pairs)
            outputs = {"numbers": pairs.numbers_TK, "weights": pairs.weights_TK}
            outputs["invalid ids"] = pairs.invalid_ids
            written |= {f"{name} {index} {tokens}": t for name, t in outputs.items()}
    return written


def _number_and_quantize(scheme_text: str, columns: int) -> Tensors:
    scheme, tokens = QuantScheme.parse(scheme_text), 5
    pairs = _make_pairs(_list_numberings()[1], tokens, 3)
    out = _make_quantized_rows(scheme, tokens, columns, along_rows=False)
    number_and_quantize(_draw_random(tokens, columns), scheme, pairs, out=out)
    return {
        "values": out.q_RK,
        "scales": out.scale,
        "numbers": pairs.numbers_TK,
        "weights": pairs.weights_TK,
        "invalid ids": pairs.invalid_ids,
    }


def _place_pairs(space: IdSpace, *, has_map: bool) -> Tensors:
    """Count, batch and sort pairs of less than one chunk, and of several chunks.

    has_map: whether the routing has an expert map, which is not used for local ids.
    """
    written = dict[str, torch.Tensor]()
    num_local = _LOCAL_EXPERTS if has_map and space is IdSpace.GLOBAL else _EXPERTS - 1
    for tokens, top_k in ((1, 1), (5, 3), (90, 3)):
        routing, name = _make_routing(tokens, top_k, space, has_map=has_map), f"{tokens} tokens"
        capacity = tokens + 1
        rows_TK = _make_unwritten(tokens, top_k, dtype=torch.int32)
        counts_e = _make_unwritten(num_local, dtype=torch.int32)
        spec = assign_rows_scratch(tokens, top_k, num_local)
        assign_rows(
            routing,
            capacity=capacity,
            row_of_pair_TK=rows_TK,
            counts_e=counts_e,
            scratch=_make_unwritten(*spec.shape, dtype=torch.int32),
        )
        workspace = Workspace(sort_specs(tokens, top_k, 2, num_local), _CPU)
        result = sort_pairs(routing, block_m=2, num_local=num_local, workspace=workspace)
        num_tiles, num_rows = int(result.tiles[-1]), int(result.starts[-1])
        tiles = result.tiles[:-1].view(3, -1)[:, :num_tiles]
        written |= {
            f"batched rows of {name}": rows_TK,
            f"counts of {name}": counts_e,
            f"sorted rows of {name}": result.row_of_pair_TK,
            f"sorted tokens of {name}": result.token_of_row[:num_rows],
            f"starts of {name}": result.starts,
            f"tiles of {name}": tiles,
            f"invalid ids of {name}": routing.invalid_ids,
        }
        if use_triton(rows_TK):  # the kernels have no torch reference
            _check_totals(_make_routing(tokens, top_k, space, has_map=has_map), num_local)
    _check_counts_without_tokens(_make_routing(0, 3, space, has_map=has_map), num_local)
    return written


def _check_counts_without_tokens(routing: DispatchedRouting, num_local: int) -> None:
    """Check that `assign_rows` writes counts of 0 if there are no tokens."""
    counts_e = _make_unwritten(num_local, dtype=torch.int32)
    assign_rows(
        routing,
        capacity=1,
        row_of_pair_TK=torch.empty(routing.topk_ids_TK.shape, dtype=torch.int32, device=_CPU),
        counts_e=counts_e,
        scratch=_make_unwritten(*assign_rows_scratch(0, 3, num_local).shape, dtype=torch.int32),
    )
    assert not counts_e.any(), f"counts without tokens: {counts_e.tolist()}"


def _check_totals(routing: DispatchedRouting, num_local: int) -> None:
    """Check the number of pairs of each local expert, and the number of skipped pairs.

    The check runs without and with `dedupe`, which counts repeated pairs of a token and an expert
    once.
    """
    buckets_TK = uncounted_local_ids(routing, num_local) + 1
    for dedupe in (False, True):
        spec = counts_spec(buckets_TK.numel(), num_local)
        scratch = _make_unwritten(*spec.shape, dtype=torch.int32)
        counts = count_pairs(routing, num_local, scratch=scratch, dedupe=dedupe)
        expected = [0] * (num_local + 1)
        for row in buckets_TK.tolist():
            for k, bucket in enumerate(row):
                expected[bucket] += not (dedupe and bucket and bucket in row[:k])
        assert counts.totals.tolist() == expected, counts.totals


def _permute_tokens() -> Tensors:
    """Copy tokens, their scales, and tokens times weights to the rows of pairs."""
    tokens, top_k, groups = 4, 3, 5
    row_of_pair_TK = _make_row_of_pair(tokens, top_k)
    weights_TK = _draw_random(tokens, top_k, dtype=torch.float32, seed=1)
    scale_TG = _draw_random(tokens, groups, dtype=torch.float32, seed=2)
    written = dict[str, torch.Tensor]()
    for hidden in (1, 33, 70):
        x_TH = _draw_random(tokens, hidden + 3)[:, :hidden]
        for weights in (None, weights_TK):
            rows_RH = _make_unwritten(tokens * top_k, hidden, dtype=x_TH.dtype)
            scale_RG = _make_unwritten(tokens * top_k, groups + 1, dtype=torch.float32)
            permute_tokens(
                x_TH,
                row_of_pair_TK,
                weights,
                rows_RH=rows_RH,
                scale_TG=None if weights is None else scale_TG,
                scale_rows_RG=None if weights is None else scale_RG[:, :groups],
            )
            name = f"{hidden} columns, weights {weights is not None}"
            written |= {f"rows, {name}": rows_RH, f"scales, {name}": scale_RG}
    return written


def _reduce_rows() -> Tensors:
    """Weight and sum rows whose terms are exact, with and without a routing."""
    tokens, top_k = 5, 3
    routing, row_of_pair_TK = _make_routing(tokens, top_k), _make_row_of_pair(tokens, top_k)
    generator = torch.Generator().manual_seed(1)
    written = dict[str, torch.Tensor]()
    for hidden in (1, 33, 70):
        rows_TKH = torch.randint(-8, 9, (tokens, top_k, hidden), generator=generator, device=_CPU)
        rows_TKH = rows_TKH.to(torch.bfloat16)
        rows_RH, weights_TK = rows_TKH.flatten(0, 1), _make_routing(tokens, top_k).topk_ids_TK / 4
        for weights in (None, weights_TK):
            outs = [_make_unwritten(tokens, hidden, dtype=rows_TKH.dtype) for _ in range(3)]
            weight_and_sum(rows_TKH, weights, scale=0.5, out=outs[0])
            weight_and_sum(
                rows_TKH, weights, scale=1.0, out=outs[1], routing=routing, num_local=_LOCAL_EXPERTS
            )
            gather_weight_and_sum(rows_RH, row_of_pair_TK, weights, scale=2.0, out=outs[2])
            pairs = [_make_unwritten(tokens, top_k, hidden, dtype=rows_TKH.dtype) for _ in range(3)]
            scale_rows(rows_TKH, weights, scale=0.5, out=pairs[0])
            scale_rows(
                rows_TKH,
                weights,
                scale=1.0,
                out=pairs[1],
                routing=routing,
                num_local=_LOCAL_EXPERTS,
            )
            gather_rows(rows_RH, row_of_pair_TK, weights, scale=2.0, out=pairs[2])
            name = f"{hidden} columns, weights {weights is not None}"
            written |= {f"{name}, output {i}": t for i, t in enumerate((*outs, *pairs))}
    return written


def _zero_rows() -> Tensors:
    """Clear the first rows of segments."""
    written = dict[str, torch.Tensor]()
    for hidden in (1, 33, 70):
        x_SCH = _make_unwritten(_SEGMENTS, _CAPACITY, hidden, dtype=torch.bfloat16)
        zero_rows(x_SCH, torch.tensor(_COUNTS, dtype=torch.int32, device=_CPU))
        written[f"{hidden} columns"] = x_SCH
    return written


def _check_rejections() -> Tensors:
    """Check that operations raise InputError for outputs of another shape or dtype."""
    scheme, tokens, columns = QuantScheme.parse("fp8_w8a8_block:block=48x48"), 4, 96
    x_TH, pairs = _draw_random(tokens, columns), _make_pairs(_list_numberings()[0], tokens, 3)
    out, rows_TK = (
        _make_quantized_rows(scheme, tokens, columns, along_rows=False),
        _make_row_of_pair(tokens, 1),
    )
    wrong_outputs = (
        replace(out, q_RK=out.q_RK[:, :-1]),
        replace(out, q_RK=out.q_RK[:-1]),
        replace(out, q_RK=out.q_RK.view(torch.int8)),
        replace(out, scale=out.scale[:-1]),
        replace(out, scale=out.scale[:, :-1]),
    )
    for wrong_output in wrong_outputs:
        _check_raises(partial(quantize_rows, x_TH, scheme, out=wrong_output))
        _check_raises(partial(number_and_quantize, x_TH, scheme, pairs, out=wrong_output))
        if len(wrong_output.q_RK) == len(wrong_output.scale):  # its output has any number of rows
            _check_raises(
                partial(permute_and_quantize, x_TH, rows_TK, None, scheme, out=wrong_output)
            )
    _check_raises(partial(number_and_quantize, x_TH[:-1], scheme, pairs, out=out))
    for name in ("numbers_TK", "weights_TK"):
        _check_raises(partial(number_pairs, replace(pairs, **{name: getattr(pairs, name)[:-1]})))
    counts = torch.zeros(tokens, dtype=torch.int32, device=_CPU)
    _check_raises(partial(zero_rows, x_TH[:, None], counts[:-1]))
    _check_raises(partial(zero_rows, x_TH[:, None, ::2], counts))
    return {}


def _check_raises(call: Callable[[], object]) -> None:
    with suppress(InputError):
        call()
        raise AssertionError(f"{call} is accepted")
