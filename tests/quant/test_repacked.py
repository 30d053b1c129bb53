"""e2m1 weights repacked into the order that kernels unpack fastest: round trips and the contents of
words.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from modular_kernel import ExpertWeights, Problem
from modular_kernel.errors import ConfigurationError, DtypeError, ShapeError
from modular_kernel.quant.quantized_weights import dequantize, quantize_weights, weight_specs
from modular_kernel.quant.repacking import repack, unpack_words, unrepack
from modular_kernel.reference.weights import unpack_codes
from modular_kernel.spec.problem import Machine
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.testing import Case, prove
from modular_kernel.testing.cases.lists import BASE

NOT_REPACKED = Problem(2, 32, 64, 3, 1, quant="mxfp4_w4a16")
REPACKED = replace(NOT_REPACKED, quant="mxfp4_w4a16:repacked=true")
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def make_random_codes(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def unpack_nibbles(w_eNK: torch.Tensor) -> torch.Tensor:
    """Return the nibbles of each row in order of k."""
    return torch.stack([w_eNK & 15, w_eNK >> 4], 3).flatten(2)


def test_unrepack_inverts_repack() -> None:
    w = make_random_codes(3, 5, 64)
    packed = repack(w)
    assert not torch.equal(packed, w)
    assert torch.equal(unrepack(packed), w)


def test_repacked_bits_are_read_by_unpack_codes() -> None:
    w = make_random_codes(2, 7, 36)
    n, k = torch.arange(7)[:, None], torch.arange(72)[None, :]
    for stored, expected in zip(repack(w), unpack_nibbles(w), strict=True):
        assert torch.equal(unpack_codes(stored, n, k, REPACKED.scheme), expected.long())


def test_words_unpack_to_pairs_of_bf16() -> None:
    """Register i has values 2i and 2i + 1 in its halves, multiplied by 2^-126."""
    w = make_random_codes(1, 16, 64)
    words = repack(w).view(torch.int32).long() & 0xFFFFFFFF
    pairs = torch.stack(unpack_words(words), 3)
    bits = torch.stack([pairs & 0xFFFF, pairs >> 16], 4).flatten(2).to(torch.int32)
    unpacked_values = (bits << 16).view(torch.float32).double() * 2.0**126
    code = unpack_nibbles(w).long()
    expected = torch.where(code < 8, E2M1[code & 7], -E2M1[code & 7])
    assert torch.equal(unpacked_values, expected.double())


def test_repack_writes_in_place() -> None:
    w = make_random_codes(2, 3, 16)
    expected, original = repack(w), w.clone()
    assert repack(w, out=w) is w
    assert torch.equal(w, expected)
    unrepack(w, out=w)
    assert torch.equal(w, original)


def test_strided_weights_are_repacked() -> None:
    """Rows can start inside words, and the values of a row can have gaps."""
    w = make_random_codes(2, 3, 16)
    expected = repack(w)
    shifted = make_random_codes(2, 3, 19)[:, :, 3:].copy_(w)
    with_gaps = w.transpose(1, 2).contiguous().transpose(1, 2)
    out = torch.zeros(2, 3, 19, dtype=torch.uint8)[:, :, 3:]
    for strided in (shifted, with_gaps):
        assert torch.equal(repack(strided), expected)
        assert torch.equal(repack(strided, out=out), expected)


def test_repacking_in_chunks_of_experts_is_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    w = make_random_codes(5, 3, 16)
    expected = repack(w)
    for words in (1, 24, 25):
        monkeypatch.setattr("modular_kernel.quant.repacking._MAX_WORDS", words)
        assert torch.equal(repack(w), expected)


@pytest.mark.parametrize("shape", [(0, 3, 16), (2, 0, 16), (2, 3, 0)])
def test_empty_weights_are_repacked(shape: tuple[int, int, int]) -> None:
    assert repack(make_random_codes(*shape)).shape == shape


@pytest.mark.parametrize(
    ("w", "out", "error", "message"),
    [
        (make_random_codes(2, 3, 16).view(torch.int8), None, DtypeError, "uint8"),
        (make_random_codes(2, 3, 18), None, ShapeError, "multiple of 8"),
        (make_random_codes(3, 16), None, ShapeError, "(e, N, K / 2)"),
        (make_random_codes(2, 3, 16), make_random_codes(2, 3, 12), ShapeError, "(2, 3, 16)"),
        (make_random_codes(2, 3, 16), torch.zeros(2, 3, 16), DtypeError, "uint8"),
    ],
)
def test_weights_that_cannot_be_repacked_are_refused(
    w: torch.Tensor, out: torch.Tensor | None, error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as exc_info:
        repack(w, out=out)
    assert message in str(exc_info.value)


def test_a_repacked_layer_has_the_same_output() -> None:
    generator = torch.Generator().manual_seed(0)
    w1 = torch.randn(3, NOT_REPACKED.w1_rows, NOT_REPACKED.hidden, generator=generator)
    w2 = torch.randn(3, NOT_REPACKED.hidden, NOT_REPACKED.intermediate, generator=generator)
    weights, packed = (quantize_weights(ExpertWeights(w1, w2), p) for p in (NOT_REPACKED, REPACKED))
    for name in ("w1", "w2"):
        w, repacked = getattr(weights, name), getattr(packed, name)
        scale = getattr(weights, f"{name}_scale")
        assert torch.equal(repacked, repack(w))
        assert torch.equal(getattr(packed, f"{name}_scale"), scale)
        values = dequantize(w, scale, None, NOT_REPACKED.scheme)
        assert torch.equal(dequantize(repacked, scale, None, REPACKED.scheme), values)


def test_the_scheme_name_includes_repacked() -> None:
    scheme = QuantScheme.parse("mxfp4_w4a16:repacked=true")
    assert scheme.repacked
    assert str(scheme) == "mxfp4_w4a16:repacked=true"
    assert QuantScheme.parse("mxfp4_w4a16:repacked=false") == QuantScheme.parse("mxfp4_w4a16")


@pytest.mark.parametrize("sizes", [{"hidden": 36}, {"intermediate": 100}])
def test_rows_must_consist_of_whole_words(sizes: dict[str, Any]) -> None:
    problem = replace(REPACKED, **sizes)
    with pytest.raises(ConfigurationError, match="a multiple of 8"):
        weight_specs(problem)
    assert weight_specs(replace(NOT_REPACKED, **sizes))


@pytest.mark.share(6)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "pair",
    [
        ("MoEPrepareAndFinalizeNoEP", "TritonExperts"),
        ("BatchedPrepareAndFinalize", "BatchedTritonExperts"),
    ],
)
def test_cases_with_many_rows_pass(
    pair: tuple[str, str], dtype: torch.dtype, machine: Machine
) -> None:
    problem = replace(
        BASE, hidden=160, intermediate=96, tokens=33, dtype=dtype, quant=REPACKED.quant
    )
    proof = prove(Case(*pair, problem, "uniform"), machine)
    assert proof.passed, str(proof)
