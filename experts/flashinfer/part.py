"""FlashInferExperts: FlashInfer's fused MoE layer as an experts part."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from experts.common.activation_rows import LIBRARY_ROUNDINGS
from experts.common.row_major import is_row_major, to_row_major
from experts.flashinfer.library import (
    ACTIVATIONS,
    ALIGNMENT_BYTES,
    FLASHINFER,
    NAN_CLAMPING_ACTIVATIONS,
    MoeArguments,
    activation_parameters,
    activation_type,
    has_block_scales,
    input_dtype,
    load,
    run,
    workspace_bytes,
)
from experts.flashinfer.merge_repeated_experts import merge_repeated_experts
from experts.flashinfer.nan_rows import mark_nan_rows
from modular_kernel.compatibility.support import ExpertsRequirements, Rejection
from modular_kernel.contracts import PermuteExpertsUnpermute, PickledByProblem, TopKWeightAndReduce
from modular_kernel.ops.quantize import quantize_rows, quantize_specs, take_quantized
from modular_kernel.replay import stages
from modular_kernel.spec.problem import (
    MAX_TOP_K,
    ActivationFormat,
    IdSpace,
    Machine,
    Problem,
    Reduce,
)
from modular_kernel.spec.rounding import Roundings
from modular_kernel.tensors import (
    Dispatched,
    DispatchedRouting,
    DispatchShape,
    ExpertWeights,
    StandardShape,
    StandardTokens,
)
from modular_kernel.workspace import BufferSpec, Workspace, WorkspaceShapes
from topk_reduce import TopKWeightAndReduceNoOp

_WORKSPACE_ALIGNMENT_BYTES = 128  # alignment of FlashInfer's workspace in bytes
# FlashInfer's kernels for fp8 with block scales need this GPU and at least this CUDA version.
_BLOCK_SCALE_ARCH, _BLOCK_SCALE_MIN_CUDA = (9, 0), (12, 8)
_FUSED_STAGE = stages.fuse(stages.PERMUTE, stages.GEMM1, stages.GEMM2, stages.UNPERMUTE)


class FlashInferExperts(PickledByProblem, PermuteExpertsUnpermute):
    """16-bit or fp8 experts over contiguous tokens, computed by FlashInfer's fused MoE layer.

    fp8 weights have static per-tensor scales or block scales. FlashInfer applies the router weights
    and sums over top-k. w1 has the up rows before the gate rows (`modular_kernel.quant.row_order`).

    Before FlashInfer's kernels, a call merges repeated experts of a token, sets the router weights
    of tokens that contain a NaN to NaN if the activation clamps, and quantizes x if scales are
    per-tensor. FlashInfer allocates a few small tensors in every call.
    """

    load_library = staticmethod(load)
    requires = ExpertsRequirements(
        activation_format=ActivationFormat.STANDARD,
        devices=frozenset({"cuda"}),
        packages=("triton", FLASHINFER.name),
        providers=(FLASHINFER,),
        triton=True,
        archs=frozenset({(9, 0), (10, 0)}),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        # FlashInfer 0.7.2.post1 has a fused prologue for K of 1, 2, 4, 6 and 8. For any other K, it
        # launches three kernels, which do not limit K.
        top_k=(1, MAX_TOP_K),
        graph_capturable=True,
        reduce=Reduce.NOOP,
        activations=frozenset(ACTIVATIONS),
        interleaved=False,
        up_first=True,
        bias=False,  # FlashInfer takes 16-bit biases only, but a problem may have float32 biases
        weight_on_input=False,
        expert_map=True,
        chunking=True,
        hidden_multiple=8,
        intermediate_multiple=8,
        schemes=frozenset({"none", "fp8_w8a8_tensor", "fp8_w8a8_block"}),
        blocks=frozenset({(128, 128)}),
        whole_blocks=True,
        quantizes_input=True,
        library_allocates=True,
        nan_clamping_activations=NAN_CLAMPING_ACTIVATIONS,
    )

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._library: Any = self.load_library()
        activation_type(self._library, problem)  # raises if unsupported
        self._bytes_by_tokens: dict[int, int] = {}

    @classmethod
    def extra_rejections(cls, problem: Problem, machine: Machine) -> tuple[Rejection, ...]:
        return (
            *_find_activation_rejections(cls.__name__, problem),
            *_find_scheme_rejections(cls.__name__, problem, machine),
        )

    @classmethod
    def meta_calls(cls) -> Mapping[str, Callable[[], object]]:
        """Return calls on meta tensors that compile this part's own Triton kernels."""
        return {"merged pairs": _merge_on_meta, "NaN rows": _mark_nan_rows_on_meta}

    def workspace_shapes(self, shape: DispatchShape) -> WorkspaceShapes:
        assert isinstance(shape, StandardShape)
        problem, pair_shape = self.problem, (shape.tokens, shape.top_k)
        library_bytes = self._get_library_bytes(shape.tokens) + _WORKSPACE_ALIGNMENT_BYTES
        empty = BufferSpec((0,), problem.dtype)
        specs = {
            "merged_ids": BufferSpec(pair_shape, torch.int32),
            "merged_weights": BufferSpec(pair_shape, torch.float32),
            "library": BufferSpec((library_bytes,), torch.uint8),
            "activation_constants": BufferSpec(
                (3 if activation_parameters(problem) else 0, problem.e), _FP32
            ),
        }
        if input_dtype(problem) is problem.dtype:
            specs["x_row_major"] = BufferSpec((shape.tokens, problem.hidden), problem.dtype)
        else:
            specs |= quantize_specs("x", problem.scheme, shape.tokens, problem.hidden)
            specs["static_scales"] = BufferSpec((2 * problem.e + 1,), _FP32)
        output = BufferSpec((shape.tokens, problem.hidden), problem.dtype)
        return WorkspaceShapes(empty, empty, output, specs)

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        return TopKWeightAndReduceNoOp()

    def roundings(self, x_TH: torch.Tensor, weights: ExpertWeights) -> Roundings | None:
        # With block scales, FlashInfer quantizes x and h itself, and may round values differently.
        return None if has_block_scales(self.problem) else LIBRARY_ROUNDINGS

    def apply(
        self,
        tokens: Dispatched,
        *,
        weights: ExpertWeights,
        workspace: Workspace,
        output: torch.Tensor,
    ) -> None:
        assert isinstance(tokens, StandardTokens)
        problem, routing = self.problem, tokens.routing
        pair_shape = tuple(routing.topk_ids_TK.shape)
        ids_TK = workspace.take("merged_ids", pair_shape)
        weights_TK = workspace.take("merged_weights", pair_shape)
        with stages.stage(stages.SORT):
            factor = problem.routed_scaling_factor
            merged_routing = {"ids_TK": ids_TK, "weights_TK": weights_TK}
            merge_repeated_experts(routing, problem.e, factor=factor, **merged_routing)
            if problem.act.kind in NAN_CLAMPING_ACTIVATIONS:
                mark_nan_rows(tokens.x_TH, **merged_routing)
        x_TH, scales = self._prepare_input_and_scales(tokens.x_TH, weights, workspace)
        with stages.stage(_FUSED_STAGE):
            arguments = MoeArguments(
                x_TH,
                ids_TK,
                weights_TK,
                to_row_major(weights.w1),
                to_row_major(weights.w2),
                scales,
                self._fill_activation_constants(workspace),
                self._take_library_workspace(pair_shape[0], workspace),
                output,
            )
            run(self._library, problem, arguments)

    def _take_library_workspace(self, num_tokens: int, workspace: Workspace) -> torch.Tensor:
        """Return the workspace that FlashInfer uses, aligned to 128 bytes."""
        nbytes = self._get_library_bytes(num_tokens)
        buffer = workspace.take("library", (nbytes + _WORKSPACE_ALIGNMENT_BYTES,))
        start = -buffer.data_ptr() % _WORKSPACE_ALIGNMENT_BYTES
        return buffer[start : start + nbytes]

    def _get_library_bytes(self, num_tokens: int) -> int:
        if num_tokens not in self._bytes_by_tokens:
            nbytes = workspace_bytes(self._library, self.problem, num_tokens)
            self._bytes_by_tokens[num_tokens] = nbytes
        return self._bytes_by_tokens[num_tokens]

    def _prepare_input_and_scales(
        self, x_TH: torch.Tensor, weights: ExpertWeights, workspace: Workspace
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return x in the dtype and layout that the library takes, and `MoeArguments.scales`."""
        problem, shape = self.problem, tuple(x_TH.shape)
        if input_dtype(problem) is not problem.dtype:
            return self._quantize(x_TH, weights, workspace)
        if not is_row_major(x_TH):  # FlashInfer ignores strides
            x_TH = workspace.take("x_row_major", shape).copy_(x_TH)
        if weights.w1_scale is None or weights.w2_scale is None:
            return x_TH, ()
        return x_TH, (weights.w1_scale, weights.w2_scale)

    def _quantize(
        self, x_TH: torch.Tensor, weights: ExpertWeights, workspace: Workspace
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        problem, e = self.problem, self.problem.e
        a1_scale, a2_scale = weights.a1_scale, weights.a2_scale
        w1_scale, w2_scale = weights.w1_scale, weights.w2_scale
        assert a1_scale is not None
        assert a2_scale is not None
        assert w1_scale is not None
        assert w2_scale is not None
        shape = (x_TH.shape[0], problem.hidden)
        out = take_quantized(workspace, "x", problem.scheme, shape, static_scale=a1_scale)
        with stages.stage(stages.QUANTIZE_INPUT):
            quantize_rows(x_TH, problem.scheme, out=out)
            scales = workspace.take("static_scales", (2 * e + 1,))
            torch.mul(w1_scale, a1_scale, out=scales[:e])
            torch.mul(w2_scale, a2_scale, out=scales[e : 2 * e])
            torch.reciprocal(a2_scale, out=scales[2 * e :])
        return out.q_RK, (
            scales[:e],
            scales[2 * e],
            scales[e : 2 * e],
            a1_scale.view(()),
        )

    def _fill_activation_constants(self, workspace: Workspace) -> torch.Tensor | None:
        constants = activation_parameters(self.problem)
        if not constants:
            return None
        act_3e = workspace.take("activation_constants", (3, self.problem.e))
        for row, constant in zip(act_3e, constants, strict=True):
            row.fill_(constant)
        return act_3e


_FP32 = torch.float32


def _find_activation_rejections(name: str, problem: Problem) -> tuple[Rejection, ...]:
    act, parties = problem.act, (name, "problem")
    if act.kind in ("gelu", "gelu_tanh") and act.limit is not None:
        return (Rejection("activation", parties, str(act), "gelu without a limit"),)
    if act.kind == "situ" and act.limit is None:
        return (Rejection("activation", parties, str(act), "situ with a limit for up values"),)
    return ()


def _find_scheme_rejections(name: str, problem: Problem, machine: Machine) -> tuple[Rejection, ...]:
    """Return the rejections of fp8 problems that `requires` cannot express."""
    scheme, parties = problem.scheme, (name, "problem")
    if scheme.name not in FlashInferExperts.requires.schemes or not scheme.quantized:
        return ()
    rejections = list[Rejection]()
    if not has_block_scales(problem):
        for field in ("hidden", "intermediate"):
            if getattr(problem, field) % ALIGNMENT_BYTES:
                need = f"a multiple of {ALIGNMENT_BYTES} for fp8"
                rejections.append(Rejection(field, parties, str(getattr(problem, field)), need))
        if not scheme.static:
            need = "static=true, because FlashInfer does not compute per-tensor activation scales"
            rejections.append(Rejection("quant", parties, problem.quant, need))
        return tuple(rejections)
    if problem.dtype is not torch.bfloat16:
        rejections.append(
            Rejection("dtype", parties, "float16", "bfloat16 for fp8 with block scales")
        )
    machine_parties = (name, "machine")
    if machine.arch is not None and machine.arch != _BLOCK_SCALE_ARCH:
        got = f"{machine.arch[0]}.{machine.arch[1]}"
        need = "9.0 for fp8 with block scales"
        rejections.append(Rejection("archs", machine_parties, got, need))
    if machine.cuda is not None and machine.cuda < _BLOCK_SCALE_MIN_CUDA:
        got = f"CUDA {machine.cuda[0]}.{machine.cuda[1]}"
        rejections.append(
            Rejection("cuda", machine_parties, got, "CUDA >= 12.8 for fp8 with block scales")
        )
    return tuple(rejections)


def _merge_on_meta() -> None:
    ids_TK, weights_TK = _make_empty_meta(64, 8), _make_empty_meta(64, 8, dtype=_FP32)
    topk_weights_and_ids = _make_empty_meta(64, 8, dtype=_FP32), _make_empty_meta(64, 8)
    routing = DispatchedRouting(
        *topk_weights_and_ids, IdSpace.GLOBAL, 32, _make_empty_meta(32), _make_empty_meta(1)
    )
    merge_repeated_experts(routing, 32, factor=1.0, ids_TK=ids_TK, weights_TK=weights_TK)


def _mark_nan_rows_on_meta() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        x_TH, weights_TK = (
            _make_empty_meta(64, 2880, dtype=dtype),
            _make_empty_meta(64, 8, dtype=_FP32),
        )
        mark_nan_rows(x_TH, ids_TK=_make_empty_meta(64, 8), weights_TK=weights_TK)


def _make_empty_meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
