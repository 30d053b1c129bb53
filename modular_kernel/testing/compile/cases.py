"""Compile every Triton kernel as real calls launch it, for a GPU that need not be present.

A case is one call. Every valid pairing of an exchange class and a Triton experts class ("parts") is
called once per problem, on meta tensors (which have shapes but no data), inside `record_compiles`.
Tiles, flags and shapes are those of real calls on the GPU, so no signatures are written by hand.
The kernels of parts that need several ranks are launched by the `meta_calls` of the parts. This
module also launches the operations that no pairing uses on a single rank.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch

from modular_kernel.catalog import check_all, collect_packages, load_catalog, make_kernel
from modular_kernel.contracts import PermuteExpertsUnpermute, PrepareAndFinalize
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.machine import find_importable
from modular_kernel.ops.activation import gated_activation
from modular_kernel.ops.expert_slots import Numbering, Pairs, number_pairs
from modular_kernel.ops.mask_unwritten import mask_unwritten_pairs
from modular_kernel.ops.quantize import quantize_specs, take_quantized
from modular_kernel.ops.route import RouterTensors, route
from modular_kernel.ops.slots_and_quantize import number_and_quantize
from modular_kernel.ops.zero_rows import zero_rows
from modular_kernel.settings import hide_gpus
from modular_kernel.spec.placement import Placement, PlacementTables
from modular_kernel.spec.problem import (
    GATED,
    MAX_TOP_K,
    UNGATED,
    ActivationSpec,
    Combine,
    Machine,
    Problem,
)
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.spec.router import RouterSpec
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.testing.compile import moe_lora
from modular_kernel.testing.compile.kernels_defined import DefinedKernel, defined_kernels
from modular_kernel.testing.compile.report import CompileRecord, check, record_compiles
from modular_kernel.testing.random_inputs import Inputs, random_inputs
from modular_kernel.text import format_count
from modular_kernel.workspace import Workspace

_META = torch.device("meta")
_FP8_ONLY_KERNELS = {"amax_kernel"}  # computes per-tensor scales, which only fp8 schemes have
_FP8_ARCH = 89
# Schemes that together launch every kind of GEMM.
_SCHEMES = (
    "fp8_w8a8_tensor",
    "fp8_w8a8_channel",
    "fp8_w8a8_block",
    "fp8_w8a16_block",
    "int8_w8a8_channel",
    "int8_w8a16_group:zero_points=true",
    "int4_w4a16_group:zero_points=true",
    "mxfp4_w4a16",
    "mxfp4_w4a16:repacked=true",
    "nvfp4_w4a16",
    "int4_w4a16_act_order:group=64,zero_points=true",
)
_PACKED_SCHEMES = ("int4_w4a16_group:zero_points=true", "mxfp4_w4a16", "mxfp4_w4a16:repacked=true")
# Small enough to quantize the weights on a CPU, and large enough for every tile, which has at most
# 256 columns and a depth of at most 128.
_BASE = Problem(tokens=4, hidden=256, intermediate=256, experts=4, top_k=2)


@dataclass(frozen=True)
class CompiledRow:
    """A compiled kernel: the case that launched it, its report and its violations."""

    case: str
    record: CompileRecord
    violations: tuple[str, ...]


@dataclass(frozen=True)
class SkippedKernel:
    """A kernel that was not compiled.

    reason: why it was not compiled; "" means that a case is missing.
    """

    kernel: str
    module: str
    reason: str


@dataclass(frozen=True)
class CompileResult:
    """Result of `compile_all`.

    Attributes:
        rows: each distinct compiled kernel.
        left_out: kernels of installed parts that no case launched.
    """

    rows: tuple[CompiledRow, ...]
    left_out: tuple[SkippedKernel, ...]


CaseLaunches = Iterator[tuple[str, list[CompileRecord]]]
# Takes the total number of steps. Returns a context manager that shows the progress and yields a
# function to call after each step, with a description of what the step compiled, or "".
ProgressBar = Callable[[int], AbstractContextManager[Callable[[str], None]]]


def problems() -> tuple[Problem, ...]:
    """Return problems that need every kind of tile in every dtype, and every flag of a kernel."""
    # The first problem takes the path without alignment. The other problems have 2, 16, 40 and 256
    # rows per expert.
    bf16 = [replace(_BASE, tokens=t) for t in (1, 4, 32, 80, 512)]
    # Many (token, expert) pairs are counted in several launches.
    fp32 = [replace(_BASE, tokens=t, dtype=torch.float32) for t in (4, 4096)]
    changes: tuple[dict[str, object], ...] = (
        {"dtype": torch.float16},
        {"dtype": torch.float32, "fp32_precision": "tf32"},
        {"activation": "relu2"},
        {"activation": "swiglu_oai", "bias": True},
        {"activation": "situ:alpha=4,limit=25"},
        {"activation": "silu_no_mul"},
        {"activation": "gelu", "expert_map": True, "local_experts": 3},
        {"activation": "gelu_tanh", "top_k": 8, "experts": 64, "ids_dtype": torch.int64},
        {"activation": "swiglu_clamp_after", "combine": Combine.TOPK_WEIGHTED},
        {"activation": "swiglu_clamp_before", "combine": Combine.TOPK_UNWEIGHTED},
        {"top_k": 1, "apply_router_weight_on_input": True, "bias": True},
        {"hidden": 200, "intermediate": 136},
        {"hidden": 200, "intermediate": 136, "tokens": 4},
    )
    large = replace(_BASE, tokens=512)
    with_adapters = [replace(_BASE, tokens=t, lora="adapters=4,rank=32") for t in (4, 512)]
    # With interleaved gate and up rows, up starts one row after gate. The GEMM kernels get this
    # offset as an argument, and Triton specializes them for the value 1.
    with_adapters += [
        replace(problem, activation="silu:interleaved=true") for problem in with_adapters
    ]
    with_adapters += [
        replace(with_adapters[1], quant=quant) for quant in ("fp8_w8a8_block", _PACKED_SCHEMES[0])
    ]
    # With few tokens and many experts, layers with adapters take the path without alignment. These
    # schemes have no scales, channel scales and a tensor scale.
    many_experts = replace(with_adapters[0], experts=32)
    with_adapters += [
        replace(many_experts, quant=q) for q in ("none", "fp8_w8a8_channel", "fp8_w8a16_tensor")
    ]
    # Paths that the other problems do not take: packed 4-bit words with one token, and K = 1024.
    packed = [replace(_BASE, tokens=1, quant=quant) for quant in _PACKED_SCHEMES]
    large_k = replace(_BASE, tokens=1, intermediate=1024, quant="fp8_w8a8_block")
    quantized = [replace(_BASE, tokens=t, quant=q) for q in _SCHEMES for t in (4, 512)]
    # With many rows per expert, mxfp4 weights are dequantized before the GEMM.
    quantized += [replace(_BASE, tokens=2048, quant=quant) for quant in _PACKED_SCHEMES[1:]]
    flag_problems = [replace(large, **change) for change in changes]  # type: ignore[arg-type]
    return (
        *bf16,
        *fp32,
        *flag_problems,
        *quantized,
        *packed,
        large_k,
        *with_adapters,
        *_list_large_top_k_problems(),
    )


def _list_large_top_k_problems() -> tuple[Problem, ...]:
    """Return problems with a large top-k: one that is not a power of two, and the maximum.

    Problems with one token take paths without alignment, whose launches depend on top-k.
    """
    base = replace(_BASE, tokens=1, experts=64)
    top_22, max_top_k = replace(base, top_k=22), replace(base, top_k=MAX_TOP_K)
    few_tokens = [
        top_22,
        replace(top_22, quant="fp8_w8a8_channel", dtype=torch.float16, bias=True),
        replace(top_22, quant=_PACKED_SCHEMES[0], bias=True),
        replace(top_22, lora="adapters=4,rank=32"),
        replace(max_top_k, dtype=torch.float32),
        replace(max_top_k, quant="fp8_w8a8_block"),
        replace(max_top_k, quant="mxfp4_w4a16"),
    ]
    many_tokens = [
        replace(top_22, tokens=80, quant="fp8_w8a8_block"),
        replace(max_top_k, tokens=512),
        replace(max_top_k, tokens=512, lora="adapters=4,rank=32"),
    ]
    return (*few_tokens, *many_tokens)


def compile_all(
    target: str = "sm_90",
    bar: ProgressBar | None = None,
    *,
    workers: int = 1,
    name_filter: str = "",
) -> CompileResult:
    """Compile all cases as they are launched on a GPU of the architecture `target`.

    target: an architecture, such as "sm_90".
    bar: shows the progress.
    workers: number of processes among which the cases are divided. It affects only `seconds` in the
        result.
    name_filter: a substring of the names of cases or kernels. If the name of a case matches, all of
        its kernels are compiled. Otherwise, only its kernels whose name matches are compiled. Only
        kernels whose name matches are listed as left out.
    """
    steps = _list_steps(_make_machine(target), target, name_filter)
    rows: dict[str, CompiledRow] = {}
    with (bar or _show_no_progress)(len(steps)) as advance:
        if workers > 1:
            row_lists = _run_in_workers(target, name_filter, len(steps), workers)
        else:
            row_lists = _run_steps(steps, target)
        for case_rows in row_lists:
            for row in case_rows:
                rows.setdefault(repr(replace(row.record, seconds=0.0)), row)
            advance(_describe_rows(case_rows))
    compiled_names = {row.record.kernel for row in rows.values()}
    missing = (
        kernel
        for name, kernel in defined_kernels(name_filter).items()
        if name not in compiled_names
    )
    left_out = (SkippedKernel(k.name, k.module, _find_skip_reason(k, target)) for k in missing)
    return CompileResult(tuple(rows.values()), tuple(left_out))


def _describe_rows(rows: list[CompiledRow]) -> str:
    """Describe what a step compiled, such as "router: 2 kernels"; "" for nothing."""
    if not rows:
        return ""
    cases = list(dict.fromkeys(row.case for row in rows))
    other_cases = f" and {format_count(len(cases) - 1, 'other case')}" if len(cases) > 1 else ""
    return f"{cases[0]}{other_cases}: {format_count(len(rows), 'kernel')}"


def iter_launches(target: str) -> CaseLaunches:
    """Yield the launches of each case for `target`, one case after the other."""
    for step in _list_steps(_make_machine(target), target):
        yield from step()


def _run_steps(steps: list[Callable[[], CaseLaunches]], target: str) -> Iterator[list[CompiledRow]]:
    for step in steps:
        yield _check_launches(step(), target)


def _check_launches(cases: CaseLaunches, target: str) -> list[CompiledRow]:
    """Check each kernel in the process that compiled it, so that the disassembly is parallel."""
    return [
        CompiledRow(case, record, check(record, _expected_instruction(record, target)))
        for case, records in cases
        for record in records
    ]


def _run_in_workers(
    target: str, name_filter: str, steps: int, workers: int
) -> Iterator[list[CompiledRow]]:
    """Run all steps in worker processes; yield their results in order.

    Each process takes the next step when it is free.
    """
    context = get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=hide_gpus) as pool:
        yield from pool.map(_run_step, [target] * steps, [name_filter] * steps, range(steps))


def _run_step(target: str, name_filter: str, index: int) -> list[CompiledRow]:
    return _check_launches(_list_steps(_make_machine(target), target, name_filter)[index](), target)


def _find_skip_reason(kernel: DefinedKernel, target: str) -> str:
    """Return why no case launches a kernel for `target`; "" if a case should launch it."""
    if kernel.targets and target not in kernel.targets:
        return f"{', '.join(kernel.targets)} only"
    if kernel.left_out_reason:
        return kernel.left_out_reason
    needs_fp8 = kernel.name in _FP8_ONLY_KERNELS and int(target.removeprefix("sm_")) < _FP8_ARCH
    return f"fp8 only, sm_{_FP8_ARCH} or newer" if needs_fp8 else ""


@contextmanager
def _show_no_progress(total: int) -> Iterator[Callable[[str], None]]:
    yield lambda _: None


def _make_machine(target: str) -> Machine:
    """Make the machine of a GPU of the architecture `target`, with the installed packages."""
    arch = int(target.removeprefix("sm_"))
    packages = find_importable({"triton", *collect_packages(load_catalog())})
    return Machine("cuda", (arch // 10, arch % 10), packages)


def _list_steps(
    machine: Machine, target: str, name_filter: str = ""
) -> list[Callable[[], CaseLaunches]]:
    """Return one step per problem, and one per separate call of a part or of an operation.

    name_filter: as in `compile_all`.
    """
    calls: dict[str, Callable[[], object]] = {
        "activation": _launch_activation,
        "numbers": _launch_numbering,
        "unwritten pairs": _launch_mask_unwritten,
        "rows of zeros": _launch_zero_rows,
        "router": _launch_router,
        "parallel adapters": partial(moe_lora.launch_all, _BASE.dtype, 32),
    }
    for part in load_catalog().parts:
        if issubclass(part.cls, PrepareAndFinalize | PermuteExpertsUnpermute):
            calls |= {f"{part.name} {name}": call for name, call in part.cls.meta_calls().items()}
    return [
        *(
            partial(_compile_problem, problem, machine, target, name_filter)
            for problem in problems()
        ),
        *(
            partial(_compile_call, name, call, target, name_filter)
            for name, call in calls.items()
            if name_filter in name or defined_kernels(name_filter)
        ),
    ]


def _compile_problem(
    problem: Problem, machine: Machine, target: str, name_filter: str
) -> CaseLaunches:
    """Yield the launches of every valid pairing with a Triton experts part for `problem`."""
    for verdict in check_all(problem, machine):
        experts, case = load_catalog().experts(verdict.experts), f"{verdict.pairing} {problem}"
        if not verdict.ok or "triton" not in experts.requires.packages:
            continue
        if name_filter not in case and not defined_kernels(name_filter):
            continue
        with experts.described(machine):
            kernel = make_kernel(
                verdict.prepare_finalize, verdict.experts, problem, machine=machine
            )
            yield case, compile_call(kernel, target, _make_kernel_filter(name_filter, case))


def _compile_call(
    name: str, call: Callable[[], object], target: str, name_filter: str
) -> CaseLaunches:
    with record_compiles(target, _make_kernel_filter(name_filter, name)) as records:
        call()
    yield name, records


def _make_kernel_filter(name_filter: str, case: str) -> Callable[[str], bool]:
    """Make a filter of kernel names. All kernels pass if the name of the case matches."""
    return lambda kernel: name_filter in case or name_filter in kernel


def compile_call(
    kernel: FusedMoEModularKernel, target: str, kernel_filter: Callable[[str], bool] | None = None
) -> list[CompileRecord]:
    """Compile every launch of one call of `kernel` on meta tensors.

    kernel_filter: as in `record_compiles`.
    """
    problem = kernel.problem
    x_TH, weights, routing = _to_meta(random_inputs(problem, torch.device("cpu")))
    workspace = Workspace(kernel.workspace_specs(problem.tokens), _META)
    out = torch.empty(problem.output_shape, dtype=problem.dtype, device=_META)
    with record_compiles(target, kernel_filter) as records:
        kernel.start_checked(x_TH, weights, routing, out, workspace).finish()
    return records


def _launch_activation() -> None:
    """Launch the activation as a separate operation, because parts only use it fused."""
    rows, intermediate = 4, _BASE.intermediate
    out = torch.empty(rows, intermediate, dtype=_BASE.dtype, device=_META)
    for kind in GATED + UNGATED:
        spec = ActivationSpec.parse(kind)
        width = intermediate * (2 if spec.gated else 1)
        gated_activation(torch.empty(rows, width, dtype=_BASE.dtype, device=_META), spec, out)


def _make_pairs(top_k: int) -> Pairs:
    """Make the pairs of 4 tokens. Skipped pairs go to sinks, which are extra slots of a rank."""
    placement = Placement.linear(8, 2)
    ids_TK = torch.empty(4, top_k, dtype=torch.int32, device=_META)
    weights_TK = torch.empty(4, top_k, device=_META)
    tables = PlacementTables(*(t.to(_META) for t in vars(placement.tables()).values()))
    return Pairs(
        Routing(weights_TK, ids_TK),
        Numbering(placement, tables, 1, num_sinks=top_k),
        torch.empty_like(ids_TK),
        torch.empty_like(weights_TK),
        torch.empty(1, dtype=torch.int32, device=_META),
        join=True,
        factor=1.0,
    )


def _launch_numbering() -> None:
    """Launch the kernels that number pairs by expert slots, with and without quantization.

    The parts that use these kernels need several ranks.
    """
    for top_k in (1, 3, 8, 22, MAX_TOP_K):
        number_pairs(_make_pairs(top_k))
    x = torch.empty(4, _BASE.hidden, dtype=_BASE.dtype, device=_META)
    for quant in ("fp8_w8a8_channel", "fp8_w8a8_block"):
        scheme = QuantScheme.parse(quant)
        workspace = Workspace(quantize_specs("x", scheme, *x.shape), _META)
        out = take_quantized(workspace, "x", scheme, (4, _BASE.hidden), static_scale=None)
        for top_k in (8, 22, MAX_TOP_K):
            number_and_quantize(x, scheme, _make_pairs(top_k), out=out)


def _launch_mask_unwritten() -> None:
    """Launch the kernel that masks received rows without a local expert."""
    for dtype in (torch.int32, torch.int64):
        mask_unwritten_pairs(
            torch.empty(16, 8, dtype=dtype, device=_META),
            torch.empty(16, 8, device=_META),
            torch.empty((), dtype=torch.int32, device=_META),
            out_ids_RK=torch.empty(16, 8, dtype=torch.int32, device=_META),
            out_weights_RK=torch.empty(16, 8, device=_META),
        )


def _launch_zero_rows() -> None:
    """Launch the kernel that zeroes the rows that a library leaves undefined."""
    for dtype in (torch.bfloat16, torch.float16):
        rows = torch.empty(4, 256, _BASE.hidden, dtype=dtype, device=_META)
        zero_rows(rows, torch.empty(4, dtype=torch.int32, device=_META))


def _launch_router() -> None:
    """Launch the router, which is not part of any pairing."""
    for spec, experts in (
        (RouterSpec(2), 8),
        (RouterSpec(4, order="topk_first"), 128),
        (RouterSpec(8, "sigmoid", groups=8, topk_groups=4, renormalize=True), 256),
        (RouterSpec(6, "sqrtsoftplus", table=True, renormalize=True), 256),
        (RouterSpec(12, zero_experts=256), 512),
        (RouterSpec(22, "sigmoid", selection_bias=True, renormalize=True, eps=1e-20), 512),
        (RouterSpec(MAX_TOP_K, "sigmoid", groups=8, topk_groups=4, renormalize=True), 256),
        (RouterSpec(MAX_TOP_K, order="topk_first"), 1024),
    ):
        columns = spec.columns(experts)
        logits = torch.empty(4, columns, device=_META)
        bias = torch.empty(columns, device=_META) if spec.selection_bias else None
        table = token_ids = None
        if spec.table:
            table = torch.empty(100, spec.top_k, dtype=torch.int32, device=_META)
            token_ids = torch.empty(4, dtype=torch.int32, device=_META)
        route(logits, spec, RouterTensors(bias, table), token_ids_T=token_ids)


def _to_meta(inputs: Inputs) -> Inputs:
    x_TH, weights, routing = inputs
    tensors = {f.name: getattr(weights, f.name) for f in fields(weights)}
    meta_weights: dict[str, Any] = {
        name: t if t is None else t.to(_META) for name, t in tensors.items()
    }
    ids_TK, slots_T = routing.topk_ids_TK.to(_META), routing.slots_T
    return (
        x_TH.to(_META),
        ExpertWeights(**meta_weights),
        Routing(
            routing.topk_weights_TK.to(_META),
            ids_TK,
            routing.adapters_T if slots_T is None else slots_T.to(_META),
        ),
    )


def find_gemm_operand(kernel: str) -> str | None:
    """Return the operand of a GEMM kernel whose dtype selects the instruction.

    kernel: name of the kernel. The result is None for kernels whose instructions are not checked:
        the kernels of `run_moe_lora`, and kernels other than GEMMs.
    """
    if "gemm" in kernel:
        return "a_ptr"
    return "lora_a_ptr" if kernel.startswith("shrink_") else None


def _expected_instruction(record: CompileRecord, target: str) -> str | None:
    """Return the instruction that a GEMM kernel must use, or None for other kernels.

    On sm_90, this is a warpgroup MMA if the tile has at least 64 rows of tokens or of weights.
    """
    operand, block_m = find_gemm_operand(record.kernel), record.config.get("BLOCK_M")
    if operand is None or not isinstance(block_m, int):
        return None
    a_dtype = record.dtypes[operand]
    if a_dtype == "fp32" and record.config["INPUT_PRECISION"] == "ieee":
        return "FFMA"
    # wgmma needs 64 rows of its first operand. `add_product` swaps the operands if only the weights
    # have so many rows, and need no conversion.
    can_swap = record.config.get("QUANT_MODE") in ("plain", "w8a8") and a_dtype != "fp32"
    block_n = record.config.get("BLOCK_N")
    has_64_rows = block_m >= 64 or (can_swap and isinstance(block_n, int) and block_n >= 64)
    uses_wgmma = has_64_rows and target == "sm_90"
    if a_dtype == "i8":
        return "IGMMA" if uses_wgmma else "IMMA"
    if a_dtype == "fp8e4nv" and uses_wgmma:
        return "QGMMA"
    return "HGMMA" if uses_wgmma else "HMMA"  # without wgmma, fp8 operands are converted to fp16
