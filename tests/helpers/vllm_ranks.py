"""Program of one of two ranks of vLLM that split a layer, with gloo.

    python vllm_ranks.py RANK STORE FOLDER

Rank 0 writes the sum of the ranks' outputs to FOLDER/<case>.pt.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch

from modular_kernel.quant.quantized_weights import quantize_weights
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights, Routing

WORLD_SIZE = 2
_BASE = Problem(tokens=17, hidden=64, intermediate=64, experts=6, top_k=2)
_WIDE = Problem(tokens=17, hidden=128, intermediate=256, experts=6, top_k=2, quant="fp8_w8a8_block")
# Name -> (problem of the whole layer, whether it is split by experts (EP) instead of by TP).
CASES = {
    "tp": (_BASE, False),
    "tp_fp8_block": (_WIDE, False),
    "ep": (_BASE, True),
    "ep_uneven": (replace(_BASE, experts=5), True),
    "ep_fp8_block": (_WIDE, True),
    "ep_int4": (replace(_BASE, quant="int4_w4a16_group:group=32"), True),
}


def tensors(problem: Problem) -> tuple[torch.Tensor, ExpertWeights, Routing]:
    """Return x, the weights of all experts, and the routing, which are equal on all ranks."""
    g = torch.Generator().manual_seed(7)
    e, h, i = problem.experts, problem.hidden, problem.intermediate
    x_TH = torch.randn(problem.tokens, h, generator=g).to(problem.dtype)
    weights = ExpertWeights(
        (torch.randn(e, 2 * i, h, generator=g) / h**0.5).to(problem.dtype),
        (torch.randn(e, h, i, generator=g) / i**0.5).to(problem.dtype),
    )
    if problem.scheme.quantized:
        weights = quantize_weights(weights, problem)
    values, ids = torch.randn(problem.tokens, e, generator=g).topk(problem.top_k)
    return x_TH, weights, Routing(values.softmax(-1), ids)


def share(weights: ExpertWeights, rank: int, ep: bool) -> ExpertWeights:
    """Return the experts of a rank (EP), or its rows of w1 and columns of w2 (TP)."""
    fields = {name: t for name, t in vars(weights).items() if t is not None}
    if ep:
        return replace(weights, **{name: t.chunk(WORLD_SIZE)[rank] for name, t in fields.items()})

    def take_shard(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name.startswith("w2"):
            return tensor.chunk(WORLD_SIZE, -1)[rank]
        return torch.cat([half.chunk(WORLD_SIZE, 1)[rank] for half in tensor.chunk(2, 1)], 1)

    return replace(weights, **{name: take_shard(name, t) for name, t in fields.items()})


def main(rank: int, store: str, folder: Path) -> None:
    from vllm_layers import call, fill, vllm_layer, vllm_process

    from modular_kernel.integrations.vllm import register

    register()
    for name, (problem, ep) in CASES.items():
        with vllm_process(world_size=WORLD_SIZE, rank=rank, store=store, ep=ep):
            x_TH, weights, routing = tensors(problem)
            layer = vllm_layer(problem)
            assert layer.quant_method.experts_cls.__name__ == "ModularKernelTritonExperts"
            assert (layer.expert_map is not None) == ep
            fill(layer, problem, share(weights, rank, ep))
            layer.quant_method.process_weights_after_loading(layer)
            total = call(layer, x_TH, routing).float()
            torch.distributed.all_reduce(total)
            if rank == 0:
                torch.save(total, folder / f"{name}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
