"""Tiny checkpoints of every format load with the values that their files encode, and stay packed.

Loading must not import the libraries that write these formats. For each format, tests inject
defects to prove that the error bound of the format detects them.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import modular_kernel as mk
from modular_kernel.catalog import this_machine
from modular_kernel.checkpoints.loading import LoadedExperts
from modular_kernel.quant.quantized_weights import dequantize_weights
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.testing.checkpoints.published_formats import CHECKPOINT_FORMATS, FUSED_FORMATS
from modular_kernel.testing.checkpoints.samples import Sample, Tensors, write

PACKER_LIBRARIES = (
    "kernels",
    "accelerate",
    "compressed_tensors",
    "gptqmodel",
    "optimum",
    "modelopt",
)
REFERENCE_PARTS = ("MoEPrepareAndFinalizeNoEP", "TorchExperts")
# A model family with published checkpoints in each format. For other formats, tests use Mixtral.
FAMILY_BY_FORMAT = {
    "deepseek fp8": "deepseek_v3",
    "deepseek fp8, UE8M0": "deepseek_v3",
    "deepseek fp4": "deepseek_v4",
    "qwen3 fp8": "qwen3_moe",
    "compressed int4": "kimi_k2",
    "compressed fp8 block": "step3p5",
    "mxfp4": "gpt_oss",
}
QUANTIZED = [name for name, kind in CHECKPOINT_FORMATS.items() if kind.config is not None]


@pytest.fixture(autouse=True)
def forbid_packer_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PACKER_LIBRARIES, "transformers"):
        monkeypatch.setitem(sys.modules, name, None)


def write_checkpoint(
    folder: Path, kind: str, change: Callable[[Tensors], None] | None = None
) -> Sample:
    return write(folder, FAMILY_BY_FORMAT.get(kind, "mixtral"), kind, change=change)


def compute_output_error(sample: Sample, loaded: LoadedExperts) -> float:
    """Return the relative error of the layer's output compared with float64."""
    x, weights, ids = sample.inputs(24)
    problem = loaded.problem(24)
    kernel = mk.make_kernel(*REFERENCE_PARTS, problem, machine=this_machine(device="cpu"))
    y = kernel(x.to(problem.dtype), loaded.weights, mk.Routing(weights, ids))
    expected = sample.expected_output(x.to(problem.dtype).double(), weights, ids)
    return float((y.double() - expected).norm() / expected.norm())


def dequantize_w1_w2(loaded: LoadedExperts) -> tuple[torch.Tensor, torch.Tensor]:
    """Return w1 and w2 in float64. All gate rows of w1 precede the up rows."""
    scheme, weights = QuantScheme.parse(loaded.problem_fields["quant"]), loaded.weights
    matrices = []
    for name in ("w1", "w2"):
        stored = getattr(weights, name)
        if scheme.quantized:
            stored = dequantize_weights(weights, name, loaded.problem(1))
        matrices.append(stored.double())
    if loaded.problem_fields["activation"].interleaved:
        matrices[0] = torch.cat([matrices[0][:, 0::2], matrices[0][:, 1::2]], 1)
    return matrices[0], matrices[1]


@pytest.mark.parametrize("kind", CHECKPOINT_FORMATS)
def test_output_error_is_within_the_bound(kind: str, tmp_path: Path) -> None:
    sample = write_checkpoint(tmp_path, kind)
    loaded = mk.load_experts(tmp_path, 0)
    assert str(QuantScheme.parse(loaded.problem_fields["quant"])) == CHECKPOINT_FORMATS[kind].scheme
    assert compute_output_error(sample, loaded) <= CHECKPOINT_FORMATS[kind].bound


