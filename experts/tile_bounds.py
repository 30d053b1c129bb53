"""What bounds a tile, whatever path it is for."""

from collections.abc import Iterator

from experts import tile_dequantised, tile_permuted, tile_single, tile_streamed
from experts.tile_shapes import (
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
MOST_TOKENS = {SINGLE: tile_single.most_tokens, STREAMED: tile_streamed.most_tokens}


def path_violations(
    tile: Tile, gemm: Gemm, path: str, problem: Problem, device: Device
) -> Iterator[Violation]:
    """Every reason not to launch `tile` for one of `problem`'s GEMMs on `path`."""
    if path == ALIGNED:
        yield from violations(tile, gemm, device)
    elif path == SINGLE and tile_single.serves(problem):
        yield from violations(tile, tile_single.unbounded(gemm), device)
    elif path == STREAMED and tile_streamed.serves(problem, device):
        yield from tile_streamed.violations(tile, gemm, device)
    elif path == PERMUTED and problem.scheme.name in tile_permuted.MODES:
        mode = tile_permuted.MODES[problem.scheme.name]
        yield from tile_permuted.violations(tile, gemm, mode, device)
    elif path == DEQUANTISED and tile_dequantised.serves(problem, device):
        yield from tile_dequantised.violations(tile, gemm, problem, device)
    else:
        yield Violation("path", path, f"one that serves {problem.quant}")


def require_pair(pair: TilePair, problem: Problem, device: Device, origin: str) -> None:
    """ConfigurationError with origin, got and need if `pair` cannot be launched on its path."""
    for tile, gemm in zip((pair.gemm1, pair.gemm2), gemms(problem), strict=True):
        for violation in path_violations(tile, gemm, pair.path, problem, device):
            what = f"{origin}: {gemm} {violation.what}"
            raise ConfigurationError(what, got=violation.got, need=violation.need)
