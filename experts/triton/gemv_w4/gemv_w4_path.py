"""The gemv_w4 path: a few tokens and 4-bit weights, in two launches, without sorting pairs.

It works like the gemv path, but with tensor cores. Words of eight 4-bit weights are unpacked in
registers. GEMM 1 stores h permuted and multiplied as the MMA operands of GEMM 2 require, see
`store_in_pair_order`.
"""

from collections.abc import Iterable, Iterator

import torch

from experts.triton.candidates import CandidateGroups
from experts.triton.gemv_w4 import gemv_w4_config
from experts.triton.gemv_w4.gemv_w4_config import GemvW4Config, candidates, violations
from experts.triton.launch_config import Device, Gemm, Launch, MoEConfig, Violation
from experts.triton.operands import GemmOperands, gemm1_operands, gemm2_operands, scale_group
from experts.triton.operands_w4 import allows_vector_loads, w4_arguments
from experts.triton.path import Path, PathCall
from modular_kernel.ops.count import id_arguments, next_power_of_2
from modular_kernel.replay import stages
from modular_kernel.replay.launch.launch import launch
from modular_kernel.replay.launch.pdl import pdl_arguments
from modular_kernel.replay.launch.runtime import use_triton
from modular_kernel.spec.problem import Combine, Problem
from modular_kernel.spec.rounding import Roundings
from modular_kernel.tensors import ExpertWeights
from modular_kernel.workspace import BufferSpec

_MAX_IDS = 128  # ids per step of counting invalid ids; fixed, so that calls share one kernel


