"""The aligned path: sort pairs into blocks of one expert, run two grouped GEMMs, sum over top-k.

A pair is a token together with one of its top_k experts. Pair p belongs to token p // top_k. The
GEMMs gather their input and write their output by pair, so no launch permutes rows. The path
supports every layer.
"""

from collections.abc import Iterable, Iterator

import torch

from experts.triton.adapters import PairShrink, ShrinkOutput, adapter_specs
from experts.triton.aligned import aligned_config
from experts.triton.aligned.aligned_config import candidates
from experts.triton.candidates import CandidateGroups
from experts.triton.launch_config import (
    Device,
    Gemm,
    Launch,
    LaunchConfig,
    MoEConfig,
    Violation,
    violations,
)
from experts.triton.operands import GemmOperands, gemm1_operands, gemm2_operands, is_n_major
from experts.triton.path import Path, PathCall
from modular_kernel.ops.align import AlignedPairs, align, align_specs
from modular_kernel.ops.quantize import quantize_rows, quantize_specs, take_quantized
from modular_kernel.ops.reduce import weight_and_sum
from modular_kernel.ops.valid_rows import PairRows
from modular_kernel.replay import stages
from modular_kernel.replay.launch.launch import launch
from modular_kernel.replay.launch.pdl import pdl_arguments
from modular_kernel.spec.problem import Combine, Problem
from modular_kernel.spec.rounding import Roundings
from modular_kernel.tensors import ExpertWeights
from modular_kernel.workspace import BufferSpec


