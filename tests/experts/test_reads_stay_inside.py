"""Kernels do not read past the last row of the last expert, for K loops of any length.

A prefetched block could be beyond the end of a tensor. The interpreter raises an error for a read
outside of a tensor. On a GPU, such a read fails only if no mapped memory follows the tensor.
"""

from collections.abc import Iterator

import pytest
import torch
from grouped_gemm_stand_in import H200

from experts.triton.aligned.aligned_path import AlignedPath
from experts.triton.aligned_w4.aligned_w4_path import AlignedW4Path
from experts.triton.configs.select import on_device, override_config
from experts.triton.gemv.gemv_path import GemvPath
from experts.triton.gemv_w4.gemv_w4_path import GemvW4Path
from experts.triton.launch_config import Launch, LaunchConfig, MoEConfig, gemms
from experts.triton.standard import TritonExperts
from experts.triton.tuning.space import ConfigSpace
from modular_kernel.catalog import make_kernel
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import Routing
from modular_kernel.testing.random_inputs import random_inputs

pytestmark = pytest.mark.cpu

PAIR = ("MoEPrepareAndFinalizeNoEP", "TritonExperts")


def make_deep_layers(quant: str, gemm: int) -> Iterator[Problem]:
    """Yield layers in which `gemm` has few columns and a deep K, with several values of top-k."""
    for top_k, depth in ((8, 2048), (8, 2304), (4, 1024), (1, 2304), (6, 768)):
        hidden, intermediate = (depth, 32) if gemm == 1 else (32, depth)
        yield Problem(1, hidden, intermediate, top_k + 1, top_k, quant=quant, dtype=torch.bfloat16)


def make_config(problem: Problem, gemm: int, launch: Launch) -> MoEConfig | None:
    """Return the default config with another launch of one GEMM, or None if it is invalid."""
    default = GemvW4Path.default_config(problem, 1, H200)
    launches = (launch, default.gemm2) if gemm == 1 else (default.gemm1, launch)
    pairs = zip(launches, gemms(problem), strict=True)
    violations = (GemvW4Path.violations(tile, shape, problem, H200) for tile, shape in pairs)
    return None if any(map(list, violations)) else MoEConfig(*launches, default.path)


def list_cases() -> list[tuple[str, int, Launch]]:
    """Return every launch that `mk tune` would time for a layer, with the scheme and the GEMM."""
    return list(
        dict.fromkeys(
            (quant, gemm, launch)
            for quant in ("int4_w4a16_group", "mxfp4_w4a16")
            for gemm in (1, 2)
            for problem in make_deep_layers(quant, gemm)
            for group in GemvW4Path.candidates(problem, 1).values()
            for launch in group[gemm - 1]
            if make_config(problem, gemm, launch)
        )
    )


def run_last_expert(problem: Problem, config: MoEConfig, pair: tuple[str, str] = PAIR) -> None:
    """Run a call whose only pair has the last expert."""
    x_TH, weights, _ = random_inputs(problem, torch.device("cpu"))
    ids_TK = torch.full((1, problem.top_k), -1, dtype=torch.int32)
    ids_TK[0, 0] = problem.experts - 1
    routing = Routing(torch.ones(1, problem.top_k), ids_TK)
    with on_device(H200), override_config(config):
        kernel = make_kernel(*pair, problem)
        if isinstance(kernel.experts, TritonExperts):
            assert kernel.experts.path_name(x_TH, weights) == config.path
        kernel(x_TH, weights, routing)


@pytest.mark.parametrize(("quant", "gemm", "launch"), list_cases(), ids=str)
def test_gemv_w4_reads_stay_inside(quant: str, gemm: int, launch: Launch) -> None:
    for problem in make_deep_layers(quant, gemm):
        config = make_config(problem, gemm, launch)
        if config is not None:
            run_last_expert(problem, config)


# Paths without TMA, and the parts that launch the kernel of the `aligned` path.
TILED_GEMMS = {
    "aligned": (PAIR, AlignedPath),
    "aligned_w4": (PAIR, AlignedW4Path),
    "gemv": (PAIR, GemvPath),
    "batched": (("BatchedPrepareAndFinalize", "BatchedTritonExperts"), AlignedPath),
    "grouped": (("MoEPrepareAndFinalizeNoEP", "GroupedGemmExperts"), AlignedPath),
}
# H and I for each scheme, which are not multiples of most blocks.
SIZES = {
    "none": (712, 344),
    "fp8_w8a8_channel": (720, 336),
    "fp8_w8a8_block": (640, 256),
    "int8_w8a16_channel": (720, 336),
    "int4_w4a16_group": (640, 384),
    "int4_w4a16_group:zero_points=true": (640, 384),
    "mxfp4_w4a16": (672, 352),
}
SCHEMES = {
    "aligned": tuple(SIZES),
    "aligned_w4": ("int4_w4a16_group", "int4_w4a16_group:zero_points=true", "mxfp4_w4a16"),
    "gemv": ("none", "fp8_w8a8_channel", "fp8_w8a8_block"),
    "batched": ("none", "fp8_w8a8_channel", "fp8_w8a8_block", "int4_w4a16_group"),
    "grouped": ("none", "fp8_w8a8_channel", "fp8_w8a8_block"),
}


def get_tile_sizes(launch: Launch) -> object:
    """Return the fields that determine which addresses a program of a tiled GEMM reads."""
    if isinstance(launch, LaunchConfig):
        return launch.block_m, launch.block_n, launch.block_k
    return launch


def list_configs(name: str, problem: Problem) -> list[MoEConfig]:
    """Return tuning candidates for several numbers of tokens, one for each pair of tile sizes."""
    (_, part), path = TILED_GEMMS[name]
    with on_device(H200):
        space = ConfigSpace(problem, part, (path,))
        choices = [
            choice for tokens in (1, 8, 64, 512, 4096) for choice in space.candidates(tokens)
        ]
    configs = [choice for choice in choices if isinstance(choice, MoEConfig)]
    by_sizes = {
        (get_tile_sizes(config.gemm1), get_tile_sizes(config.gemm2)): config for config in configs
    }
    return list(by_sizes.values())


@pytest.mark.parametrize(
    ("name", "quant"), [(name, quant) for name, quants in SCHEMES.items() for quant in quants]
)
def test_tiled_gemm_reads_stay_inside(name: str, quant: str) -> None:
    hidden, intermediate = SIZES[quant]
    problem = Problem(1, hidden, intermediate, 3, 2, quant=quant, dtype=torch.bfloat16)
    configs = list_configs(name, problem)
    assert {config.path for config in configs} == {TILED_GEMMS[name][1].name}
    for config in configs:
        run_last_expert(problem, config, TILED_GEMMS[name][0])
