"""The gemv_tma path: a layer for a few tokens and fp8 weights on sm_90, in two launches.

The path works like the gemv path, but a producer warp loads the weights into shared memory with
TMA, so that stalls of the MMA warps do not reduce the memory bandwidth. `gemv_tma_config` describes
the fields of the launches.
"""

from collections.abc import Iterator

import torch

from experts.triton.candidates import CandidateGroups
from experts.triton.gemv_tma import gemv_tma_config
from experts.triton.gemv_tma.gemv_tma_config import (
    COLUMNS,
    PANEL,
    ROWS,
    VECTORS,
    candidates,
    count_pieces,
    violations,
)
from experts.triton.launch_config import Device, Gemm, Launch, LaunchConfig, MoEConfig, Violation
from experts.triton.operands import (
    TMA_BYTES,
    GemmOperands,
    gemm1_operands,
    gemm2_operands,
    input_scales,
)
from experts.triton.path import Path, PathCall
from modular_kernel.ops.count import id_arguments, next_power_of_2
from modular_kernel.quant.quantized_weights import MIN_SCALE, QMAX
from modular_kernel.replay import stages
from modular_kernel.replay.launch.launch import launch
from modular_kernel.replay.launch.pdl import pdl_arguments
from modular_kernel.spec.problem import Combine, Problem
from modular_kernel.spec.rounding import Roundings
from modular_kernel.tensors import ExpertWeights
from modular_kernel.workspace import BufferSpec

# Registers per thread of GEMM 1 and of GEMM 2. The producer warp releases most of its registers.
_REGISTERS_PER_THREAD = (128, 144)


