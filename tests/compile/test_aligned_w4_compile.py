"""GEMMs of the aligned_w4 path (4-bit weights) compile for sm_90 without spills."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from experts.triton.aligned_w4 import aligned_w4_config
from experts.triton.aligned_w4.aligned_w4_path import AlignedW4Path
from experts.triton.launch_config import Launch
from experts.triton.operands import GemmOperands, gemm1_operands, gemm2_operands
from modular_kernel import ExpertWeights, Problem
from modular_kernel.ops.align import AlignedPairs, align_specs
from modular_kernel.quant.quantized_weights import weight_specs
from modular_kernel.testing.compile.report import CompileRecord, check, record_compiles

META = torch.device("meta")
MIXTRAL = Problem(tokens=1, hidden=4096, intermediate=14336, experts=8, top_k=2)
DEEPSEEK = Problem(tokens=1, hidden=7168, intermediate=2048, experts=32, top_k=8)
QWEN3 = Problem(tokens=1, hidden=2048, intermediate=768, experts=128, top_k=8)
# K has 22.5 groups of 128 elements, and both products have a bias.
GPT_OSS = Problem(
    tokens=1, hidden=2880, intermediate=2880, experts=128, top_k=4, bias=True,
    activation="swiglu_oai",
)  # fmt: skip
MODELS = {"mixtral": MIXTRAL, "deepseek": DEEPSEEK, "qwen3": QWEN3, "gpt-oss": GPT_OSS}
ZEROS = "zero_points=true"
REPACKED = "mxfp4_w4a16:repacked=true"


def compile_gemms(problem: Problem) -> list[CompileRecord]:
    """Compile both GEMMs of a call on meta tensors, and return their records."""
    num_pairs = problem.tokens * problem.top_k
    tensors = {
        name: torch.empty(spec.shape, dtype=spec.dtypes[-1], device=META)
        for name, spec in weight_specs(problem).items()
    }
    if problem.bias:
        tensors["b1"] = torch.empty(problem.e, problem.w1_rows, dtype=problem.dtype, device=META)
        tensors["b2"] = torch.empty(problem.e, problem.hidden, dtype=problem.dtype, device=META)
    weights = ExpertWeights(**tensors)
    path, config = AlignedW4Path(problem), aligned_w4_config.default_config(problem, problem.tokens)
    specs = align_specs(num_pairs, config.gemm1.block_m, problem.e)
    buffers = (torch.empty(spec.shape, dtype=spec.dtype, device=META) for spec in specs.values())
    aligned = AlignedPairs(*list(buffers)[:3])

    def multiply(rows: int, product: GemmOperands, launch: Launch) -> None:
        a = torch.empty(rows, product.size_k, dtype=problem.dtype, device=META)
        out = torch.empty(num_pairs, product.size_n, dtype=problem.dtype, device=META)
        path.multiply((a, None), product, launch, aligned, out, None, None)

    with record_compiles("sm_90") as records:
        multiply(problem.tokens, gemm1_operands(weights, problem), config.gemm1)
        multiply(num_pairs, gemm2_operands(weights, problem), config.gemm2)
    return records


@pytest.mark.share(8)
@pytest.mark.parametrize("tokens", [1, 4, 16])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize(
    "quant",
    ["int4_w4a16_group", f"int4_w4a16_group:{ZEROS}", "mxfp4_w4a16", REPACKED, "nvfp4_w4a16"],
)
def test_small_tiles_compile_without_moves_between_registers(
    quant: str, model: Problem, tokens: int
) -> None:
    for record in compile_gemms(replace(model, quant=quant, tokens=tokens)):
        assert record.config["BLOCK_M"] == 8
        assert check(record, expect="HMMA") == ()
        assert Counter(record.instructions)["LDGSTS"] > 0
        # PRMT moves bytes between registers, which unpacked values must not need. The scales of
        # nvfp4 need it: Triton 3.6 emits 22 to 61 PRMTs for 16 to 32 MMAs.
        max_moves = 3 if quant == "nvfp4_w4a16" else 2
        assert record.instructions["PRMT"] <= max_moves * record.instructions["HMMA"]


@pytest.mark.parametrize(
    "change",
    [
        {"quant": "int4_w4a16_group", "tokens": 48},
        {"quant": f"int4_w4a16_group:{ZEROS}", "tokens": 48},
        {"quant": "mxfp4_w4a16", "tokens": 48},
        {"quant": REPACKED, "tokens": 48},
        {"quant": "mxfp4_w4a16", "tokens": 16, "batch_invariant": True},
        {"quant": f"int4_w4a16_group:group=32,{ZEROS}", "tokens": 16},
        {"quant": f"int4_w4a16_group:group=32,{ZEROS}", "tokens": 48},
        {"quant": "int4_w4a16_group:group=64", "tokens": 16, "dtype": torch.float16},
        {"quant": "mxfp4_w4a16", "tokens": 16, "dtype": torch.float16, "activation": "relu2"},
    ],
    ids=str,
)
def test_other_tiles_compile_without_violations(change: dict[str, object]) -> None:
    for record in compile_gemms(replace(MIXTRAL, **change)):  # type: ignore[arg-type]
        assert check(record, expect="HMMA") == ()
