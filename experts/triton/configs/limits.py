"""What bounds a tile, whatever path it is for."""

from collections.abc import Iterator

from experts.triton.dequantised import config as dequantised_config
from experts.triton.gemv import config as gemv_config
from experts.triton.gemv_tma import config as gemv_tma_config
from experts.triton.grouped_tma import config as grouped_tma_config
from experts.triton.launch_config import (
    ALIGNED,
    DEQUANTISED,
    PERMUTED,
    SINGLE,
    STREAMED,
    Device,
    Gemm,
    Tile,
    TilePair,
    Violation,
    gemms,
    violations,
)
from modular_kernel.errors import ConfigurationError
from modular_kernel.types import Problem

# Paths of a few tokens, which read the weights of an expert once for each of its pairs: the most
# tokens of a call that takes one without a tuned file.
MOST_TOKENS = {SINGLE: gemv_config.most_tokens, STREAMED: gemv_tma_config.most_tokens}


def path_violations(
    tile: Tile, gemm: Gemm, path: str, problem: Problem, device: Device
) -> Iterator[Violation]:
    """Every reason not to launch `tile` for one of `problem`'s GEMMs on `path`."""
    if path == ALIGNED:
        yield from violations(tile, gemm, device)
    elif path == SINGLE and gemv_config.serves(problem):
        yield from violations(tile, gemv_config.unbounded(gemm), device)
    elif path == STREAMED and gemv_tma_config.serves(problem, device):
        yield from gemv_tma_config.violations(tile, gemm, device)
    elif path == PERMUTED and problem.scheme.name in grouped_tma_config.MODES:
        mode = grouped_tma_config.MODES[problem.scheme.name]
        yield from grouped_tma_config.violations(tile, gemm, mode, device)
    elif path == DEQUANTISED and dequantised_config.serves(problem, device):
        yield from dequantised_config.violations(tile, gemm, problem, device)
    else:
        yield Violation("path", path, f"one that serves {problem.quant}")


def require_pair(pair: TilePair, problem: Problem, device: Device, origin: str) -> None:
    """ConfigurationError with origin, got and need if `pair` cannot be launched on its path."""
    for tile, gemm in zip((pair.gemm1, pair.gemm2), gemms(problem), strict=True):
        for violation in path_violations(tile, gemm, pair.path, problem, device):
            what = f"{origin}: {gemm} {violation.what}"
            raise ConfigurationError(what, got=violation.got, need=violation.need)
