"""FlashInfer's CUTLASS layers as peers: `mk bench --model baseline --peer THIS FILE`.

bf16, block-scaled fp8, and mxfp4 with weights in the layout of its Hopper GEMMs. bf16 and mxfp4 are
tuned by FlashInfer's autotuner for the tokens of the cell, untimed; the block-scaled GEMMs have no
tactics. mxfp4 is padded to multiples of 128, as in vLLM. FlashInfer's module `fused_moe_90` is
compiled at the first use if it has not been built.
"""

import sys
from importlib import import_module
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from bench_peers import LayerPeer, Padded, installed_layers

_CORE = "flashinfer.fused_moe"
_BLOCK = 128
_LARGE = 4096  # from this many tokens a tactic takes milliseconds, and the tuner minutes


def up_first(rows_eNK):
    """Swap the halves of (e, 2I, ...) from gate rows first to up rows first."""
    gate, up = rows_eNK.view(torch.uint8).chunk(2, dim=1)
    return torch.cat([up, gate], dim=1).view(rows_eNK.dtype)


class FlashInfer(LayerPeer):
    """Sort, GEMM with SwiGLU epilogue, GEMM with the weighted sum in its epilogue."""

    name, needs = "flashinfer", ("flashinfer",)
    tuned = True

    def options(self):
        """Return the keyword arguments of the call other than tensors."""
        return {}

    def setup(self, problem, weights):
        self.run = import_module(_CORE).cutlass_fused_moe
        self.problem, self.scales = problem, None
        self.load(problem, weights)
        if self.tuned:
            self.tune(problem)

    def tune(self, problem):
        """Run FlashInfer's autotuner for this number of tokens, on random x and routing."""
        tuner = import_module("flashinfer.autotuner")
        if problem.tokens >= _LARGE:  # the defaults of 3 and 10 calls are for short kernels
            tuner.AutoTuner.get().warmup, tuner.AutoTuner.get().repeat = 1, 3
        generator = torch.Generator(self.w1.device).manual_seed(0)
        device = {"device": self.w1.device, "generator": generator}
        x = torch.randn(problem.tokens, problem.hidden, dtype=problem.dtype, **device)
        scores = torch.rand(problem.tokens, problem.experts, **device)
        ids = scores.topk(problem.top_k).indices.int()
        with tuner.autotune(True, tuning_buckets=(problem.tokens,)):
            self.made(x, ids, torch.ones_like(ids, dtype=torch.float32) / problem.top_k)
        torch.cuda.synchronize()

    def call(self, x_TH, routing):
        ids, router = routing.topk_ids_TK.int(), routing.topk_weights_TK
        return self.made(x_TH, ids, router)

    def made(self, x_TH, ids_TK, router_TK):
        out = torch.empty_like(x_TH)
        self.run(
            x_TH, ids_TK, router_TK, self.w1, self.w2, x_TH.dtype,
            quant_scales=self.scales, output=out,
            tune_max_num_tokens=self.problem.tokens, **self.options(),
        )  # fmt: skip
        return out


class Bf16(FlashInfer):
    quant = "none"

    def load(self, problem, weights):
        self.w1, self.w2 = up_first(weights.w1), weights.w2


class Fp8Block(FlashInfer):
    quant, tuned, blocks = "fp8_w8a8_block", False, True

    def options(self):
        return {"use_deepseek_fp8_block_scale": True}

    def load(self, problem, weights):
        w1, self.w2, one, two = self.stored(problem, weights)
        self.w1, self.scales = up_first(w1), [up_first(one), two.contiguous()]


class Mxfp4(FlashInfer):
    quant, blocks = "mxfp4_w4a16", True

    def options(self):
        return {"use_w4_group_scaling": True}

    def load(self, problem, weights):
        stored = self.stored(problem, weights)
        prepare = import_module(f"{_CORE}.prepare")
        interleave_weights = prepare.interleave_moe_weights_for_sm90_mixed_gemm
        interleave_scales = prepare.interleave_moe_scales_for_sm90_mixed_gemm
        w1, w2, one, two = (tensor.view(torch.uint8) for tensor in stored)
        self.w1, self.w2 = interleave_weights(up_first(w1), "fp4"), interleave_weights(w2, "fp4")
        self.scales = [interleave_scales(scale).view(torch.int32) for scale in (up_first(one), two)]


def layers():
    """Return the layers whose packages are installed."""
    return installed_layers([Bf16(), Fp8Block(), Padded(Mxfp4(), _BLOCK, _BLOCK)])
