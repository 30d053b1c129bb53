"""Benchmark of the parallel LoRA branch, `run_moe_lora`, staged and fused.

python -m modular_kernel.bench.moe_lora     # prints a line per configuration and strategy
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from modular_kernel.measure.timing import time_calls
from modular_kernel.ops.moe_lora import MoELoRABatchInfo, run_moe_lora, should_use_fused_kernel


@dataclass(frozen=True)
class BranchConfig:
    """Sizes of a LoRA branch in which every token uses one adapter of rank `rank`."""

    tokens: int
    hidden: int
    intermediate: int
    rank: int
    experts: int
    top_k: int


# DeepSeek-V2-Lite (H = 2048) and DeepSeek-V3 (H = 7168).
CONFIGS = (BranchConfig(256, 2048, 1408, 8, 64, 6), BranchConfig(256, 7168, 2048, 8, 256, 8))
_CALLS = 2  # timed calls, each on its own inputs


@dataclass(frozen=True)
class BranchTime:
    """Microseconds of one call. auto: whether `auto` selects this strategy. mode: `Timing.mode`."""

    config: BranchConfig
    strategy: str
    auto: bool
    us: float
    mode: str

    def __str__(self) -> str:
        rate = self.config.tokens / self.us * 1e6
        auto = ", auto" if self.auto else ""
        details = f"{self.strategy}{auto}, {self.mode}"
        return f"{self.config} ({details}): {self.us:.1f} us, {rate:.0f} tokens/s"


def benchmark_moe_lora(
    device: torch.device,
    configs: tuple[BranchConfig, ...] = CONFIGS,
    *,
    dtype: torch.dtype = torch.bfloat16,
    target_ms: float = 20.0,
) -> Iterator[BranchTime]:
    """Time `run_moe_lora` alone, staged and fused; on a GPU as replays of a CUDA graph.

    target_ms: milliseconds on the device for each configuration and strategy.
    """
    for config in configs:
        inputs = [_inputs(config, device, dtype, seed) for seed in range(_CALLS)]
        shapes = (config.tokens, config.hidden), (config.tokens, config.top_k)
        fused = should_use_fused_kernel(*shapes, config.rank)
        for strategy in ("staged", "fused"):
            calls = [partial(run_moe_lora, *args, strategy=strategy) for args in inputs]  # type: ignore[arg-type]
            timing = time_calls(calls, device, target_ms=target_ms)
            auto = fused == (strategy == "fused")
            yield BranchTime(config, strategy, auto, timing.us, timing.mode)


def _inputs(
    config: BranchConfig, device: torch.device, dtype: torch.dtype, seed: int
) -> tuple[object, ...]:
    """Return random positional arguments for `run_moe_lora`."""
    c, generator = config, torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        drawn = torch.randn(shape, device=device, generator=generator)
        scaled: torch.Tensor = drawn * shape[-1] ** -0.5
        return scaled.to(dtype)

    scores_TE = torch.rand(c.tokens, c.experts, device=device, generator=generator)
    weights_TK, ids_TK = scores_TE.topk(c.top_k)
    slots_T = torch.zeros(c.tokens, dtype=torch.int32, device=device)
    ranks = torch.full((1,), c.rank, dtype=torch.int32, device=device)
    info = MoELoRABatchInfo(slots_T, ranks, torch.ones(1, device=device))
    e, r, i, h = c.experts, c.rank, c.intermediate, c.hidden
    buffers = normal(1, e, r, h), normal(1, e, 2 * i, r), normal(1, e, r, i), normal(1, e, h, r)
    output = torch.zeros(c.tokens, h, dtype=dtype, device=device)
    return normal(c.tokens, h), ids_TK, weights_TK, info, *buffers, output


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("no GPU: times on a CPU are not meaningful for these kernels")
    for row in benchmark_moe_lora(torch.device("cuda")):
        sys.stdout.write(f"{row}\n")
