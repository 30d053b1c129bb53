"""number_and_quantize: renumber the experts of pairs and quantize tokens, in one launch.

Libraries that send tokens to the ranks of their experts, such as DeepEP, require their own
numbering of experts (`modular_kernel.ops.expert_slots`). Tokens are quantized before they are sent.
If there are few tokens, one launch takes less time than two.
"""

import torch

from modular_kernel.errors import ConfigurationError, ShapeError
from modular_kernel.ops.expert_slots import Pairs, check_pairs, make_pair_arguments, number_pairs
from modular_kernel.ops.quantize import (
    QuantizedRows,
    check_quantized,
    make_tile_arguments,
    quantize_rows,
)
from modular_kernel.replay.launch.launch import launch
from modular_kernel.replay.launch.pdl import pdl_arguments
from modular_kernel.replay.launch.runtime import use_triton
from modular_kernel.spec.quantization import QuantScheme


def number_and_quantize(
    x_TH: torch.Tensor, scheme: QuantScheme, pairs: Pairs, *, out: QuantizedRows
) -> None:
    """Run `number_pairs` on `pairs` and `quantize_rows` on their tokens, in one launch on a GPU.

    x_TH: (T, H).
    out: output, the quantized tokens.

    Raises ConfigurationError for a dynamic per-tensor scale, because it depends on the values of
    all programs.
    """
    if scheme.activation_granularity == "tensor" and not scheme.static:
        need = "a static scale, or a scale per token or group"
        raise ConfigurationError("number_and_quantize", got=str(scheme), need=need)
    tokens = len(pairs.routing.topk_ids_TK)
    if len(x_TH) != tokens:
        raise ShapeError("tokens", got=len(x_TH), need=f"{tokens}, as in the routing")
    check_pairs(pairs)
    check_quantized(tokens, x_TH.shape[1], scheme, out)
    if tokens == 0:
        return
    if not use_triton(x_TH):
        number_pairs(pairs)
        quantize_rows(x_TH, scheme, out=out)
        return
    from modular_kernel.ops.kernels.slots_and_quantize import number_and_quantize_kernel

    tile_args, quantize_programs = make_tile_arguments(scheme, out, None)
    num_warps = tile_args["num_warps"]
    assert isinstance(num_warps, int)
    pair_args, pair_programs = make_pair_arguments(pairs, num_warps)
    launch(
        number_and_quantize_kernel,
        (pair_programs + quantize_programs,),
        x_ptr=x_TH,
        stride_x=x_TH.stride(0),
        pair_programs=pair_programs,
        **pair_args,
        **tile_args,
        **pdl_arguments(),
    )
