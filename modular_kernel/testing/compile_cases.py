"""Compiles every Triton kernel as the parts launch it, for a GPU that need not be there.

Every valid pairing of Triton parts is run once per case on meta tensors inside `record_compiles`:
the tiles, flags and shapes are those of real calls, with no hand-written signatures to go stale.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from modular_kernel.catalog import check_all, load_catalog, make_kernel, packages_of
from modular_kernel.composer import Inputs, random_inputs
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.machine import importable
from modular_kernel.ops.activation import gated_activation
from modular_kernel.ops.numbers import Numbering, Pairs, number_pairs
from modular_kernel.placement import Placement, PlacementTables
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.testing.compile import CompileRecord, check, record_compiles
from modular_kernel.types import GATED, UNGATED, ActivationSpec, Combine, Machine, Problem
from modular_kernel.workspace import Workspace

_META = torch.device("meta")
# Small enough to make on a CPU, large enough for every tile: block_n up to 256, block_k to 128.
_QUANT = (
    "fp8_w8a8_tensor",
    "fp8_w8a8_block",
    "int8_w8a8_channel",
    "int8_w8a16_group:zero_points=true",
    "int4_w4a16_group:zero_points=true",
    "mxfp4_w4a16",
    "mxfp4_w4a16:repacked=true",
)
_BASE = Problem(tokens=4, hidden=256, intermediate=256, experts=4, top_k=2)


@dataclass(frozen=True)
class Row:
    """One compiled kernel: the case that launched it, its report and what is wrong with it."""

    case: str
    record: CompileRecord
    violations: tuple[str, ...]


def problems() -> tuple[Problem, ...]:
    """Representative problems: every tile regime in every dtype, every flag of every kernel."""
    # Without an alignment; then 2, 16, 40 and 256 rows an expert.
    half = [replace(_BASE, tokens=t) for t in (1, 4, 32, 80, 512)]
    # Many pairs: they are counted in launches of their own.
    fp32 = [replace(_BASE, tokens=t, dtype=torch.float32) for t in (4, 4096)]
    changes: tuple[dict[str, object], ...] = (
        {"dtype": torch.float16},
        {"dtype": torch.float32, "fp32_precision": "tf32"},
        {"activation": "relu2"},
        {"activation": "swiglu_oai", "bias": True},
        {"activation": "gelu", "expert_map": True, "local_experts": 3},
        {"activation": "gelu_tanh", "top_k": 8, "experts": 64, "ids_dtype": torch.int64},
        {"activation": "swiglu_clamp_after", "combine": Combine.TOPK_WEIGHTED},
        {"activation": "swiglu_clamp_before", "combine": Combine.TOPK_UNWEIGHTED},
        {"top_k": 1, "apply_router_weight_on_input": True, "bias": True},
        {"hidden": 200, "intermediate": 136},
        {"hidden": 200, "intermediate": 136, "tokens": 4},
    )
    large = replace(_BASE, tokens=512)
    quantised = [replace(_BASE, tokens=t, quant=q) for q in _QUANT for t in (4, 512)]
    flags = [replace(large, **change) for change in changes]  # type: ignore[arg-type]
    return (*half, *fp32, *flags, *quantised)


def compile_all(target: str = "sm_90") -> list[Row]:
    """Compile all cases for `target` ("sm_90", ...); each distinct kernel is reported once."""
    arch = int(target.removeprefix("sm_"))
    packages = importable({"triton", *packages_of(load_catalog())})
    machine = Machine("cuda", (arch // 10, arch % 10), packages)
    rows: dict[str, Row] = {}

    def add(case: str, records: list[CompileRecord]) -> None:
        for record in records:
            key = repr(replace(record, seconds=0.0))
            rows.setdefault(key, Row(case, record, check(record, _expected(record, target))))

    for problem in problems():
        for verdict in check_all(problem, machine):
            triton = "triton" in load_catalog().experts(verdict.experts).requires.packages
            if not verdict.ok or not triton:
                continue
            kernel = make_kernel(
                verdict.prepare_finalize, verdict.experts, problem, machine=machine
            )
            add(f"{verdict.pairing} {problem}", compile_call(kernel, target))
    add("gated_activation", _compile_activation(target))
    add("number_pairs", _compile_numbers(target))
    return list(rows.values())


def compile_call(kernel: FusedMoEModularKernel, target: str) -> list[CompileRecord]:
    """Launch everything one call of `kernel` launches, on meta tensors."""
    problem = kernel.problem
    x_TH, weights, routing = _meta(random_inputs(problem, torch.device("cpu")))
    workspace = Workspace(kernel.workspace_specs(problem.tokens), _META)
    out = torch.empty(problem.output_shape, dtype=problem.dtype, device=_META)
    with record_compiles(target) as records:
        kernel.start_checked(x_TH, weights, routing, out, workspace).finish()
    return records


def _compile_activation(target: str) -> list[CompileRecord]:
    """The activation as an operation of its own, which no part launches."""
    rows, intermediate = 4, _BASE.intermediate
    out = torch.empty(rows, intermediate, dtype=_BASE.dtype, device=_META)
    with record_compiles(target) as records:
        for kind in GATED + UNGATED:
            spec = ActivationSpec.parse(kind)
            width = intermediate * (2 if spec.gated else 1)
            gated_activation(torch.empty(rows, width, dtype=_BASE.dtype, device=_META), spec, out)
    return records


def _compile_numbers(target: str) -> list[CompileRecord]:
    """The numbers of a library's rows, whose parts need ranks."""
    placement, records = Placement.linear(8, 2), list[CompileRecord]()
    tables = PlacementTables(*(t.to(_META) for t in vars(placement.tables()).values()))
    for top_k in (1, 3, 8):
        ids_TK = torch.empty(4, top_k, dtype=torch.int32, device=_META)
        weights_TK = torch.empty(4, top_k, device=_META)
        pairs = Pairs(
            Routing(weights_TK, ids_TK),
            Numbering(placement, tables, 1, sinks=top_k),
            torch.empty_like(ids_TK),
            torch.empty_like(weights_TK),
            torch.empty(1, dtype=torch.int32, device=_META),
            join=True,
        )
        with record_compiles(target) as found:
            number_pairs(pairs)
        records += found
    return records


