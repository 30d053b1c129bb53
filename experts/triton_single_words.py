"""The single path for 4-bit weights: as triton_single, with products of words of eight weights."""

from experts import tile_words
from experts.tile_shapes import SINGLE, Tile
from experts.triton_gemm import Product, first_product, scale_group, second_product, words_lie_ready
from experts.triton_path import PathCall
from modular_kernel import stages
from modular_kernel.ops.count import id_arguments, next_power_of_2
from modular_kernel.ops.launch import launch
from modular_kernel.ops.overlap import overlap
from modular_kernel.ops.runtime import use_triton
from modular_kernel.tensors import ExpertWeights
from modular_kernel.types import Combine, Problem
from modular_kernel.workspace import BufferSpec

_IDS = 128  # looked at at once
_AHEAD = 4  # lines of 128 bytes of a row of w2 that are sent for while GEMM 1 ends


class SingleWordsPath:
    """Serves what tile_words.serves_single says. Row p of h is pair p."""

    name = SINGLE

    def __init__(self, problem: Problem) -> None:
        from experts.kernels.triton.single_words_down import single_words_down_kernel
        from experts.kernels.triton.single_words_up import single_words_up_kernel

        self.problem = problem
        self._up, self._down = single_words_up_kernel, single_words_down_kernel
        self._sums = problem.combine is Combine.SUM

    def specs(self, tokens: int, block_m: int) -> dict[str, BufferSpec]:
        """Buffers for a call of `tokens` tokens; block_m is of no account."""
        problem = self.problem
        shape = (tokens * problem.top_k, problem.intermediate)
        return {"workspace13": BufferSpec(shape, problem.dtype)}

    def takes(self, weights: ExpertWeights) -> bool:
        """Rows of words that can be copied 16 bytes at once."""
        return all(words_lie_ready(w) for w in (weights.w1, weights.w2))

    def run(self, call: PathCall) -> None:
        problem, routing = self.problem, call.tokens.routing
        pairs = routing.topk_ids_TK.numel()
        h_PI = call.workspace.take("workspace13", (pairs, problem.intermediate))
        use_triton(h_PI)  # the interpreter's numbers are made honest at the first call
        ids = {**id_arguments(routing, problem.e), **overlap()}
        x_TH, tiles = call.tokens.x_TH, call.tiles
        with stages.stage(stages.GEMM1):
            warps = tiles.gemm1.num_warps
            launch(
                self._up,
                (pairs * -(-problem.intermediate // tiles.gemm1.block_n),),
                x_ptr=x_TH,
                row_weights_ptr=routing.topk_weights_TK,
                invalid_ptr=routing.invalid_ids,
                h_ptr=h_PI,
                num_pairs=pairs,
                intermediate=problem.intermediate,
                hidden=problem.hidden,
                stride_xm=x_TH.stride(0),
                stride_xk=x_TH.stride(1),
                TOP_K=problem.top_k,
                HAS_ROW_WEIGHTS=problem.apply_router_weight_on_input,
                BLOCK_P=_IDS,
                **self._up_product(first_product(call.weights, problem)),
                **_arguments(first_product(call.weights, problem), tiles.gemm1, warps),
                **ids,
            )
        slots = problem.top_k if self._sums else 1
        with stages.stage(stages.GEMM2):
            held = tile_words.held(tiles.gemm2, slots)
            launch(
                self._down,
                (pairs // slots * -(-problem.hidden // tiles.gemm2.block_n),),
                h_ptr=h_PI,
                row_weights_ptr=routing.topk_weights_TK,
                out_ptr=call.output,
                num_pairs=pairs,
                hidden=problem.hidden,
                depth=problem.intermediate,
                factor=float(problem.routed_scaling_factor) if self._sums else 1.0,
                SLOTS=slots,
                S=held,
                AHEAD=_AHEAD,
                HAS_ROW_WEIGHTS=self._sums and not problem.apply_router_weight_on_input,
                **_arguments(
                    second_product(call.weights, problem),
                    tiles.gemm2,
                    tiles.gemm2.num_warps // held,
                ),
                **ids,
            )

    def _up_product(self, product: Product) -> dict[str, object]:
        """What GEMM 1 alone takes of its product."""
        return {"up_row": product.up_row, "ROW_STEP": product.step, **product.constants}


def _arguments(product: Product, tile: Tile, splits: int) -> dict[str, object]:
    """What both kernels take of a product; splits: warps that share the depth of a pair."""
    w, scale, zero, bias = product.w, product.scale, product.zero_point, product.bias
    assert scale is not None
    _, group = scale_group(product.scheme, product.depth)
    part_k = tile_words.part_depth(tile, splits)
    return {
        "b_ptr": w,
        "b_scale_ptr": scale,
        "zero_ptr": w if zero is None else zero,
        "bias_ptr": w if bias is None else bias,
        "stride_be": w.stride(0),
        "stride_bn": w.stride(1),
        "stride_bse": scale.stride(0),
        "stride_bsn": scale.stride(1),
        "stride_bze": 0 if zero is None else zero.stride(0),
        "stride_bzn": 0 if zero is None else zero.stride(1),
        "stride_bias": 0 if bias is None else bias.stride(0),
        "HAS_BIAS": bias is not None,
        "E2M1": product.scheme.weight == "float4_e2m1",
        "HAS_ZERO": zero is not None,
        "EVEN_K": product.depth % (splits * part_k) == 0,
        "GROUP_K": group or next_power_of_2(product.depth),
        "PARTS": tile.num_warps,
        "PART_K": part_k,
        "BLOCK_N": tile.block_n,
        "STAGES": tile.num_stages,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
