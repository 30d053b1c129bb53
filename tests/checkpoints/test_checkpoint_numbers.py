"""Tiny checkpoints of every format give the numbers that their files stand for, packed as they are.

No packer's library may be imported. That a bound can be exceeded is shown for each format.
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

PACKERS = ("kernels", "accelerate", "compressed_tensors", "gptqmodel", "optimum", "modelopt")
PAIR = ("MoEPrepareAndFinalizeNoEP", "TorchExperts")
# The family that publishes a format, where it is not Mixtral's.
PUBLISHERS = {
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
def no_packer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PACKERS, "transformers"):
        monkeypatch.setitem(sys.modules, name, None)


def written(folder: Path, kind: str, change: Callable[[Tensors], None] | None = None) -> Sample:
    return write(folder, PUBLISHERS.get(kind, "mixtral"), kind, change=change)


def error(sample: Sample, loaded: LoadedExperts) -> float:
    """Of a layer's output, relative to float64."""
    x, weights, ids = sample.inputs(24)
    problem = loaded.problem(24)
    kernel = mk.make_kernel(*PAIR, problem, machine=this_machine(device="cpu"))
    y = kernel(x.to(problem.dtype), loaded.weights, mk.Routing(weights, ids))
    truth = sample.expected_output(x.to(problem.dtype).double(), weights, ids)
    return float((y.double() - truth).norm() / truth.norm())


def numbers(loaded: LoadedExperts) -> tuple[torch.Tensor, torch.Tensor]:
    """w1, gate rows first, and w2 in float64."""
    scheme, w, found = QuantScheme.parse(loaded.problem_fields["quant"]), loaded.weights, []
    for name in ("w1", "w2"):
        stored = getattr(w, name)
        if scheme.quantized:
            stored = dequantize_weights(w, name, loaded.problem(1))
        found.append(stored.double())
    if loaded.problem_fields["activation"].interleaved:
        found[0] = torch.cat([found[0][:, 0::2], found[0][:, 1::2]], 1)
    return found[0], found[1]


@pytest.mark.parametrize("kind", CHECKPOINT_FORMATS)
def test_a_layer_is_within_its_bound(kind: str, tmp_path: Path) -> None:
    sample = written(tmp_path, kind)
    loaded = mk.load_experts(tmp_path, 0)
    assert str(QuantScheme.parse(loaded.problem_fields["quant"])) == CHECKPOINT_FORMATS[kind].scheme
    assert error(sample, loaded) <= CHECKPOINT_FORMATS[kind].bound