def _meta(inputs: Inputs) -> Inputs:
    x_TH, weights, routing = inputs
    tensors = {f.name: getattr(weights, f.name) for f in fields(weights)}
    moved: dict[str, Any] = {name: t if t is None else t.to(_META) for name, t in tensors.items()}
    ids_TK = routing.topk_ids_TK.to(_META)
    return (
        x_TH.to(_META),
        ExpertWeights(**moved),
        Routing(routing.topk_weights_TK.to(_META), ids_TK),
    )


def _expected(record: CompileRecord, target: str) -> str | None:
    """The instruction a product must use: warpgroup products from 64 rows or weights, on Hopper."""
    block_m = record.config.get("BLOCK_M")
    if not isinstance(block_m, int):
        return None
    rows = record.dtypes["a_ptr"]
    if rows == "fp32" and record.config["PRECISION"] == "ieee":
        return "FFMA"
    # Weights as they are stored may take the side of the 64 rows, see add_product.
    stored = record.config.get("MODE") in ("plain", "w8a8") and rows != "fp32"
    block_n = record.config.get("BLOCK_N")
    filled = block_m >= 64 or (stored and isinstance(block_n, int) and block_n >= 64)
    warpgroups = filled and target == "sm_90"
    if rows == "i8":
        return "IGMMA" if warpgroups else "IMMA"
    if rows == "fp8e4nv" and warpgroups:
        return "QGMMA"
    return "HGMMA" if warpgroups else "HMMA"  # fp8 products of fewer rows are widened to fp16