class GemvTmaPath(Path):
    """The path for the problems of `gemv_tma_config.supports`. Row p of h belongs to pair p."""

    name = gemv_tma_config.NAME
    quantizes_input = True
    transferable = False

    @classmethod
    def supports(cls, problem: Problem, device: Device) -> bool:
        return problem.adapters is None and gemv_tma_config.supports(problem, device)

    @classmethod
    def max_tokens(cls, problem: Problem) -> int | None:
        return gemv_tma_config.max_tokens(problem)

    @classmethod
    def default_config(cls, problem: Problem, tokens: int, device: Device) -> MoEConfig:
        return gemv_tma_config.default_config(problem, device)

    @classmethod
    def violations(
        cls, config: Launch, gemm: Gemm, problem: Problem, device: Device
    ) -> Iterator[Violation]:
        assert isinstance(config, LaunchConfig)
        return violations(config, gemm, device)

    @classmethod
    def candidates(cls, problem: Problem, tokens: int) -> CandidateGroups:
        return candidates(problem, tokens)

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        # With a sum over top-k, all pairs of a token are accumulated before rounding.
        self.roundings = Roundings(rows=problem.combine is not Combine.SUM)
        self._has_block_scales = problem.scheme.granularity == "block"

    def specs(self, tokens: int, block_m: int) -> dict[str, BufferSpec]:
        problem, num_pairs = self.problem, tokens * self.problem.top_k
        specs = {"workspace13": BufferSpec((num_pairs, problem.intermediate), problem.dtype)}
        if not self._has_block_scales:
            specs["gemv_tma_amax"] = BufferSpec((num_pairs * self._num_blocks,), torch.float32)
        return specs

    @property
    def _num_blocks(self) -> int:
        """Return the number of column blocks of GEMM 1."""
        return -(-self.problem.intermediate // COLUMNS)

    def supports_tensors(self, weights: ExpertWeights, x_TH: torch.Tensor) -> bool:
        optional_tensors = (weights.b1, weights.b2, weights.w1_scale, weights.w2_scale)
        tensors = (weights.w1, weights.w2, *(t for t in optional_tensors if t is not None))
        return all(t.is_contiguous() for t in tensors) and all(
            t.is_meta or t.data_ptr() % TMA_BYTES == 0 for t in tensors[:2]
        )

    def run(self, call: PathCall) -> None:
        from experts.triton.gemv_tma.kernels.down import gemv_tma_down_kernel
        from experts.triton.gemv_tma.kernels.gate_up import gemv_tma_gate_up_kernel
        from experts.triton.kernels.tma_descriptors import count_sms

        problem, workspace = self.problem, call.workspace
        num_pairs = call.tokens.routing.topk_ids_TK.numel()
        h_PI = workspace.take("workspace13", (num_pairs, problem.intermediate))
        amax = h_PI
        if not self._has_block_scales:
            amax = workspace.take("gemv_tma_amax", (num_pairs * self._num_blocks,))
        num_sms = count_sms()
        common_arguments = {
            "h_ptr": h_PI,
            "amax_ptr": amax,
            "TOP_K": problem.top_k,
            "BLOCK_SCALES": self._has_block_scales,
            "QMAX": QMAX[problem.scheme.activation],
            "MIN_SCALE": MIN_SCALE,
            "num_warps": 4,
            **pdl_arguments(),
        }
        with stages.stage(self._get_gemm1_stage(call)):
            launch(
                gemv_tma_gate_up_kernel,
                (min(num_sms, num_pairs * self._num_blocks),),
                invalid_count_ptr=call.tokens.routing.invalid_ids,
                num_pairs=num_pairs,
                maxnreg=_REGISTERS_PER_THREAD[0],
                **self._make_gate_up_arguments(call),
                **id_arguments(call.tokens.routing, problem.e),
                **common_arguments,
            )
        num_tokens, pair_slots = len(call.output), next_power_of_2(problem.top_k)
        with stages.stage(stages.fuse(stages.QUANTIZE, stages.GEMM2, stages.REDUCE)):
            launch(
                gemv_tma_down_kernel,
                (min(num_sms, num_tokens * -(-problem.hidden // (ROWS // pair_slots))),),
                out_ptr=call.output,
                num_tokens=num_tokens,
                maxnreg=_REGISTERS_PER_THREAD[1],
                **self._make_down_arguments(call, pair_slots),
                **id_arguments(call.tokens.routing, problem.e),
                **common_arguments,
            )

    def _get_gemm1_stage(self, call: PathCall) -> str:
        """Return the name of the stages that the GEMM 1 launch comprises."""
        is_quantized = call.tokens.scale is not None
        return stages.GEMM1 if is_quantized else stages.fuse(stages.QUANTIZE_INPUT, stages.GEMM1)

    def _make_gate_up_arguments(self, call: PathCall) -> dict[str, object]:
        """Return the arguments of GEMM 1 that depend on x, the weights and the launch."""
        problem, x_TH = self.problem, call.tokens.x_TH
        operands = gemm1_operands(call.weights, problem)
        input_quant, scales = input_scales(call.tokens, None, problem)
        # With block scales, a group that covers all of K is handled like other groups.
        input_quant = "group" if self._has_block_scales and input_quant == "token" else input_quant
        constants = {k: v for k, v in operands.constants.items() if k != "GATED"}
        return {
            "x_ptr": x_TH,
            "stride_xm": x_TH.stride(0),
            "stride_xk": x_TH.stride(1),
            "intermediate_size": problem.intermediate,
            "hidden_size": problem.hidden,
            "weight_rows": operands.w.shape[1],
            "up_row_offset": operands.up_row_offset,
            "GATE_STRIDE": operands.gate_stride,
            "INPUT_QUANT": input_quant,
            "TOKENS_IN_GROUP": min(VECTORS, next_power_of_2(len(x_TH))),
            **scales,
            **constants,
            **_make_weight_arguments(operands, COLUMNS if operands.gate_stride == 1 else ROWS),
            **_make_ring_arguments(call.config.typed_launches(LaunchConfig)[0], problem.hidden),
        }

    def _make_down_arguments(self, call: PathCall, pair_slots: int) -> dict[str, object]:
        """Return the arguments of GEMM 2 that depend on h, the weights and the launch."""
        problem = self.problem
        return {
            "router_weights_ptr": call.tokens.routing.topk_weights_TK,
            "hidden_size": problem.hidden,
            "size_k": problem.intermediate,
            "amax_blocks": self._num_blocks,
            "routed_scaling_factor": float(problem.routed_scaling_factor),
            "PAIR_SLOTS": pair_slots,
            "BLOCK_AMAX": max(PANEL // 4, next_power_of_2(self._num_blocks)),
            **_make_weight_arguments(gemm2_operands(call.weights, problem), ROWS // pair_slots),
            **_make_ring_arguments(
                call.config.typed_launches(LaunchConfig)[1], problem.intermediate
            ),
        }


def _make_weight_arguments(operands: GemmOperands, box_rows: int) -> dict[str, object]:
    from experts.triton.kernels.tma_descriptors import tma_descriptor

    w, scale, bias = operands.w, operands.scale, operands.bias
    assert scale is not None
    groups = scale.shape[1:] if scale.dim() == 3 else (0, 0)
    return {
        "w_desc": tma_descriptor(w.view(-1, w.shape[2]), box_rows),
        "w_scale_ptr": scale,
        "scale_rows": groups[0],
        "scale_groups": groups[1],
        "bias_ptr": scale if bias is None else bias,
        "HAS_BIAS": bias is not None,
    }


def _make_ring_arguments(tile: LaunchConfig, k: int) -> dict[str, object]:
    return {
        "PANELS_PER_STAGE": tile.block_k // PANEL,
        "STAGES": tile.num_stages,
        "PIECES": count_pieces(k),
    }
