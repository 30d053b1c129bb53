"""The gemv_w4 path: a layer for a few tokens and 4-bit weights, in two launches.

The path works like the gemv path, without sorting pairs, but it uses tensor cores. Words of eight
4-bit weights are unpacked in registers. GEMM 1 stores the columns of h in the order that GEMM 2
needs, multiplied by the factors of `prescale_factor` (see `store_in_pair_order`).
`gemv_w4.kernels.common` defines the terms chunk, block and half.
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

# Number of ids that the kernel reads at a time when it counts invalid ids. It is a constant, so
# that calls with different numbers of tokens use the same compiled kernel.
_IDS_PER_STEP = 128


class GemvW4Path(Path):
    """The path for the problems of `gemv_w4_config.supports`. Row p of h belongs to pair p."""

    name = gemv_w4_config.NAME
    launch = GemvW4Config
    transferable = False

    @classmethod
    def supports(cls, problem: Problem, device: Device) -> bool:
        return problem.adapters is None and gemv_w4_config.supports(problem)

    @classmethod
    def max_tokens(cls, problem: Problem) -> int | None:
        return gemv_w4_config.max_tokens(problem)

    @classmethod
    def default_config(cls, problem: Problem, tokens: int, device: Device) -> MoEConfig:
        return gemv_w4_config.default_config(problem, tokens)

    @classmethod
    def breakpoints(cls, problem: Problem) -> Iterable[int]:
        # The launches may differ between any two token counts.
        return range(1, gemv_w4_config.max_tokens(problem) + 1)

    @classmethod
    def violations(
        cls, config: Launch, gemm: Gemm, problem: Problem, device: Device
    ) -> Iterator[Violation]:
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
        # Whether each lane of a warp unpacks the weights that it has loaded itself. If not, the
        # kernels need more registers.
        self._words_stay_in_lanes = WORDS_STAY_IN_LANES
        self._sums_topk = problem.combine is Combine.SUM
        reduce_stage = (stages.REDUCE,) if self._sums_topk else ()
        self._gemm2_stage = stages.fuse(stages.GEMM2, *reduce_stage)

    def specs(self, tokens: int, block_m: int) -> dict[str, BufferSpec]:
        problem = self.problem
        shape = (tokens * problem.top_k, problem.intermediate)
        return {"workspace13": BufferSpec(shape, problem.dtype)}

    def supports_tensors(self, weights: ExpertWeights, x_TH: torch.Tensor) -> bool:
        return allows_vector_loads(weights)

    def run(self, call: PathCall) -> None:
        num_pairs = call.tokens.routing.topk_ids_TK.numel()
        h_PI = call.workspace.take("workspace13", (num_pairs, self.problem.intermediate))
        use_triton(h_PI)  # for its side effect: it patches Triton's interpreter on first use
        common_arguments = {**id_arguments(call.tokens.routing, self.problem.e), **pdl_arguments()}
        with stages.stage(stages.GEMM1):
            self._multiply_x(call, h_PI, common_arguments)
        with stages.stage(self._gemm2_stage):
            self._multiply_h(call, h_PI, common_arguments)

    def _multiply_x(
        self, call: PathCall, h_PI: torch.Tensor, common_arguments: dict[str, object]
    ) -> None:
        """Launch GEMM 1, which writes h."""
        problem, routing = self.problem, call.tokens.routing
        tile, _ = call.config.typed_launches(GemvW4Config)
        operands, num_pairs = gemm1_operands(call.weights, problem), h_PI.shape[0]
        x_TH = call.tokens.x_TH
        launch(
            self._gate_up_kernel,
            (num_pairs, -(-operands.size_n // tile.block_n) + 1),
            x_ptr=x_TH,
            router_weights_ptr=routing.topk_weights_TK,
            invalid_count_ptr=routing.invalid_ids,
            h_ptr=h_PI,
            num_pairs=num_pairs,
            intermediate_size=operands.size_n,
            UP_ROW_OFFSET=operands.up_row_offset,
            stride_xm=x_TH.stride(0),
            stride_xk=x_TH.stride(1),
            GATE_STRIDE=operands.gate_stride,
            TOP_K=problem.top_k,
            HAS_ROUTER_WEIGHTS=problem.apply_router_weight_on_input,
            BLOCK_PAIRS=_IDS_PER_STEP,
            **operands.constants,
            **_make_common_arguments(operands, tile, 1),
            maxnreg=gemv_w4_config.max_registers(
                tile, 1, words_stay_in_lanes=self._words_stay_in_lanes
            ),
            **common_arguments,
        )

    def _multiply_h(
        self, call: PathCall, h_PI: torch.Tensor, common_arguments: dict[str, object]
    ) -> None:
        """Launch GEMM 2, which writes call.output."""
        problem, routing = self.problem, call.tokens.routing
        _, tile = call.config.typed_launches(GemvW4Config)
        operands = gemm2_operands(call.weights, problem)
        pairs_per_program = problem.top_k if self._sums_topk else 1
        halves = gemv_w4_config.num_halves(tile)
        num_rows = h_PI.shape[0] // pairs_per_program
        launch(
            self._down_kernel,
            (num_rows, -(-operands.size_n // tile.block_n)),
            h_ptr=h_PI,
            router_weights_ptr=routing.topk_weights_TK,
            out_ptr=call.output,
            hidden_size=operands.size_n,
            routed_scaling_factor=float(problem.routed_scaling_factor) if self._sums_topk else 1.0,
            TOP_K=pairs_per_program,
            HAS_ROUTER_WEIGHTS=self._sums_topk and not problem.apply_router_weight_on_input,
            BLOCK_TOP_K=next_power_of_2(pairs_per_program),
            HALVES=halves,
            WARPS_PER_PAIR=_count_warps_per_pair(tile, pairs_per_program),
            **_make_common_arguments(operands, tile, pairs_per_program, halves),
            maxnreg=gemv_w4_config.max_registers(
                tile, 2, words_stay_in_lanes=self._words_stay_in_lanes
            ),
            **common_arguments,
        )


def _make_common_arguments(
    operands: GemmOperands, tile: GemvW4Config, pairs_per_program: int, halves: int = 1
) -> dict[str, object]:
    """Return the arguments that both kernels have and that depend on the weights or the launch."""
    _, group = scale_group(operands.scheme, operands.size_k)
    group = group or operands.size_k
    chunks = max(1, gemv_w4_config.chunks_per_block(tile, group) // halves)
    blocks = -(-operands.size_k // (halves * chunks * gemv_w4_config.CHUNK))
    warps_per_pair = _count_warps_per_pair(tile, pairs_per_program)
    steps = (
        -(-blocks // warps_per_pair)
        if warps_per_pair
        else -(-pairs_per_program * blocks // tile.num_warps)
    )
    return {
        **w4_arguments(operands),
        "SIZE_K": operands.size_k,
        "PAIRED_SCALES": _has_paired_scales(operands, group, chunks),
        "BLOCK_N": tile.block_n,
        "EVEN_N": operands.size_n % tile.block_n == 0,
        "CHUNKS": chunks,
        "NUM_STEPS": steps,  # a constant, with which the compiler unrolls short loops
        "num_steps": steps,  # the same number, for longer loops
        "NUM_WARPS": tile.num_warps,
        "STAGES": max(1, tile.num_stages - 1),  # blocks in flight while one is multiplied
        "LOAD_AFTER_MMA": tile.num_stages == 1,
        "num_warps": tile.num_warps,
        "num_stages": 1,
    }


def _count_warps_per_pair(tile: GemvW4Config, pairs_per_program: int) -> int:
    """Return the number of warps per pair, or 0 if the warps cannot be divided evenly."""
    return 0 if tile.num_warps % pairs_per_program else tile.num_warps // pairs_per_program


def _has_paired_scales(operands: GemmOperands, group: int, chunks: int) -> bool:
    """Return whether the scales of a row can be loaded two at a time.

    A block and a row must both have an even number of whole groups.
    """
    groups_per_chunk = max(1, gemv_w4_config.CHUNK // group)
    assert operands.scale is not None
    return (
        group * groups_per_chunk == gemv_w4_config.CHUNK
        and groups_per_chunk * chunks % 2 == 0
        and operands.size_k % (2 * group) == 0
        and operands.scale.shape[2] % 2 == 0
    )
