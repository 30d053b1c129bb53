"""Benchmark of `run_moe_lora`, the LoRA branch of an MoE layer, with staged and fused kernels.

The branch computes the contribution of LoRA adapters to the output of the experts.

    python -m modular_kernel.bench.moe_lora  # prints a line per configuration and strategy
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from modular_kernel.measure.timing import time_calls
from modular_kernel.ops.moe_lora import MoELoRABatchInfo, run_moe_lora, should_use_fused_kernel


@dataclass(frozen=True)
class LoRABranchSizes:
    """Sizes of a LoRA branch with one adapter of rank `rank`, which every token uses."""

    tokens: int
    hidden: int
    intermediate: int
    rank: int
    experts: int
    top_k: int


# DeepSeek-V2-Lite (H = 2048) and DeepSeek-V3 (H = 7168).
BRANCH_SIZES = (
    LoRABranchSizes(256, 2048, 1408, 8, 64, 6),
    LoRABranchSizes(256, 7168, 2048, 8, 256, 8),
)
_CALLS = 2  # timed calls, each on its own inputs


@dataclass(frozen=True)
class LoRABranchTime:
    """Time of one call in microseconds.

    is_auto: whether the strategy "auto" selects this strategy.
    mode: see measure.timing.Timing.
    """

    sizes: LoRABranchSizes
    strategy: str
    is_auto: bool
    us: float
    mode: str

    def __str__(self) -> str:
        tokens_per_s = self.sizes.tokens / self.us * 1e6
        auto_suffix = ", auto" if self.is_auto else ""
        details = f"{self.strategy}{auto_suffix}, {self.mode}"
        return f"{self.sizes} ({details}): {self.us:.1f} us, {tokens_per_s:.0f} tokens/s"


def benchmark_moe_lora(
    device: torch.device,
    branch_sizes: tuple[LoRABranchSizes, ...] = BRANCH_SIZES,
    *,
    dtype: torch.dtype = torch.bfloat16,
    target_ms: float = 20.0,
) -> Iterator[LoRABranchTime]:
    """Time `run_moe_lora` alone, with the staged and the fused kernels.

    On a GPU, replays of a CUDA graph are timed.

    target_ms: milliseconds of device time for each configuration and strategy.
    """
    for sizes in branch_sizes:
        inputs = [_make_inputs(sizes, device, dtype, seed) for seed in range(_CALLS)]
        shapes = (sizes.tokens, sizes.hidden), (sizes.tokens, sizes.top_k)
        fused = should_use_fused_kernel(*shapes, sizes.rank, sizes.intermediate)
        for strategy in ("staged", "fused"):
            calls = [partial(run_moe_lora, *args, strategy=strategy) for args in inputs]  # type: ignore[arg-type]
            timing = time_calls(calls, device, target_ms=target_ms)
            is_auto = fused == (strategy == "fused")
            yield LoRABranchTime(sizes, strategy, is_auto, timing.us, timing.mode)


def _make_inputs(
    sizes: LoRABranchSizes, device: torch.device, dtype: torch.dtype, seed: int
) -> tuple[object, ...]:
    generator = torch.Generator(device).manual_seed(seed)

    def draw_normal(*shape: int) -> torch.Tensor:
        values = torch.randn(shape, device=device, generator=generator)
        scaled: torch.Tensor = values * shape[-1] ** -0.5
        return scaled.to(dtype)

    tokens, e, h, i, r = sizes.tokens, sizes.experts, sizes.hidden, sizes.intermediate, sizes.rank
    scores_TE = torch.rand(tokens, e, device=device, generator=generator)
    weights_TK, ids_TK = scores_TE.topk(sizes.top_k)
    slots_T = torch.zeros(tokens, dtype=torch.int32, device=device)
    ranks = torch.full((1,), r, dtype=torch.int32, device=device)
    batch_info = MoELoRABatchInfo(slots_T, ranks, torch.ones(1, device=device))
    # A and B of w1 (gate and up), then A and B of w2.
    matrices = (
        draw_normal(1, e, r, h),
        draw_normal(1, e, 2 * i, r),
        draw_normal(1, e, r, i),
        draw_normal(1, e, h, r),
    )
    output = torch.zeros(tokens, h, dtype=dtype, device=device)
    return draw_normal(tokens, h), ids_TK, weights_TK, batch_info, *matrices, output


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("no GPU: on a CPU the times of these kernels are not meaningful")
    for row in benchmark_moe_lora(torch.device("cuda")):
        sys.stdout.write(f"{row}\n")