@pytest.mark.parametrize("kind", CHECKPOINT_FORMATS)
def test_dequantized_weights_equal_the_checkpoint(kind: str, tmp_path: Path) -> None:
    sample = write_checkpoint(tmp_path, kind)
    w1, w2 = dequantize_w1_w2(mk.load_experts(tmp_path, 0))
    # The scales of gate and up are merged into the larger one, so the half with the smaller scale
    # is rounded again.
    rtol = 2.0**-4 if CHECKPOINT_FORMATS[kind].scheme.startswith("fp8_w8a8_tensor") else 1e-6
    torch.testing.assert_close(w1, sample.w1, rtol=rtol, atol=1e-3 if rtol > 1e-3 else 1e-12)
    torch.testing.assert_close(w2, sample.w2, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("kind", QUANTIZED)
def test_packed_weights_are_not_expanded(kind: str, tmp_path: Path) -> None:
    sample = write_checkpoint(tmp_path, kind)
    w = mk.load_experts(tmp_path, 0).weights
    scheme = QuantScheme.parse(CHECKPOINT_FORMATS[kind].scheme)
    bits = 4 if scheme.packed else 8
    assert w.w1.nbytes * 8 == sample.w1.numel() * bits
    assert w.w2.nbytes * 8 == sample.w2.numel() * bits


@pytest.mark.parametrize(
    ("kind", "dtype", "scale_dtype"),
    [
        ("gptq", torch.bfloat16, torch.float16),
        ("gptq", torch.float32, torch.float32),
        ("compressed int4", torch.float16, torch.bfloat16),
        ("compressed int8, weights", torch.float16, torch.float32),
        ("mixed", torch.bfloat16, torch.float32),
    ],
)
def test_integer_scales_keep_their_16_bit_dtype(
    kind: str, dtype: torch.dtype, scale_dtype: torch.dtype, tmp_path: Path
) -> None:
    """Scales keep the dtype of the file if the layer has a 16-bit dtype. If a file mixes both
    16-bit dtypes, scales become float32, which represents both exactly.
    """

    def mix_scale_dtypes(tensors: Tensors) -> None:
        name = next(name for name in tensors if name.endswith(".scales"))
        tensors[name] = tensors[name].bfloat16()

    format_kind, change = ("gptq", mix_scale_dtypes) if kind == "mixed" else (kind, None)
    write_checkpoint(tmp_path, format_kind, change)
    loaded = mk.load_experts(tmp_path, 0, dtype=dtype)
    assert loaded.weights.w1_scale is not None
    assert loaded.weights.w2_scale is not None
    assert {loaded.weights.w1_scale.dtype, loaded.weights.w2_scale.dtype} == {scale_dtype}
    in_float32 = dequantize_w1_w2(mk.load_experts(tmp_path, 0, dtype=torch.float32))
    for got, want in zip(dequantize_w1_w2(loaded), in_float32, strict=True):
        assert torch.equal(got, want)


# All experts of a projection are stacked as (e, K, N), with one scale for all experts or one per
# row.
TRANSPOSED_FORMATS = [
    (family, kind)
    for family in ("llama4_text", "gpt_oss")
    for kind in FUSED_FORMATS
    if (family, kind) != ("gpt_oss", "fbgemm fp8, fused")  # not a published combination
]


@pytest.mark.parametrize(("family", "kind"), TRANSPOSED_FORMATS)
def test_transposed_stacks_are_loaded(family: str, kind: str, tmp_path: Path) -> None:
    """Both the stack of all experts and the shares of ranks have the values of the file. If the
    rows of a matrix are shifted, the error exceeds the bound.
    """
    sample, bound = write(tmp_path, family, kind), FUSED_FORMATS[kind].bound
    loaded = mk.load_experts(tmp_path, 0)
    assert str(QuantScheme.parse(loaded.problem_fields["quant"])) == FUSED_FORMATS[kind].scheme
    assert compute_output_error(sample, loaded) <= bound
    w1, w2 = dequantize_w1_w2(loaded)
    torch.testing.assert_close(w1, sample.w1, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(w2, sample.w2, rtol=1e-6, atol=1e-12)
    for ep, tp in ((2, 1), (1, 2), (2, 2)):
        max_bytes = loaded.bytes_read / (ep * tp)
        ranks = [[mk.load_experts(tmp_path, 0, ep=(e, ep), tp=(t, tp)) for t in range(tp)]
                 for e in range(ep)]  # fmt: skip
        weights = [[dequantize_w1_w2(rank) for rank in tp_ranks] for tp_ranks in ranks]
        gate_up = [torch.cat([w1.unflatten(1, (2, -1)) for w1, _ in pairs], 2) for pairs in weights]
        assert torch.equal(torch.cat(gate_up).flatten(1, 2), w1)
        down = [torch.cat([w2 for _, w2 in pairs], 2) for pairs in weights]
        assert torch.equal(torch.cat(down), w2)
        assert all(rank.bytes_read <= 1.05 * max_bytes for tp_ranks in ranks for rank in tp_ranks)

    def shift_rows(tensors: Tensors) -> None:
        endings = ("gate_up_proj_weight_scale", "gate_up_proj")
        for name in [n for n in tensors if n.endswith(endings) and tensors[n].dim() == 3]:
            tensors[name] = tensors[name].roll(8, 2)

    shifted = write(tmp_path / "other", family, kind, change=shift_rows)
    assert compute_output_error(shifted, mk.load_experts(shifted.folder, 0)) > 1.5 * bound


# Defects whose error exceeds the bound

SCALE_NAMES = ("weight_scale_inv", "weight_scale", "scales", ".scale", ".SCB")


def exchange_gate_and_up_scales(tensors: Tensors) -> None:
    for gate, up in (("w1", "w3"), ("gate_proj", "up_proj")):
        for name in [n for n in tensors if f".{gate}." in n and n.endswith(SCALE_NAMES)]:
            up_name = name.replace(f".{gate}.", f".{up}.")
            tensors[name], tensors[up_name] = tensors[up_name], tensors[name]
    for name in [n for n in tensors if n.endswith("gate_up_proj_scales")]:
        pairs = tensors[name].unflatten(1, (-1, 2))
        tensors[name] = pairs.flip(2).flatten(1, 2).contiguous()


def shift_zero_points(tensors: Tensors) -> None:
    for name in [n for n in tensors if n.endswith(("qzeros", "weight_zero_point"))]:
        tensors[name] -= 0x11111111


def drop_tile(loaded: LoadedExperts) -> LoadedExperts:
    """Set 128 rows and columns of each w1 to the code of 0, as if a tile had not been copied."""
    scheme = QuantScheme.parse(loaded.problem_fields["quant"])
    w1 = loaded.weights.w1.clone()
    columns = 64 if scheme.packed else 128
    zero_code = {"uint4": 0x88, "uint8": 0x80}.get(scheme.weight, 0)
    w1[:, :128, :columns] = torch.tensor(zero_code).to(w1.dtype)
    return replace(loaded, weights=replace(loaded.weights, w1=w1))


@pytest.mark.parametrize("kind", QUANTIZED)
def test_exchanged_scales_exceed_the_bound(kind: str, tmp_path: Path) -> None:
    sample = write_checkpoint(tmp_path, kind, exchange_gate_and_up_scales)
    assert (
        compute_output_error(sample, mk.load_experts(tmp_path, 0))
        > 1.5 * CHECKPOINT_FORMATS[kind].bound
    )


@pytest.mark.parametrize(
    "kind", [k for k in QUANTIZED if "zero_points" in CHECKPOINT_FORMATS[k].scheme]
)
def test_shifted_zero_points_exceed_the_bound(kind: str, tmp_path: Path) -> None:
    sample = write_checkpoint(tmp_path, kind, shift_zero_points)
    assert (
        compute_output_error(sample, mk.load_experts(tmp_path, 0))
        > 1.5 * CHECKPOINT_FORMATS[kind].bound
    )


@pytest.mark.parametrize("kind", CHECKPOINT_FORMATS)
def test_dropped_tile_exceeds_the_bound(kind: str, tmp_path: Path) -> None:
    sample = write_checkpoint(tmp_path, kind)
    assert (
        compute_output_error(sample, drop_tile(mk.load_experts(tmp_path, 0)))
        > 1.5 * CHECKPOINT_FORMATS[kind].bound
    )


def test_unexpected_zero_points_of_a_symmetric_format_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "gptq", shift_zero_points)
    with pytest.raises(mk.ModularKernelError, match=r"w1.*zero_point: got a zero point of 7"):
        mk.load_experts(tmp_path, 0)
