"""CutlassExpertsFP4 and BatchedCutlassExpertsFP4 (nvfp4), with a stand-in for the GEMM kernel."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from ops_fixtures import odd_address
from vendor_stand_in import BatchedCutlassFP4, CutlassFP4, prove_part
from vendor_stand_in import fp4_gemm as stand_in

from experts.cutlass.fp4_gemm import Fp4Weights, fp4_gemm
from modular_kernel import check
from modular_kernel.errors import InputError
from modular_kernel.ops.fp4_rows import Fp4Rows
from modular_kernel.spec.problem import Combine, Machine, Problem
from modular_kernel.testing.cases.inputs import InputVariation

BASE = Problem(17, 128, 256, 5, 2, "bfloat16", "nvfp4_w4a4")
COMMON: tuple[tuple[dict[str, Any], str], ...] = (
    ({}, "uniform"),
    ({"hidden": 384, "intermediate": 128}, "skips"),
    ({"tokens": 1, "top_k": 1}, "uniform"),
    ({"tokens": 0}, "uniform"),
    ({"activation": "relu2"}, "empty_experts"),
    ({"activation": "swiglu_oai:limit=1.0,interleaved=false"}, "duplicates"),
    ({"combine": Combine.TOPK_WEIGHTED, "routed_scaling_factor": 2.5}, "skips"),
    ({"expert_map": True, "local_experts": 3}, "out_of_range"),
    ({"experts": 2, "top_k": 1, "tokens": 300}, "zipf"),
    ({"inplace": True, "top_k": 3}, "all_skipped"),
)


@pytest.mark.parametrize(("change", "routing"), [*COMMON, ({"chunk_tokens": 7}, "skips")])
def test_contiguous_cases_are_proven(change: dict[str, Any], routing: str) -> None:
    proof = prove_part(CutlassFP4, replace(BASE, **change), routing)
    assert proof.passed, str(proof)


@pytest.mark.parametrize(("change", "routing"), COMMON)
def test_batched_cases_are_proven(change: dict[str, Any], routing: str) -> None:
    proof = prove_part(BatchedCutlassFP4, replace(BASE, **change), routing)
    assert proof.passed, str(proof)


@pytest.mark.parametrize("layout", ["transposed", "shifted"])
@pytest.mark.parametrize("part", [CutlassFP4, BatchedCutlassFP4])
def test_strided_weights_are_accepted(part: Any, layout: str) -> None:
    proof = prove_part(part, BASE, variation=InputVariation(layout=layout))
    assert proof.passed, str(proof)


# -------------------------------------------------------------------------------------- verdicts

PACKAGES = frozenset({"triton", "nvidia_cutlass_dsl", "tvm_ffi"})
B200 = Machine("cuda", (10, 0), PACKAGES, name="NVIDIA B200")
PAIRS = (
    ("MoEPrepareAndFinalizeNoEP", "CutlassExpertsFP4"),
    ("BatchedPrepareAndFinalize", "BatchedCutlassExpertsFP4"),
)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(
    ("change", "machine", "rules"),
    [
        ({}, B200, []),
        ({"combine": Combine.TOPK_WEIGHTED, "graph": True}, B200, []),
        ({"dtype": "float16"}, B200, ["dtype"]),
        ({"quant": "nvfp4_w4a16"}, B200, ["quant"]),
        ({"quant": "mxfp4_w4a16"}, B200, ["quant"]),
        ({"quant": "none"}, B200, ["quant"]),
        ({"hidden": 192}, B200, ["hidden"]),
        ({"intermediate": 192}, B200, ["intermediate"]),
        ({"activation": "silu:interleaved=true"}, B200, ["activation"]),
        ({"bias": True}, B200, ["bias"]),
        ({"batch_invariant": True}, B200, ["batch_invariant"]),
        ({}, replace(B200, arch=(9, 0)), ["archs"]),
        ({}, replace(B200, arch=(12, 0)), ["archs"]),
        ({}, replace(B200, packages=PACKAGES - {"tvm_ffi"}), ["package"]),
    ],
)
def test_verdicts_of_the_parts(
    pair: tuple[str, str], change: dict[str, Any], machine: Machine, rules: list[str]
) -> None:
    verdict = check(*pair, replace(BASE, **change), machine)
    assert [r.rule for r in verdict.rejections] == rules, str(verdict)


def test_other_parts_refuse_nvfp4_w4a4() -> None:
    (rejection,) = check(
        "MoEPrepareAndFinalizeNoEP", "TritonExperts", BASE, Machine("cuda", (9, 0), PACKAGES)
    ).rejections
    assert (rejection.rule, rejection.got) == ("quant", "nvfp4_w4a4")


# ---------------------------------------------------------------------- operands of the GEMM kernel

ROWS, K, N, EXPERTS, TILES = 200, 384, 256, 3, [(0, 0, 130), (0, 128, 130), (2, 130, 190)]


def make_operands() -> dict[str, torch.Tensor]:
    """Return the kernel's arguments, with rows of experts 0 and 2, and an unused tile."""
    tiles = torch.full((3 * 4 + 1,), 0x3F3F3F3F, dtype=torch.int32)
    tiles[:12].view(3, -1)[:, :3] = torch.tensor(TILES, dtype=torch.int32).T
    tiles[-1] = 3
    generator = torch.Generator().manual_seed(1)

    def make_codes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    # Scales of existing rows and groups are 0.5 to 2. The padding, which exists because K is 1.5
    # steps, has scales of 0.
    blocks = EXPERTS * N // 128
    a_scale, b_scale = (torch.zeros(n, 2 * 2048, dtype=torch.uint8) for n in (4, blocks))
    group, row = torch.arange(K // 16)[None, :], torch.arange(128)[:, None]
    offsets = group // 16 * 2048 + group % 16 // 4 * 512 + row % 32 * 16 + row // 32 * 4 + group % 4
    for block_scales in b_scale:
        block_scales[offsets] = 48 + make_codes(128, K // 16) % 17
    for tile, (_, first, end) in enumerate(TILES):
        rows = min(128, end - first)
        a_scale[tile][offsets[:rows]] = 48 + make_codes(rows, K // 16) % 17
    return {
        "q": make_codes(ROWS, K // 2),
        "a_scale": a_scale,
        "w": make_codes(EXPERTS, N, K // 2),
        "b_scale": b_scale,
        "global_scales": torch.tensor([[0.5, 2.0], [1.0, 1.0], [-0.25, 0.125]]),
        "tiles": tiles,
        "out": torch.full((ROWS, N), torch.nan, dtype=torch.bfloat16),
    }


def call_gemm(gemm: Any, operands: dict[str, torch.Tensor]) -> torch.Tensor:
    a = Fp4Rows(operands["q"], operands["a_scale"])
    b = Fp4Weights(operands["w"], operands["b_scale"], operands["global_scales"])
    gemm(a, b, operands["tiles"], operands["out"])
    return operands["out"]


def test_reference_and_stand_in_agree() -> None:
    """The reference decodes the whole layout, and the stand-in reads at the kernel's addresses."""
    expected = call_gemm(fp4_gemm, make_operands())
    actual = call_gemm(stand_in.fp4_gemm, make_operands())
    is_written = expected.isfinite().all(1)
    assert is_written.nonzero().flatten().tolist() == list(range(190))
    assert actual[190:].isnan().all()
    expected, actual = expected[:190].float(), actual[:190].float()
    assert (expected - actual).norm() / expected.norm() < 1e-4


def test_an_output_equals_a_sum_computed_by_hand() -> None:
    operands = make_operands()
    row, column = 131, 200  # in the tile of expert 2, and in the second block of its columns
    actual = float(call_gemm(fp4_gemm, operands)[row, column])
    total = 0.0
    for k in range(K):
        group, row_in_tile, column_in_block = k // 16, row - 130, column - 128
        offset = group // 16 * 2048 + group % 16 // 4 * 512 + group % 4
        a_offset = offset + row_in_tile % 32 * 16 + row_in_tile // 32 * 4
        b_offset = offset + column_in_block % 32 * 16 + column_in_block // 32 * 4
        scales = [operands["a_scale"][2, a_offset], operands["b_scale"][5, b_offset]]
        a_scale, b_scale = (float(scale.view(torch.float8_e4m3fn)) for scale in scales)
        rows = operands["q"][row], operands["w"][2, column]
        a_code, b_code = (int(codes[k // 2]) >> 4 * (k % 2) & 15 for codes in rows)
        product = float(stand_in.VALUES[a_code] * stand_in.VALUES[b_code])
        total += product * a_scale * b_scale
    assert actual == pytest.approx(total * 0.125, rel=2.0**-8)


# Changes of operands with which the kernel would compute wrong results or access invalid memory.
DEFECTS: dict[str, dict[str, Any]] = {
    "K off 128": {
        "q": lambda q: q[:, :160].contiguous(),
        "w": lambda w: w[:, :, :160].contiguous(),
    },
    "weights without experts": {"w": lambda w: w[0]},
    "N off 128": {"w": lambda w: w[:, :200].contiguous()},
    "a matrix of 64 rows": {"global_scales": lambda f: torch.ones(3, 4)},
    "rows of another depth": {"q": lambda q: q[:, :128].contiguous()},
    "rows with gaps": {"q": lambda q: torch.zeros(ROWS, K, dtype=torch.uint8)[:, : K // 2]},
    "rows at an odd address": {"q": odd_address},
    "weights along N": {"w": lambda w: w.mT.contiguous().mT},
    "weights at an odd address": {"w": odd_address},
    "weights as floats": {"w": lambda w: w.float()},
    "scales of rows for fewer tiles": {"a_scale": lambda s: s[:3].contiguous()},
    "scales of rows padded to 4 groups": {"a_scale": lambda s: s[:, :3072].contiguous()},
    "scales of weights row by row": {"b_scale": lambda s: s.view(EXPERTS * N, -1)},
    "scales of weights of one expert": {"b_scale": lambda s: s[:2].contiguous()},
    "global_scales of 16 bits": {"global_scales": lambda f: f.half()},
    "global_scales of experts alone": {"global_scales": lambda f: torch.ones(2, 2)},
    "results of 32 bits": {"out": lambda out: out.float()},
    "results of other columns": {"out": lambda out: out[:, :128].contiguous()},
    "tiles of int64": {"tiles": lambda t: t.long()},
    "tiles without their number": {"tiles": lambda t: t[:-1].contiguous()},
}
# Changes of values in tensors, which only the stand-in checks.
VALUE_DEFECTS: dict[str, dict[str, Any]] = {
    "more tiles than capacity": {"tiles": lambda t: t.index_fill(0, torch.tensor(12), 5)},
    "an invalid expert": {"tiles": lambda t: t.index_fill(0, torch.tensor(1), 3)},
    "an end beyond the rows": {"tiles": lambda t: t.index_fill(0, torch.tensor([10]), 201)},
    "a tile over another": {"tiles": lambda t: t.index_fill(0, torch.tensor(5), 100)},
    "two ends of one expert": {"tiles": lambda t: t.index_fill(0, torch.tensor(9), 129)},
    "scales of weights with a sign": {"b_scale": lambda s: s | 0x80},
    "scales of missing rows": {"a_scale": lambda s: s.fill_(0x7F)},
}


@pytest.mark.parametrize("name", DEFECTS)
def test_defects_are_detected(name: str) -> None:
    for gemm, error, match in (
        (fp4_gemm, InputError, "need"),
        (stand_in.fp4_gemm, RuntimeError, "fp4_gemm"),
    ):
        operands = make_operands()
        operands |= {field: change(operands[field]) for field, change in DEFECTS[name].items()}
        with pytest.raises(error, match=match):
            call_gemm(gemm, operands)


@pytest.mark.parametrize("name", VALUE_DEFECTS)
def test_defects_in_values_are_detected(name: str) -> None:
    operands = make_operands()
    operands |= {field: change(operands[field]) for field, change in VALUE_DEFECTS[name].items()}
    with pytest.raises(RuntimeError, match="fp4_gemm"):
        call_gemm(stand_in.fp4_gemm, operands)