@pytest.mark.parametrize("kind", CHECKPOINT_FORMATS)
def test_weights_are_those_of_the_files(kind: str, tmp_path: Path) -> None:
    sample = written(tmp_path, kind)
    w1, w2 = numbers(mk.load_experts(tmp_path, 0))
    # A scale of each half becomes one: the smaller half is rounded to fp8 again.
    near = 2.0**-4 if CHECKPOINT_FORMATS[kind].scheme.startswith("fp8_w8a8_tensor") else 1e-6
    torch.testing.assert_close(w1, sample.w1, rtol=near, atol=1e-3 if near > 1e-3 else 1e-12)
    torch.testing.assert_close(w2, sample.w2, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("kind", QUANTIZED)
def test_what_is_packed_stays_packed(kind: str, tmp_path: Path) -> None:
    sample = written(tmp_path, kind)
    w = mk.load_experts(tmp_path, 0).weights
    scheme = QuantScheme.parse(CHECKPOINT_FORMATS[kind].scheme)
    bits = 4 if scheme.packed else 8
    assert w.w1.nbytes * 8 == sample.w1.numel() * bits
    assert w.w2.nbytes * 8 == sample.w2.numel() * bits


@pytest.mark.parametrize(
    ("kind", "dtype", "scales"),
    [
        ("gptq", torch.bfloat16, torch.float16),
        ("gptq", torch.float32, torch.float32),
        ("compressed int4", torch.float16, torch.bfloat16),
        ("compressed int8, weights", torch.float16, torch.float32),
        ("mixed", torch.bfloat16, torch.float32),
    ],
)
def test_scales_of_integers_stay_in_16_bits(
    kind: str, dtype: torch.dtype, scales: torch.dtype, tmp_path: Path
) -> None:
    """Whatever 16 bits the layer has; of two kinds they are float32, which holds either."""

    def mix(tensors: Tensors) -> None:
        name = next(name for name in tensors if name.endswith(".scales"))
        tensors[name] = tensors[name].bfloat16()

    given = ("gptq", mix) if kind == "mixed" else (kind, None)
    written(tmp_path, *given)
    loaded = mk.load_experts(tmp_path, 0, dtype=dtype)
    assert loaded.weights.w1_scale is not None
    assert loaded.weights.w2_scale is not None
    assert {loaded.weights.w1_scale.dtype, loaded.weights.w2_scale.dtype} == {scales}
    whole = numbers(mk.load_experts(tmp_path, 0, dtype=torch.float32))
    for got, want in zip(numbers(loaded), whole, strict=True):
        assert torch.equal(got, want)


# Whole stacks stored (e, K, N), with one scale of all their experts, or one of each row.
TURNED = [
    (family, kind)
    for family in ("llama4_text", "gpt_oss")
    for kind in FUSED_FORMATS
    if (family, kind) != ("gpt_oss", "fbgemm fp8, fused")  # nobody writes it
]


@pytest.mark.parametrize(("family", "kind"), TURNED)
def test_stacks_that_lie_transposed_are_read(family: str, kind: str, tmp_path: Path) -> None:
    """Whole and in shares, which cut columns of the files; and with rows of scales exchanged."""
    sample, bound = write(tmp_path, family, kind), FUSED_FORMATS[kind].bound
    loaded = mk.load_experts(tmp_path, 0)
    assert str(QuantScheme.parse(loaded.problem_fields["quant"])) == FUSED_FORMATS[kind].scheme
    assert error(sample, loaded) <= bound
    w1, w2 = numbers(loaded)
    torch.testing.assert_close(w1, sample.w1, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(w2, sample.w2, rtol=1e-6, atol=1e-12)
    for ep, tp in ((2, 1), (1, 2), (2, 2)):
        whole = loaded.bytes_read / (ep * tp)
        grid = [[mk.load_experts(tmp_path, 0, ep=(e, ep), tp=(t, tp)) for t in range(tp)]
                for e in range(ep)]  # fmt: skip
        parts = [[numbers(each) for each in row] for row in grid]
        rows = [torch.cat([w.unflatten(1, (2, -1)) for w, _ in row], 2) for row in parts]
        assert torch.equal(torch.cat(rows).flatten(1, 2), w1)
        assert torch.equal(torch.cat([torch.cat([w for _, w in row], 2) for row in parts]), w2)
        assert all(each.bytes_read <= 1.05 * whole for row in grid for each in row)

    def other_rows(tensors: Tensors) -> None:
        endings = ("gate_up_proj_weight_scale", "gate_up_proj")
        for name in [n for n in tensors if n.endswith(endings) and tensors[n].dim() == 3]:
            tensors[name] = tensors[name].roll(8, 2)

    other = write(tmp_path / "other", family, kind, change=other_rows)
    assert error(other, mk.load_experts(other.folder, 0)) > 1.5 * bound


# -------------------------------------------------------------- that a bound can be exceeded

SCALES = ("weight_scale_inv", "weight_scale", "scales", ".scale", ".SCB")


def exchange(tensors: Tensors) -> None:
    """Gate's scales for up's, of every expert."""
    for gate, up in (("w1", "w3"), ("gate_proj", "up_proj")):
        for name in [n for n in tensors if f".{gate}." in n and n.endswith(SCALES)]:
            other = name.replace(f".{gate}.", f".{up}.")
            tensors[name], tensors[other] = tensors[other], tensors[name]
    for name in [n for n in tensors if n.endswith("gate_up_proj_scales")]:
        pairs = tensors[name].unflatten(1, (-1, 2))
        tensors[name] = pairs.flip(2).flatten(1, 2).contiguous()


def shift(tensors: Tensors) -> None:
    """Every zero point one more, or one less where it would not fit."""
    for name in [n for n in tensors if n.endswith(("qzeros", "weight_zero_point"))]:
        tensors[name] -= 0x11111111


def dropped(loaded: LoadedExperts) -> LoadedExperts:
    """128 rows and columns of each w1 as if they had not been copied: what stands for 0."""
    scheme = QuantScheme.parse(loaded.problem_fields["quant"])
    w1 = loaded.weights.w1.clone()
    columns = 64 if scheme.packed else 128
    middle = {"uint4": 0x88, "uint8": 0x80}.get(scheme.weight, 0)
    w1[:, :128, :columns] = torch.tensor(middle).to(w1.dtype)
    return replace(loaded, weights=replace(loaded.weights, w1=w1))


@pytest.mark.parametrize("kind", QUANTIZED)
def test_exchanged_scales_are_seen(kind: str, tmp_path: Path) -> None:
    sample = written(tmp_path, kind, exchange)
    assert error(sample, mk.load_experts(tmp_path, 0)) > 1.5 * CHECKPOINT_FORMATS[kind].bound


@pytest.mark.parametrize(
    "kind", [k for k in QUANTIZED if "zero_points" in CHECKPOINT_FORMATS[k].scheme]
)
def test_shifted_zero_points_are_seen(kind: str, tmp_path: Path) -> None:
    sample = written(tmp_path, kind, shift)
    assert error(sample, mk.load_experts(tmp_path, 0)) > 1.5 * CHECKPOINT_FORMATS[kind].bound


@pytest.mark.parametrize("kind", CHECKPOINT_FORMATS)
def test_a_dropped_tile_is_seen(kind: str, tmp_path: Path) -> None:
    sample = written(tmp_path, kind)
    assert (
        error(sample, dropped(mk.load_experts(tmp_path, 0))) > 1.5 * CHECKPOINT_FORMATS[kind].bound
    )


def test_symmetric_integers_with_other_zero_points_are_refused(tmp_path: Path) -> None:
    written(tmp_path, "gptq", shift)
    with pytest.raises(mk.ModularKernelError, match=r"w1.*zero_point: got a zero point of 7"):
        mk.load_experts(tmp_path, 0)
