"""The gemv path: a layer for a few tokens, in two launches, without sorting pairs.

A pair is a token together with one of its top_k experts. A program of GEMM 1 computes some columns
of one pair. A program of GEMM 2 computes some columns of one token and sums its weighted pairs. The
kernels do not use tensor cores, because reading the weights takes almost all of the time. They also
quantize the activations. See `gemv_config` for the meaning of the launch fields.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import torch

from experts.triton.adapters import ShrinkOutput, adapter_specs, shrink_few_pairs
from experts.triton.candidates import CandidateGroups
from experts.triton.gemv import gemv_config
from experts.triton.gemv.gemv_config import candidates
from experts.triton.launch_config import (
    Device,
    Gemm,
    Launch,
    LaunchConfig,
    MoEConfig,
    Violation,
    violations,
)
from experts.triton.operands import (
    GemmOperands,
    activation_scale_kind,
    gemm1_operands,
    gemm2_operands,
    input_scales,
    is_n_major,
    scale_group,
)
from experts.triton.path import Path, PathCall
from modular_kernel.ops.count import id_arguments, next_power_of_2
from modular_kernel.quant.quantized_weights import IMPLICIT_ZERO_POINT, MIN_SCALE, QMAX
from modular_kernel.replay import stages
from modular_kernel.replay.launch.launch import launch
from modular_kernel.replay.launch.pdl import pdl_arguments
from modular_kernel.replay.launch.runtime import use_triton
from modular_kernel.spec.problem import Combine, Problem
from modular_kernel.spec.rounding import Roundings
from modular_kernel.tensors import ExpertWeights
from modular_kernel.workspace import BufferSpec

_MIN_BLOCK_N = 16  # limits the number of blocks, each of which has an amax value
_VECTOR = 16  # bytes per vector load of a thread
_WARP = 32  # threads
_MAX_AMAX_BLOCK = 8192  # maximum columns of x per step of computing its amax
_MAX_IDS = 1024  # maximum ids per step of counting invalid ids
# Up to this number of pairs per output row, ptxas chooses the number of registers.
_MAX_UNLIMITED_PAIRS = 16


class GemvPath(Path):
    """The gemv path, for the problems of `gemv_config.supports`. Row p of h belongs to pair p."""

    name = gemv_config.NAME
    quantizes_input = True

    @classmethod
    def supports(cls, problem: Problem, device: Device) -> bool:
        return gemv_config.supports(problem)

    @classmethod
    def max_tokens(cls, problem: Problem) -> int | None:
        return gemv_config.max_tokens(problem)

    @classmethod
    def default_config(cls, problem: Problem, tokens: int, device: Device) -> MoEConfig:
        return gemv_config.default_config(problem, tokens)

    @classmethod
    def violations(
        cls, config: Launch, gemm: Gemm, problem: Problem, device: Device
    ) -> Iterator[Violation]:
        assert isinstance(config, LaunchConfig)
        # Scale groups do not limit block_k, because a step may span several groups.
        return violations(config, replace(gemm, group_k=0), device)

    @classmethod
    def candidates(cls, problem: Problem, tokens: int) -> CandidateGroups:
        return candidates(problem, tokens)

    def __init__(self, problem: Problem) -> None:
        from experts.triton.gemv.kernels.down import gemv_down_kernel
        from experts.triton.gemv.kernels.gate_up import gemv_gate_up_kernel

        self.problem = problem
        # With a sum over top-k, all pairs of a token are accumulated before rounding.
        self.roundings = Roundings(rows=problem.combine is not Combine.SUM)
        self._gate_up_kernel, self._down_kernel = gemv_gate_up_kernel, gemv_down_kernel
        self._sums_topk = problem.combine is Combine.SUM
        self.may_reject_tensors = not problem.scheme.quantized  # by `is_fast`

    def specs(self, tokens: int, block_m: int) -> dict[str, BufferSpec]:
        problem, pairs = self.problem, tokens * self.problem.top_k
        specs = {"workspace13": BufferSpec((pairs, problem.intermediate), problem.dtype)}
        if activation_scale_kind(problem.scheme, problem.intermediate) in ("token", "tensor"):
            blocks = -(-problem.intermediate // _MIN_BLOCK_N)
            specs["gemv_amax"] = BufferSpec((pairs * blocks,), torch.float32)
        return specs | adapter_specs(problem, pairs)

    def supports_tensors(self, weights: ExpertWeights, x_TH: torch.Tensor) -> bool:
        return True

    def is_fast(self, weights: ExpertWeights, tokens: int) -> bool:
        """Return False for more than one token with unquantized weights contiguous along N."""
        if self.problem.scheme.quantized:
            return True
        return gemv_config.is_fast(tokens, (is_n_major(weights.w1), is_n_major(weights.w2)))

    def config_for_strides(
        self, config: MoEConfig, weights: ExpertWeights, device: Device
    ) -> MoEConfig:
        """Return launches with adjacent columns for weights that are contiguous along N."""
        n_major = is_n_major(weights.w1), is_n_major(weights.w2)
        if self.problem.scheme.quantized or not any(n_major):
            return config
        return gemv_config.n_major_config(config, n_major)

    def run(self, call: PathCall) -> None:
        problem, routing, workspace = self.problem, call.tokens.routing, call.workspace
        pairs = routing.topk_ids_TK.numel()
        launch1, launch2 = call.config.typed_launches(LaunchConfig)
        h_PI = workspace.take("workspace13", (pairs, problem.intermediate))
        amax, blocks = h_PI, -(-problem.intermediate // launch1.block_n)
        stores_amax = activation_scale_kind(problem.scheme, problem.intermediate) in (
            "token",
            "tensor",
        )
        if stores_amax:
            amax = workspace.take("gemv_amax", (pairs * blocks,))
        use_triton(h_PI)  # for its side effect: it patches Triton's interpreter on first use
        common_arguments = {**id_arguments(routing, problem.e), **pdl_arguments()}
        with stages.stage(self._get_gemm1_stage(call)):
            lora_arguments = self._shrink(call, "lora_u13", call.tokens.plain_TH)
            launch(
                self._gate_up_kernel,
                (pairs, blocks + 1),
                router_weights_ptr=routing.topk_weights_TK,
                invalid_count_ptr=routing.invalid_ids,
                h_ptr=h_PI,
                amax_ptr=amax,
                num_pairs=pairs,
                TOP_K=problem.top_k,
                HAS_ROUTER_WEIGHTS=problem.apply_router_weight_on_input,
                STORE_AMAX=stores_amax,
                BLOCK_PAIRS=min(next_power_of_2(pairs), _MAX_IDS),
                **self._make_gate_up_arguments(call, launch1),
                **lora_arguments,
                **common_arguments,
            )
        with stages.stage(self._gemm2_stage):
            lora_arguments = self._shrink(call, "lora_u2", h_PI)
            launch(
                self._down_kernel,
                self._make_down_grid(pairs, launch2),
                h_ptr=h_PI,
                amax_ptr=amax,
                router_weights_ptr=routing.topk_weights_TK,
                out_ptr=call.output,
                num_pairs=pairs,
                num_amax_blocks=blocks,
                HAS_ROUTER_WEIGHTS=self._sums_topk and not problem.apply_router_weight_on_input,
                BLOCK_AMAX=next_power_of_2(blocks),
                **self._make_down_arguments(call, launch2),
                **self._choose_down_registers(launch2),
                **lora_arguments,
                **common_arguments,
            )

    def _shrink(self, call: PathCall, name: str, rows: torch.Tensor | None) -> dict[str, object]:
        """Launch the LoRA shrink of one GEMM, and return the LoRA arguments of the GEMM's kernel.

        Return {} for a call without adapters.
        """
        if call.tokens.routing.adapters_T is None:
            return {}
        assert rows is not None
        weights, is_gemm1 = call.weights, name == "lora_u13"
        matrices1, matrices2 = (
            (weights.lora_a13, weights.lora_b13),
            (weights.lora_a2, weights.lora_b2),
        )
        with stages.stage(stages.SHRINK):
            shrink_output = shrink_few_pairs(
                call, name, rows, matrices1 if is_gemm1 else matrices2, self.problem
            )
        return _make_adapter_arguments(shrink_output, None if is_gemm1 else self.problem.top_k)

    def _get_gemm1_stage(self, call: PathCall) -> str:
        """Return the name of the stages that the GEMM 1 launch comprises."""
        quantizes = self.problem.scheme.quantizes_activations and call.tokens.scale is None
        return stages.fuse(stages.QUANTIZE_INPUT, stages.GEMM1) if quantizes else stages.GEMM1

    @cached_property
    def _gemm2_stage(self) -> str:
        """Return the name of the stages that the GEMM 2 launch comprises."""
        quantize_stage = (stages.QUANTIZE,) if self.problem.scheme.quantizes_activations else ()
        return stages.fuse(
            *quantize_stage, stages.GEMM2, *((stages.REDUCE,) if self._sums_topk else ())
        )

    def _make_gate_up_arguments(self, call: PathCall, tile: LaunchConfig) -> dict[str, object]:
        """Return the arguments of GEMM 1 that depend on x, the weights and the launch."""
        problem = self.problem
        operands = gemm1_operands(call.weights, problem)
        input_quant, scales = input_scales(call.tokens, call.weights.a1_scale, problem)
        x_TH = call.tokens.x_TH
        return {
            "x_ptr": x_TH,
            "intermediate_size": problem.intermediate,
            "hidden_size": problem.hidden,
            "up_row_offset": operands.up_row_offset,
            "up_offset": operands.up_row_offset * operands.w.stride(1),
            "stride_xm": x_TH.stride(0),
            "stride_xk": x_TH.stride(1),
            "GATE_STRIDE": operands.gate_stride,
            "INPUT_QUANT": input_quant,
            "AMAX_BLOCK_K": min(next_power_of_2(problem.hidden), _MAX_AMAX_BLOCK),
            **scales,
            **operands.constants,
            **_make_operand_arguments(operands, tile, tile.block_n),
        }

    def _make_down_arguments(self, call: PathCall, tile: LaunchConfig) -> dict[str, object]:
        """Return the arguments of GEMM 2 that depend on h, the weights and the launch."""
        problem = self.problem
        pairs_per_output, pairs_per_step = self._count_pairs(tile)
        static_scale = call.weights.a2_scale
        return {
            "h_scale_ptr": call.tokens.x_TH if static_scale is None else static_scale,
            "hidden_size": problem.hidden,
            "size_k": problem.intermediate,
            "routed_scaling_factor": float(problem.routed_scaling_factor)
            if self._sums_topk
            else 1.0,
            "PAIRS_PER_OUTPUT": pairs_per_output,
            "PAIRS_PER_STEP": pairs_per_step,
            "INPUT_QUANT": activation_scale_kind(problem.scheme, problem.intermediate),
            **_make_operand_arguments(
                gemm2_operands(call.weights, problem), tile, tile.block_n // pairs_per_step
            ),
        }

    def _count_pairs(self, tile: LaunchConfig) -> tuple[int, int]:
        """Return the pairs per output row, and the pairs that GEMM 2 processes at once."""
        pairs_per_output = self.problem.top_k if self._sums_topk else 1
        max_pairs_per_step = min(next_power_of_2(pairs_per_output), tile.block_n)
        pairs_per_step = 1 << (min(max_pairs_per_step, tile.group_m).bit_length() - 1)
        return pairs_per_output, pairs_per_step

    def _choose_down_registers(self, tile: LaunchConfig) -> dict[str, object]:
        """Return maxnreg for GEMM 2 if an output row has many pairs; otherwise, return {}.

        With this limit, four programs of four warps fit on an SM. Without it, ptxas spills 8 bytes
        to fit a fifth program (from 17 pairs on, fp8 weights with biases, triton 3.6.0, sm_90).
        """
        pairs_per_output, _ = self._count_pairs(tile)
        has_many_pairs = pairs_per_output > _MAX_UNLIMITED_PAIRS and tile.num_warps == 4
        return {"maxnreg": 128} if has_many_pairs else {}

    def _make_down_grid(self, pairs: int, tile: LaunchConfig) -> tuple[int, ...]:
        pairs_per_output, pairs_per_step = self._count_pairs(tile)
        columns = tile.block_n // pairs_per_step
        return (pairs // pairs_per_output * -(-self.problem.hidden // columns),)


def _make_operand_arguments(
    operands: GemmOperands, tile: LaunchConfig, columns: int
) -> dict[str, object]:
    """Return the weight, scale and bias arguments of either kernel. `columns` is BLOCK_N."""
    scheme, w = operands.scheme, operands.w
    scale = w if operands.scale is None else operands.scale
    zero_point = w if operands.zero_point is None else operands.zero_point
    scale_strides = () if operands.scale is None else operands.scale.stride()
    zero_strides = (0, 0, 0) if operands.zero_point is None else operands.zero_point.stride()
    group_n, group_k = scale_group(scheme, operands.size_k)
    if not group_k:  # one group covers all of K, and so does its zero point
        zero_strides = (*zero_strides[:2], 0)
    activation_dtype = scheme.activation
    return {
        "b_ptr": w,
        "b_scale_ptr": scale,
        "zero_point_ptr": zero_point,
        "bias_ptr": w if operands.bias is None else operands.bias,
        "stride_be": w.stride(0),
        "stride_bn": w.stride(1),
        "stride_bk": w.stride(2),
        **dict(
            zip(("stride_bse", "stride_bsn", "stride_bsk"), (*scale_strides, 0, 0, 0), strict=False)
        ),
        **dict(zip(("stride_bze", "stride_bzn", "stride_bzk"), zero_strides, strict=True)),
        "stride_bias": 0 if operands.bias is None else operands.bias.stride(0),
        "HAS_BIAS": operands.bias is not None,
        "QMAX": QMAX.get(activation_dtype, 1.0),
        "ROUND_TO_INT": activation_dtype == "int8",
        "MIN_SCALE": MIN_SCALE,
        "HAS_SCALES": scheme.quantized,
        "ZERO_POINT": 0
        if operands.zero_point is not None
        else IMPLICIT_ZERO_POINT.get(scheme.weight, 0),
        "HAS_ZERO_POINTS": operands.zero_point is not None,
        "GROUP_N": group_n,
        "GROUP_K": group_k,
        "SCALE_ROWS": 1 if _has_one_scale_per_block(operands, columns, group_n) else columns,
        "BLOCK_N": columns,
        "BLOCK_K": max(tile.block_k, next_power_of_2(group_k))
        if activation_dtype != "none"
        else tile.block_k,
        "VECTOR_SIZE": min(_VECTOR // w.element_size(), tile.block_k),
        **_make_n_major_arguments(operands, tile, columns),
        "STAGES": tile.num_stages,
        "num_warps": tile.num_warps,
    }


def _make_n_major_arguments(
    operands: GemmOperands, tile: LaunchConfig, columns: int
) -> dict[str, object]:
    """Return the arguments for weights whose N is contiguous, or {} for other weights."""
    if not operands.n_major:
        return {}
    width = columns * (2 if operands.adjacent_up else 1)
    vectors = max(1, width * operands.w.element_size() // _VECTOR)  # per row of the tile
    step_rows = max(1, 1 << (tile.num_warps * _WARP // vectors).bit_length() - 1)
    return {"N_MAJOR": True, "STEP_ROWS": min(step_rows, tile.block_k)}


def _make_adapter_arguments(shrink_output: ShrinkOutput, top_k: int | None) -> dict[str, object]:
    """Return the LoRA arguments of the GEMM 1 kernel or, if top_k is given, the GEMM 2 kernel."""
    arguments = shrink_output.arguments()
    arguments["BLOCK_RANK"] = next_power_of_2(shrink_output.b.shape[3])
    if top_k is not None:
        del arguments["LORA_UP_OFFSET"]
        arguments["PAIRS_PER_TOKEN"] = top_k
    return arguments


def _has_one_scale_per_block(operands: GemmOperands, columns: int, group_n: int) -> bool:
    """Return whether the weight rows of every block of `columns` columns share one scale."""
    rows = columns * operands.gate_stride
    return group_n % rows == 0 and (operands.gate_stride > 1 or operands.up_row_offset % rows == 0)
