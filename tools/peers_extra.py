"""Our layers for a benchmark of public fused-MoE layers that takes `--extra FILE.py`.

The benchmark calls make(Peer, G), then per shape setup(S, W) and per input call(p): S has E, k, H,
I; W has w1 (E, 2I, H) and w2 (E, H, I); p has x (T, H), ids and tw (T, k).
"""

import torch

import modular_kernel as mk
from modular_kernel.quant import quantise_weights

CONTIGUOUS = ("MoEPrepareAndFinalizeNoEP", "TritonExperts")
LAYERS = {
    "mk_triton": (CONTIGUOUS, "none"),
    "mk_batched_triton": (("BatchedPrepareAndFinalize", "BatchedTritonExperts"), "none"),
    "mk_triton_fp8ch": (CONTIGUOUS, "fp8_w8a8_channel"),
    "mk_triton_fp8blk": (CONTIGUOUS, "fp8_w8a8_block"),
}
_MOST_BYTES = 40e9  # the batched layout reserves T rows for each expert


def make(Peer, G):
    """One peer per pairing and scheme, each with a plan per token count."""

    class Layer(Peer):
        needs = ("modular_kernel",)

        def __init__(self, name):
            self.name, (self.pair, self.quant) = name, LAYERS[name]
            self.dtype = "bf16" if self.quant == "none" else "fp8"

        def ok(self, S, T):
            rows = T * (S.E if "batched" in self.name else S.k)
            return rows * (2 * S.H + S.I) * 2 < _MOST_BYTES

        def setup(self, S, W):
            self.shape, self.plans = S, {}
            self.weights = mk.ExpertWeights(W.w1, W.w2)
            if self.quant != "none":
                problem = mk.Problem(1, S.H, S.I, S.E, S.k, W.w1.dtype, self.quant)
                self.weights = quantise_weights(self.weights, problem)

        def call(self, p):
            plan = self.plans.get(p.T) or self.plans.setdefault(p.T, self.plan(p))
            out = torch.empty_like(p.x)  # as the other layers do
            return plan(p.x, self.weights, mk.Routing(p.tw, p.ids), out=out)

        def plan(self, p):
            S = self.shape
            problem = mk.Problem(p.T, S.H, S.I, S.E, S.k, p.x.dtype, self.quant)
            return mk.make_kernel(*self.pair, problem).plan()

    return [Layer(name) for name in LAYERS]