class AlignedPath(Path):
    """The path that supports every problem. Row p of the output of both GEMMs belongs to pair p."""

    name = aligned_config.NAME
    may_reject_tensors = False
    roundings = Roundings()

    @classmethod
    def supports(cls, problem: Problem, device: Device) -> bool:
        return True

    @classmethod
    def default_config(cls, problem: Problem, tokens: int, device: Device) -> MoEConfig:
        return aligned_config.default_config(problem, tokens, device)

    @classmethod
    def breakpoints(cls, problem: Problem) -> Iterable[int]:
        return aligned_config.breakpoints(problem)

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
        from experts.triton.aligned.kernels.grouped_gemm import grouped_gemm_kernel

        self.problem = problem
        self._kernel = grouped_gemm_kernel
        self._sums_topk = problem.combine is Combine.SUM

    def supports_tensors(self, weights: ExpertWeights, x_TH: torch.Tensor) -> bool:
        return True

    def config_for_strides(
        self, config: MoEConfig, weights: ExpertWeights, device: Device
    ) -> MoEConfig:
        n_major = is_n_major(weights.w1), is_n_major(weights.w2)
        if self.problem.scheme.quantized or not any(n_major):
            return config
        return aligned_config.n_major_config(self.problem, config, n_major, device)

    def specs(self, tokens: int, block_m: int) -> dict[str, BufferSpec]:
        problem, num_pairs = self.problem, tokens * self.problem.top_k
        specs = {
            "workspace13": BufferSpec((num_pairs, problem.intermediate), problem.dtype),
            **align_specs(num_pairs, block_m, problem.e),
        }
        if self._sums_topk:
            # GEMM 2 does not read the output of GEMM 1 if it was quantized into another buffer.
            aliases = ("workspace13",) if problem.scheme.quantizes_activations else ()
            specs["workspace2"] = BufferSpec((num_pairs, problem.hidden), problem.dtype, aliases)
        if problem.scheme.quantizes_activations:
            specs |= quantize_specs("h", problem.scheme, num_pairs, problem.intermediate)
        return specs | adapter_specs(problem, num_pairs)

    def run(self, call: PathCall) -> None:
        self.write_output(self.run_gemms(self.align(call), call), call)

    def align(self, call: PathCall) -> AlignedPairs:
        """Sort the pairs of the call into blocks of one expert each."""
        with stages.stage(stages.SORT):
            return align(
                call.tokens.routing,
                block_size=call.config.gemm1.block_m,
                num_local=self.problem.e,
                workspace=call.workspace,
                ignore_invalid=self._sums_topk,
            )

    def run_gemms(self, aligned: AlignedPairs, call: PathCall) -> torch.Tensor:
        """Run both GEMMs; return the (P, H) output of GEMM 2, not weighted by the router.

        If the output keeps the top-k dimension, the result is call.output.
        """
        problem, routing, workspace = self.problem, call.tokens.routing, call.workspace
        num_pairs = routing.topk_ids_TK.numel()
        h_PI = workspace.take("workspace13", (num_pairs, problem.intermediate))
        input_router_weights_TK = (
            routing.topk_weights_TK if problem.apply_router_weight_on_input else None
        )
        shrink = self._make_shrink(call, aligned)
        shrink_output13 = None if shrink is None else shrink.shrink_x(call.tokens.plain_TH)
        with stages.stage(stages.GATHER_GEMM1):
            operands = gemm1_operands(call.weights, problem)
            rows = (call.tokens.x_TH, call.tokens.scale)
            self.multiply(
                rows,
                operands,
                call.config.gemm1,
                aligned,
                h_PI,
                input_router_weights_TK,
                shrink_output13,
            )
        shrink_output2 = None if shrink is None else shrink.shrink_h(h_PI)
        h_rows = self._quantize(h_PI, call)
        rows_PH = call.output
        if self._sums_topk:
            rows_PH = workspace.take("workspace2", (num_pairs, problem.hidden))
        with stages.stage(stages.GEMM2_SCATTER):
            operands = gemm2_operands(call.weights, problem)
            self.multiply(
                h_rows, operands, call.config.gemm2, aligned, rows_PH, None, shrink_output2
            )
        return rows_PH

    def write_output(self, rows_PH: torch.Tensor, call: PathCall) -> None:
        """Weight the rows by the router and sum them over top-k into call.output.

        If the output keeps the top-k dimension, do nothing, because GEMM 2 has written call.output.
        """
        if not self._sums_topk:
            return
        problem, routing = self.problem, call.tokens.routing
        with stages.stage(stages.REDUCE):
            weight_and_sum(
                rows_PH.view(*routing.topk_ids_TK.shape, problem.hidden),
                None if problem.apply_router_weight_on_input else routing.topk_weights_TK,
                scale=problem.routed_scaling_factor,
                out=call.output,
                routing=routing,
                num_local=problem.e,
            )

    def _make_shrink(self, call: PathCall, aligned: AlignedPairs) -> PairShrink | None:
        """Return the shrink launches of the call, or None without adapters."""
        slots_T = call.tokens.routing.adapters_T
        if slots_T is None:
            return None
        return PairShrink(call, self.problem, aligned, slots_T)

    def _quantize(
        self, h_PI: torch.Tensor, call: PathCall
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the input of GEMM 2 and its scales, or (h_PI, None) if it is not quantized."""
        scheme = self.problem.scheme
        if not scheme.quantizes_activations:
            return h_PI, None
        with stages.stage(stages.QUANTIZE):
            shape = (h_PI.shape[0], h_PI.shape[1])
            static_scale = call.weights.a2_scale
            out = take_quantized(call.workspace, "h", scheme, shape, static_scale=static_scale)
            valid_rows = PairRows(call.tokens.routing, self.problem.e)
            quantize_rows(h_PI, scheme, out=out, valid_rows=valid_rows)
        return out.q_RK, out.scale

    def multiply(
        self,
        rows: tuple[torch.Tensor, torch.Tensor | None],
        operands: GemmOperands,
        config: Launch,
        aligned: AlignedPairs,
        out: torch.Tensor,
        row_weights_TK: torch.Tensor | None,
        shrink_output: ShrinkOutput | None,
    ) -> None:
        """Launch one grouped GEMM.

        rows: tokens (T, H) or pairs (P, I), and their scales.
        out: the output, one row per pair.
        row_weights_TK: router weights that multiply the input, or None.
        shrink_output: the output of the LoRA shrink, or None for a call without adapters.
        """
        a, _ = rows
        num_pairs = out.numel() // operands.size_n
        num_m_blocks = aligned.expert_ids.numel()
        num_n_blocks = -(-operands.size_n // config.block_n)
        launch(
            self._kernel,
            (num_m_blocks * num_n_blocks,),
            a_ptr=a,
            router_weights_ptr=a if row_weights_TK is None else row_weights_TK,
            out_ptr=out,
            sorted_token_ids_ptr=aligned.sorted_token_ids,
            expert_ids_ptr=aligned.expert_ids,
            num_tokens_post_padded_ptr=aligned.num_tokens_post_padded,
            num_pairs=num_pairs,
            num_m_blocks=num_m_blocks,
            stride_am=a.stride(0),
            PAIRS_PER_A_ROW=num_pairs // a.shape[0],
            WRITE_ZEROS=not self._sums_topk,
            HAS_ROUTER_WEIGHTS=row_weights_TK is not None,
            **({"ADJACENT_GATE_UP": True} if operands.adjacent_up else {}),
            **self.arguments(rows, operands, config, shrink_output),
            **pdl_arguments(),
        )

    def arguments(
        self,
        rows: tuple[torch.Tensor, torch.Tensor | None],
        operands: GemmOperands,
        config: Launch,
        shrink_output: ShrinkOutput | None,
    ) -> dict[str, object]:
        """Return the kernel arguments that do not depend on how rows are addressed."""
        assert isinstance(config, LaunchConfig)
        a, a_scale = rows
        return {
            "stride_ak": a.stride(1),
            "PAIRS_PER_TOKEN": self.problem.top_k,
            **({} if shrink_output is None else shrink_output.arguments()),  # defaults disable LoRA
            **operands.arguments(config, self.problem.fp32_precision, a_scale),
        }
