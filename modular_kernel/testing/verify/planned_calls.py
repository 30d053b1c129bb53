"""Calls whose launches `launch_plans` compares with a record.

They have the sizes of models, and tensors without memory. They launch the operations that parts
share, and the kernels of our exchange parts, but not those of experts parts.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from modular_kernel.catalog import load_catalog
from modular_kernel.contracts import PrepareAndFinalize
from modular_kernel.ops.activation import gated_activation
from modular_kernel.ops.align import align, align_specs
from modular_kernel.ops.batch import assign_rows, assign_rows_scratch
from modular_kernel.ops.expert_slots import Numbering, Pairs, number_pairs
from modular_kernel.ops.permute import permute_tokens
from modular_kernel.ops.permute_quantize import permute_and_quantize
from modular_kernel.ops.quantize import (
    QuantizedRows,
    activation_and_quantize,
    quantize_rows,
    quantize_specs,
    take_quantized,
)
from modular_kernel.ops.reduce import gather_rows, gather_weight_and_sum, scale_rows, weight_and_sum
from modular_kernel.ops.slots_and_quantize import number_and_quantize
from modular_kernel.ops.sort import sort_pairs, sort_specs
from modular_kernel.ops.valid_rows import BatchedRows
from modular_kernel.ops.zero_rows import zero_rows
from modular_kernel.spec.placement import Placement
from modular_kernel.spec.problem import ActivationSpec, IdSpace
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.tensors import DispatchedRouting, Routing
from modular_kernel.testing.cases.scenario_names import is_builtin
from modular_kernel.workspace import Workspace

_META = torch.device("meta")
_NUM_TOKENS = (1, 17)  # of additional calls with few tokens
_TOP_K, _EXPERTS, _LOCAL_EXPERTS = 8, 64, 8
_SCHEMES = (
    "fp8_w8a8_block",
    "fp8_w8a8_channel",
    "fp8_w8a8_tensor",
    "fp8_w8a8_tensor:static=true",
    "int8_w8a8_block:block=96x96",
)
# Tokens, columns, stride of the rows, dtype, and segments.
_ROWS: tuple[tuple[Any, ...], ...] = (
    (1, 7168, 7168, torch.bfloat16),
    (64, 32768, 32768, torch.bfloat16),  # more columns than a tile has
    (64, 2880, 2880, torch.bfloat16),
    (4096, 7168, 7168, torch.bfloat16),
    (4096, 7168, 7175, torch.bfloat16),  # rows that are not aligned to 16 bytes
    (4096, 7168, 7176, torch.bfloat16),
    (4096, 7168, 7168, torch.float32),
    (2048, 7168, 7168, torch.bfloat16, 8),
)
# Tokens and columns.
_SIZES = ((1, 7168), (4, 96), (17, 2880), (4096, 7168))


def list_calls() -> Mapping[str, Callable[[], object]]:
    """Return the calls by name."""
    calls: dict[str, Callable[[], object]] = {
        f"quantize {scheme} {' '.join(map(str, rows))}": partial(_quantize, scheme, *rows)
        for scheme in _SCHEMES
        for rows in _ROWS
    }
    for scheme in ("fp8_w8a8_block", "fp8_w8a8_tensor"):
        for rows in (_ROWS[3], _ROWS[-1]):
            name = f"quantize {scheme} {' '.join(map(str, rows))}, scales along rows"
            calls[name] = partial(_quantize, scheme, *rows, along_rows=True)
    for operation in (_number, _permute, _sort, _reduce, _activate):
        name = operation.__name__.removeprefix("_")
        for tokens, hidden in _SIZES:
            calls[f"{name} {tokens} {hidden}"] = partial(operation, tokens, hidden)
    catalog = load_catalog()
    for part in map(catalog.prepare_finalize, catalog.names("prepare_finalize")):
        if is_builtin(part):
            calls |= _list_calls_of_part(part)
    return calls


def _list_calls_of_part(part: type[PrepareAndFinalize]) -> dict[str, Callable[[], object]]:
    """Return the calls with which `mk compile` compiles a part, and some with few tokens."""
    calls: dict[str, Callable[[], object]] = {}
    for index, (name, call) in enumerate(part.meta_calls().items()):
        assert isinstance(call, partial)
        prefix, (problem,) = f"{call.func.__module__}.{call.func.__name__}", call.args
        calls[f"{prefix} {name}"] = call
        for tokens in _NUM_TOKENS if index == 0 else ():
            small_problem = replace(problem, tokens=tokens)
            calls[f"{prefix} {name}, T = {tokens}"] = partial(
                call.func, small_problem, **call.keywords
            )
    return calls


def _quantize(
    scheme_text: str,
    tokens: int,
    hidden: int,
    stride: int,
    dtype: torch.dtype,
    segments: int = 1,
    *,
    along_rows: bool = False,
) -> None:
    """Quantize rows that are `stride` values apart."""
    scheme = QuantScheme.parse(scheme_text)
    specs = quantize_specs("x", scheme, tokens, hidden, segments=segments)
    static_scale = torch.empty(1, device=_META) if scheme.static else None
    out = take_quantized(
        Workspace(specs, _META),
        "x",
        scheme,
        (tokens, hidden),
        segments=segments,
        static_scale=static_scale,
        along_rows=along_rows,
    )
    x_TH = torch.empty(tokens, stride, dtype=dtype, device=_META)[:, :hidden]
    counts_e = torch.empty(segments, dtype=torch.int32, device=_META)
    quantize_rows(x_TH, scheme, out=out, valid_rows=BatchedRows(counts_e) if segments > 1 else None)


def _make_empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=_META)


def _make_quantized_rows(scheme: QuantScheme, rows: int, columns: int) -> QuantizedRows:
    workspace = Workspace(quantize_specs("x", scheme, rows, columns), _META)
    return take_quantized(workspace, "x", scheme, (rows, columns))


def _make_routing(tokens: int) -> DispatchedRouting:
    ids_TK = _make_empty(tokens, _TOP_K, dtype=torch.int32)
    expert_map = _make_empty(_EXPERTS, dtype=torch.int32)
    invalid_ids = _make_empty(1, dtype=torch.int32)
    return DispatchedRouting(None, ids_TK, IdSpace.GLOBAL, _EXPERTS, expert_map, invalid_ids)


def _number(tokens: int, hidden: int) -> None:
    """Assign numbers to pairs: linear experts, then also sinks, then experts with copies."""
    linear = Placement.linear(_EXPERTS, 8)
    for placement, num_sinks in ((linear, 0), (linear, _TOP_K), (linear.with_copies({0: (7,)}), 0)):
        ids_TK = _make_empty(tokens, _TOP_K, dtype=torch.int32)
        weights_TK = _make_empty(tokens, _TOP_K, dtype=torch.float32)
        numbering = Numbering.of(placement, _META, num_sinks=num_sinks)
        count = _make_empty(1, dtype=torch.int32)
        join = num_sinks > 0
        pairs = Pairs(Routing(weights_TK, ids_TK), numbering, ids_TK, weights_TK, count, join, 1.0)
        number_pairs(pairs)
        scheme = QuantScheme.parse("fp8_w8a8_block")
        number_and_quantize(
            _make_empty(tokens, hidden),
            scheme,
            pairs,
            out=_make_quantized_rows(scheme, tokens, hidden),
        )


def _permute(tokens: int, hidden: int) -> None:
    """Copy tokens to the rows of experts, in the batched layout, and quantized."""
    rows_TK, x_TH = _make_empty(tokens, _TOP_K, dtype=torch.int32), _make_empty(tokens, hidden)
    scratch = assign_rows_scratch(tokens, _TOP_K, _LOCAL_EXPERTS)
    assign_rows(
        _make_routing(tokens),
        capacity=tokens,
        row_of_pair_TK=rows_TK,
        counts_e=_make_empty(_LOCAL_EXPERTS, dtype=torch.int32),
        scratch=_make_empty(*scratch.shape, dtype=torch.int32),
    )
    permute_tokens(x_TH, rows_TK, None, rows_RH=_make_empty(tokens * _LOCAL_EXPERTS, hidden))
    scheme = QuantScheme.parse("fp8_w8a8_block")
    permute_and_quantize(
        x_TH, rows_TK, None, scheme, out=_make_quantized_rows(scheme, tokens * _TOP_K, hidden)
    )


def _sort(tokens: int, _hidden: int) -> None:
    """Sort pairs by expert, into tiles and into blocks."""
    routing, pairs = _make_routing(tokens), tokens * _TOP_K
    sort_pairs(
        routing,
        block_m=64,
        num_local=_LOCAL_EXPERTS,
        workspace=Workspace(sort_specs(tokens, _TOP_K, 64, _LOCAL_EXPERTS), _META),
    )
    align(
        routing,
        block_size=16,
        num_local=_LOCAL_EXPERTS,
        workspace=Workspace(align_specs(pairs, 16, _LOCAL_EXPERTS), _META),
    )


def _reduce(tokens: int, hidden: int) -> None:
    """Weight and sum rows, with each reduction."""
    rows_TKH, out_TH = _make_empty(tokens, _TOP_K, hidden), _make_empty(tokens, hidden)
    weights_TK = _make_empty(tokens, _TOP_K, dtype=torch.float32)
    pairs_TK = _make_empty(tokens, _TOP_K, dtype=torch.int32)
    rows_RH = rows_TKH.flatten(0, 1)
    weight_and_sum(rows_TKH, weights_TK, scale=1.0, out=out_TH)
    gather_weight_and_sum(rows_RH, pairs_TK, weights_TK, scale=1.0, out=out_TH)
    gather_rows(rows_RH, pairs_TK, weights_TK, scale=1.0, out=rows_TKH)
    scale_rows(rows_TKH, weights_TK, scale=1.0, out=rows_TKH)
    scale_rows(rows_TKH, None, scale=1.0, out=rows_TKH)  # nothing to do
    zero_rows(rows_TKH, _make_empty(tokens, dtype=torch.int32))


def _activate(tokens: int, hidden: int) -> None:
    """Apply activations, and quantize their results."""
    for activation_text in ("silu", "relu2"):
        spec, scheme = ActivationSpec.parse(activation_text), QuantScheme.parse("fp8_w8a8_block")
        x_RN, out = (
            _make_empty(tokens, hidden * (2 if spec.gated else 1)),
            _make_quantized_rows(scheme, tokens, hidden),
        )
        gated_activation(x_RN, spec, _make_empty(tokens, hidden))
        activation_and_quantize(x_RN, spec, scheme, out=out)