class GemvW4Path(Path):
    """The path for the problems of `gemv_w4_config.supports`. Row p of h belongs to pair p."""

    name = gemv_w4_config.NAME
    launch = GemvW4Config
    transferable = False

    @classmethod
    def supports(cls, problem: Problem, device: Device) -> bool:
        """Return whether the kernels support `problem`; see `gemv_w4_config.supports`."""
        return problem.adapters is None and gemv_w4_config.supports(problem)

    @classmethod
    def max_tokens(cls, problem: Problem) -> int | None:
        """Return the number of tokens above which they often share an expert and sorting pays."""
        return gemv_w4_config.max_tokens(problem)

    @classmethod
    def default_config(cls, problem: Problem, tokens: int, device: Device) -> MoEConfig:
        """Return the default launches, which depend on the number of programs."""
        return gemv_w4_config.default(problem, tokens)

    @classmethod
    def breakpoints(cls, problem: Problem) -> Iterable[int]:
        """Return every token count for which this path is used by default.

        The launches may change at each of them.
        """
        return range(1, gemv_w4_config.max_tokens(problem) + 1)

    @classmethod
    def violations(
        cls, config: Launch, gemm: Gemm, problem: Problem, device: Device
    ) -> Iterator[Violation]:
        """Yield the violations of a tiled launch.

        Those of scale groups are left out, because block_k may span several groups.
        """
        assert isinstance(config, GemvW4Config)
        return violations(config, gemm, device)

    @classmethod
    def candidates(cls, problem: Problem, tokens: int) -> CandidateGroups:
        return candidates(problem, tokens)

    def __init__(self, problem: Problem) -> None:
        from experts.triton.gemv_w4.kernels.down import gemv_w4_down_kernel
        from experts.triton.gemv_w4.kernels.gate_up import gemv_w4_gate_up_kernel
        from modular_kernel.replay.launch.triton_versions import WORDS_STAY_IN_LANES

        assert gemv_w4_config.supports(problem)
        self.problem = problem
        # With a sum over top-k, all pairs of a token are accumulated before rounding.
        self.roundings = Roundings(rows=problem.combine is not Combine.SUM)
        self._gate_up_kernel, self._down_kernel = gemv_w4_gate_up_kernel, gemv_w4_down_kernel
        self._words_stay_in_lanes = WORDS_STAY_IN_LANES
        self._sums_topk = problem.combine is Combine.SUM
        reduce = (stages.REDUCE,) if self._sums_topk else ()
        self._second_stage = stages.fused(stages.GEMM2, *reduce)

    def specs(self, tokens: int, block_m: int) -> dict[str, BufferSpec]:
        """Return the buffers of a call of `tokens` tokens; block_m is ignored."""
        problem = self.problem
        shape = (tokens * problem.top_k, problem.intermediate)
        return {"workspace13": BufferSpec(shape, problem.dtype)}

    def supports_tensors(self, weights: ExpertWeights, x_TH: torch.Tensor) -> bool:
        """Return whether the weights can be read as words, in 16-byte loads."""
        return allows_vector_loads(weights)

    def run(self, call: PathCall) -> None:
        pairs = call.tokens.routing.topk_ids_TK.numel()
        h_PI = call.workspace.take("workspace13", (pairs, self.problem.intermediate))
        use_triton(h_PI)  # for its side effect: it patches Triton's interpreter on first use
        ids = {**id_arguments(call.tokens.routing, self.problem.e), **pdl_arguments()}
        with stages.stage(stages.GEMM1):
            self._multiply_x(call, h_PI, ids)
        with stages.stage(self._second_stage):
            self._multiply_h(call, h_PI, ids)

    def _multiply_x(self, call: PathCall, h_PI: torch.Tensor, ids: dict[str, object]) -> None:
        problem, routing = self.problem, call.tokens.routing
        tile, _ = call.config.both(GemvW4Config)
        operands, pairs = gemm1_operands(call.weights, problem), h_PI.shape[0]
        x_TH = call.tokens.x_TH
        launch(
            self._gate_up_kernel,
            (pairs, -(-operands.columns // tile.block_n) + 1),
            x_ptr=x_TH,
            row_weights_ptr=routing.topk_weights_TK,
            invalid_ptr=routing.invalid_ids,
            h_ptr=h_PI,
            num_pairs=pairs,
            intermediate=operands.columns,
            UP_ROW=operands.up_row,
            stride_xm=x_TH.stride(0),
            stride_xk=x_TH.stride(1),
            ROW_STEP=operands.step,
            TOP_K=problem.top_k,
            HAS_ROW_WEIGHTS=problem.apply_router_weight_on_input,
            BLOCK_P=_MAX_IDS,
            **operands.constants,
            **_arguments(operands, tile, 1),
            maxnreg=gemv_w4_config.registers(tile, 1, in_lanes=self._words_stay_in_lanes),
            **ids,
        )

    def _multiply_h(self, call: PathCall, h_PI: torch.Tensor, ids: dict[str, object]) -> None:
        problem, routing = self.problem, call.tokens.routing
        _, tile = call.config.both(GemvW4Config)
        operands = gemm2_operands(call.weights, problem)
        slots = problem.top_k if self._sums_topk else 1
        halves = gemv_w4_config.halves(tile)
        tokens = h_PI.shape[0] // slots
        launch(
            self._down_kernel,
            (tokens, -(-operands.columns // tile.block_n)),
            h_ptr=h_PI,
            row_weights_ptr=routing.topk_weights_TK,
            out_ptr=call.output,
            hidden=operands.columns,
            factor=float(problem.routed_scaling_factor) if self._sums_topk else 1.0,
            TOP_K=slots,
            HAS_ROW_WEIGHTS=self._sums_topk and not problem.apply_router_weight_on_input,
            BLOCK_K=next_power_of_2(slots),
            HALVES=halves,
            WARPS_PER_PAIR=_warps_per_pair(tile, slots),
            **_arguments(operands, tile, slots, halves),
            maxnreg=gemv_w4_config.registers(tile, 2, in_lanes=self._words_stay_in_lanes),
            **ids,
        )


def _arguments(
    operands: GemmOperands, tile: GemvW4Config, slots: int, halves: int = 1
) -> dict[str, object]:
    """Return the arguments of both kernels that depend on the weights and the launch.

    `slots` is the number of pairs per program; see `gemv_w4_config.halves` for `halves`.
    """
    _, group = scale_group(operands.scheme, operands.depth)
    group = group or operands.depth
    chunks = max(1, gemv_w4_config.chunks(tile, group) // halves)
    blocks = -(-operands.depth // (halves * chunks * gemv_w4_config.CHUNK))
    warps_per_pair = _warps_per_pair(tile, slots)
    steps = -(-blocks // warps_per_pair) if warps_per_pair else -(-slots * blocks // tile.num_warps)
    return {
        **w4_arguments(operands),
        "DEPTH": operands.depth,
        "PAIRED_SCALES": _has_paired_scales(operands, group, chunks),
        "BLOCK_N": tile.block_n,
        "EVEN_N": operands.columns % tile.block_n == 0,
        "CHUNKS": chunks,
        "STEPS": steps,
        "steps": steps,
        "WARPS": tile.num_warps,
        "STAGES": max(1, tile.num_stages - 1),
        "LOAD_AFTER_MMA": tile.num_stages == 1,
        "num_warps": tile.num_warps,
        "num_stages": 1,
    }


def _warps_per_pair(tile: GemvW4Config, slots: int) -> int:
    """Return the warps of a program that work on one pair; 0 if they cannot be divided evenly."""
    return 0 if tile.num_warps % slots else tile.num_warps // slots


def _has_paired_scales(operands: GemmOperands, group: int, chunks: int) -> bool:
    """Return whether the scales of a row can be loaded two at a time.

    They are contiguous. Both a block and a row must have an even number of whole groups.
    """
    slots = max(1, gemv_w4_config.CHUNK // group)
    assert operands.scale is not None
    return (
        group * slots == gemv_w4_config.CHUNK
        and slots * chunks % 2 == 0
        and operands.depth % (2 * group) == 0
        and operands.scale.shape[2] % 2 == 0
    )
