"""Operations on words that pack 4- and 8-bit values (transposition, permutation), and progress logs
of long loads.
"""

import logging
from pathlib import Path

import pytest
import torch

import modular_kernel as mk
from modular_kernel.checkpoints import packed_words
from modular_kernel.checkpoints.fp8_mxfp4 import merge_scales
from modular_kernel.testing.checkpoints.formats import AWQ_ORDER, pack_words
from modular_kernel.testing.checkpoints.samples import write
from modular_kernel.utils import progress

BATCHES = ((), (3,), (2, 2))
COLUMN_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)  # column in each nibble of an AWQ word


def random_codes(*shape: int, max_code: int = 16) -> torch.Tensor:
    return torch.randint(0, max_code, shape, generator=torch.Generator().manual_seed(0))


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack (..., K) into bytes. If a byte has two nibbles, the even column is in the low bits."""
    return (codes if bits == 8 else codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.float16])
def test_transpose_words_equals_torch_transpose(batch: tuple[int, ...], dtype: torch.dtype) -> None:
    words = random_codes(*batch, 70, 90, max_code=100).to(dtype)
    for source in (words, words[..., 1:, 3:]):
        got = packed_words.transpose_words(source)
        assert got.is_contiguous()
        assert torch.equal(got, source.transpose(-1, -2))


@pytest.mark.parametrize("batch", BATCHES)
def test_pack_columns_equals_packed_codes(batch: tuple[int, ...]) -> None:
    codes = random_codes(*batch, 96, 40)
    words = pack_words(codes, -1, 4, AWQ_ORDER)
    assert torch.equal(packed_words.pack_columns(words, COLUMN_OF_NIBBLE), pack_codes(codes.mT, 4))
    slice_of_words = torch.cat([words, words], -1)[..., 2:7]
    want = torch.cat([codes, codes], -1)[..., 16:56]
    assert torch.equal(
        packed_words.pack_columns(slice_of_words, COLUMN_OF_NIBBLE), pack_codes(want.mT, 4)
    )


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("bits", [4, 8])
def test_permute_columns_equals_gather(batch: tuple[int, ...], bits: int) -> None:
    codes, count = random_codes(*batch, 24, 64, max_code=1 << bits), int(torch.Size(batch).numel())
    order = torch.stack([torch.randperm(64) for _ in range(count)]).view(*batch, 64)
    want = codes.gather(-1, order[..., None, :].expand_as(codes))
    got = packed_words.permute_columns(pack_codes(codes, bits), order.int(), bits)
    assert torch.equal(got, pack_codes(want, bits))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 24, 27])
def test_permute_rows_equals_gather(batch: tuple[int, ...], bits: int, rows: int) -> None:
    """The input must not change. The number of rows may be odd."""
    codes, count = (
        random_codes(*batch, 64, rows, max_code=1 << bits),
        int(torch.Size(batch).numel()),
    )
    order = torch.stack([torch.randperm(64) for _ in range(count)]).view(*batch, 64)
    words = pack_words(codes, -2, bits)
    before = words.clone()
    got = packed_words.permute_rows(words, order.int(), bits)
    want = codes.gather(-2, order[..., None].expand_as(codes))
    assert torch.equal(got, pack_codes(want.mT, bits))
    assert torch.equal(words, before)


@pytest.mark.parametrize("batch", BATCHES)
def test_out_argument_is_written(batch: tuple[int, ...]) -> None:
    codes = random_codes(*batch, 96, 40)
    words = pack_words(codes, -1, 4, AWQ_ORDER)
    out = torch.zeros(*batch, 40, 48, dtype=torch.uint8)
    assert packed_words.pack_columns(words, COLUMN_OF_NIBBLE, out) is out
    assert torch.equal(out, pack_codes(codes.mT, 4))
    words, out = pack_words(codes, -2, 4), torch.zeros(*batch, 40, 12, dtype=torch.int32)
    assert packed_words.transpose_words(words, out) is out
    assert torch.equal(out, words.mT)


@pytest.mark.parametrize("batch", BATCHES)
def test_interleave_nibbles_sorts_awq_columns(batch: tuple[int, ...]) -> None:
    codes = random_codes(*batch, 6, 40)
    got = packed_words.interleave_nibbles(pack_words(codes, -1, 4, AWQ_ORDER))
    assert torch.equal(got, pack_words(codes, -1, 4))


def test_merge_scales_rounds_every_code_like_its_product() -> None:
    """Looking up 256 products must give the same bits as multiplying and converting each weight."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(2).view(1, 4, 128)
    w, scale = codes.view(torch.float8_e4m3fn), torch.tensor([[0.3, 0.7]])
    got, merged_scale = merge_scales(w, scale)
    want = torch.cat(
        [(w[:, :2].float() * (scale[0, 0] / 0.7)).to(torch.float8_e4m3fn), w[:, 2:]], 1
    )
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    assert merged_scale.tolist() == scale[:, 1].tolist()


def test_long_load_logs_its_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, "mixtral", "bf16", experts=8)
    caplog.set_level(logging.INFO, logger="modular_kernel.loading")
    mk.load_experts(tmp_path, 0)
    assert not caplog.messages
    clock = iter(range(0, 100, 2))  # two seconds per expert
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    mk.load_experts(tmp_path, 0)
    prefix = f"{tmp_path}: model.layers.0.block_sparse_moe.experts"
    assert caplog.messages == [f"{prefix}: {n} of 8 experts in {2 * n + 2:.1f} s" for n in (2, 5)]
