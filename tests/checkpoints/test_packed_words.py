"""Transposition and permutation of words that pack 4- and 8-bit values, and progress logs of long
loads.
"""

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import modular_kernel as mk
from modular_kernel.checkpoints import packed_words
from modular_kernel.checkpoints.fp8_mxfp4 import merge_scales
from modular_kernel.replay.launch.build import BuildError
from modular_kernel.testing.checkpoints.formats import AWQ_ORDER, pack_words
from modular_kernel.testing.checkpoints.samples import write
from modular_kernel.utils import progress

BATCHES = ((), (3,), (2, 2))


@pytest.fixture(params=["torch", "compiled"])
def implementation(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Run a test with torch operations only, and then with packed_words.c, which must be called."""
    if request.param == "torch":
        monkeypatch.setattr(packed_words, "_load_compiled", lambda: None)
        yield request.param
        return
    if shutil.which("gcc") is None:
        pytest.skip("no gcc to compile with")
    module, calls = packed_words._load_compiled(), list[tuple[Any, ...]]()

    def transpose(*arguments: Any) -> None:
        calls.append(arguments)
        module.transpose(*arguments)

    monkeypatch.setattr(packed_words, "_MIN_COMPILED_BYTES", 0)
    monkeypatch.setattr(
        packed_words, "_load_compiled", lambda: SimpleNamespace(transpose=transpose)
    )
    yield request.param
    assert calls


def make_random_codes(*shape: int, max_code: int = 16) -> torch.Tensor:
    return torch.randint(0, max_code, shape, generator=torch.Generator().manual_seed(0))


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes (..., K) into bytes. Of two 4-bit codes, the even column is in the low nibble."""
    return (codes if bits == 8 else codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.float16])
def test_transpose_words_equals_torch_transpose(batch: tuple[int, ...], dtype: torch.dtype) -> None:
    words = make_random_codes(*batch, 70, 90, max_code=100).to(dtype)
    for source in (words, words[..., 1:, 3:]):
        got = packed_words.transpose_words(source)
        assert got.is_contiguous()
        assert torch.equal(got, source.transpose(-1, -2))


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("batch", BATCHES)
def test_pack_columns_equals_packed_codes(batch: tuple[int, ...]) -> None:
    codes = make_random_codes(*batch, 96, 40)
    words = pack_words(codes, -1, 4, AWQ_ORDER)
    assert torch.equal(packed_words.pack_columns(words), pack_codes(codes.mT, 4))
    slice_of_words = torch.cat([words, words], -1)[..., 2:7]
    want = torch.cat([codes, codes], -1)[..., 16:56]
    assert torch.equal(packed_words.pack_columns(slice_of_words), pack_codes(want.mT, 4))


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("bits", [4, 8])
def test_permute_columns_equals_gather(batch: tuple[int, ...], bits: int) -> None:
    codes, count = (
        make_random_codes(*batch, 24, 64, max_code=1 << bits),
        int(torch.Size(batch).numel()),
    )
    order = torch.stack([torch.randperm(64) for _ in range(count)]).view(*batch, 64)
    want = codes.gather(-1, order[..., None, :].expand_as(codes))
    got = packed_words.permute_columns(pack_codes(codes, bits), order.int(), bits)
    assert torch.equal(got, pack_codes(want, bits))


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 24, 27])
def test_permute_rows_equals_gather(batch: tuple[int, ...], bits: int, rows: int) -> None:
    """The number of rows may be odd, and the input must not change."""
    codes, count = (
        make_random_codes(*batch, 64, rows, max_code=1 << bits),
        int(torch.Size(batch).numel()),
    )
    order = torch.stack([torch.randperm(64) for _ in range(count)]).view(*batch, 64)
    words = pack_words(codes, -2, bits)
    before = words.clone()
    got = packed_words.permute_rows(words, order.int(), bits)
    want = codes.gather(-2, order[..., None].expand_as(codes))
    assert torch.equal(got, pack_codes(want.mT, bits))
    assert torch.equal(words, before)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("batch", BATCHES)
def test_out_argument_is_written(batch: tuple[int, ...]) -> None:
    codes = make_random_codes(*batch, 96, 40)
    words = pack_words(codes, -1, 4, AWQ_ORDER)
    out = torch.zeros(*batch, 40, 48, dtype=torch.uint8)
    assert packed_words.pack_columns(words, out) is out
    assert torch.equal(out, pack_codes(codes.mT, 4))
    words, out = pack_words(codes, -2, 4), torch.zeros(*batch, 40, 12, dtype=torch.int32)
    assert packed_words.transpose_words(words, out) is out
    assert torch.equal(out, words.mT)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("depth", "columns"), [(8, 8), (136, 64), (264, 200), (512, 136)])
def test_matrices_of_several_tiles_equal_their_codes(depth: int, columns: int, bits: int) -> None:
    """packed_words.c has tiles of 64 columns by 64 bytes, and the last tile can be partial."""
    codes = make_random_codes(depth, columns, max_code=1 << bits)
    words, order = pack_words(codes, -2, bits), torch.randperm(depth).int()
    expected = pack_codes(codes.mT, bits)
    assert torch.equal(packed_words.transpose_words(words).view(torch.uint8), expected)
    if bits == 4:
        awq = pack_words(codes, -1, bits, AWQ_ORDER)
        assert torch.equal(packed_words.pack_columns(awq), expected)
    permuted, out = (
        pack_codes(codes[order].mT, bits),
        torch.zeros(columns, depth * bits // 8, dtype=torch.uint8),
    )
    assert packed_words.permute_rows(words, order, bits, out) is out
    assert torch.equal(out, permuted)
    assert torch.equal(packed_words.permute_columns(expected, order, bits), permuted)
    slice_of_words = torch.cat([words, words], 1)[:, 3 : 3 + columns]
    rolled = pack_codes(torch.cat([codes, codes], 1)[order, 3 : 3 + columns].mT, bits)
    assert torch.equal(packed_words.permute_rows(slice_of_words, order, bits), rolled)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("value", [-1, 64])
def test_order_out_of_range_is_refused(value: int) -> None:
    words, order = pack_words(make_random_codes(64, 40), -2, 4), torch.arange(64).int()
    order[5] = value
    with pytest.raises(IndexError):
        packed_words.permute_rows(words, order, 4)


@pytest.mark.parametrize(
    ("depth", "out_shape"),
    [(32, (40, 32)), (128, (40, 32)), (64, (40, 16)), (64, (39, 32)), (64, (40, 64))],
)
def test_order_and_out_of_other_sizes_are_refused(
    monkeypatch: pytest.MonkeyPatch, depth: int, out_shape: tuple[int, int]
) -> None:
    """packed_words.c does not check sizes, so it would read and write beyond the tensors."""
    monkeypatch.setattr(packed_words, "_MIN_COMPILED_BYTES", 0)
    words, order = (
        pack_words(make_random_codes(64, 40), -2, 4),
        torch.zeros(depth, dtype=torch.int32),
    )
    with pytest.raises(RuntimeError, match="size of tensor"):
        packed_words.permute_rows(words, order, 4, torch.zeros(out_shape, dtype=torch.uint8))


def test_order_beyond_int32_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_words, "_MIN_COMPILED_BYTES", 0)
    words = pack_words(make_random_codes(64, 40), -2, 4)
    with pytest.raises(IndexError):
        packed_words.permute_rows(words, torch.arange(64) + 2**32, 4)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int64])
def test_words_are_converted_to_the_dtype_of_out(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(packed_words, "_MIN_COMPILED_BYTES", 0)
    words = make_random_codes(8, 40).int()
    out = packed_words.transpose_words(words, torch.zeros(40, 8, dtype=dtype))
    assert torch.equal(out, words.mT.to(dtype))


def test_awq_words_of_an_odd_number_of_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_words, "_MIN_COMPILED_BYTES", 0)
    with pytest.raises(RuntimeError, match="size of tensor"):
        packed_words.pack_columns(torch.zeros(7, 40, dtype=torch.int32))


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("bits", [4, 8])
def test_words_can_start_at_any_byte_of_a_file(bits: int) -> None:
    codes, order = make_random_codes(64, 80, max_code=1 << bits), torch.randperm(64).int()
    words, unaligned_order = (
        torch.frombuffer(
            bytearray(b"\0" + tensor.numpy().tobytes()), dtype=torch.int32, offset=1
        ).view(tensor.shape)
        for tensor in (pack_words(codes, -2, bits), order)
    )
    got = packed_words.permute_rows(words, unaligned_order, bits)
    assert torch.equal(got, pack_codes(codes[order.long()].mT, bits))


def test_words_are_transposed_by_torch_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise BuildError("no C compiler found (CC, gcc or clang)")

    load_compiled = packed_words._load_compiled.__wrapped__
    monkeypatch.setattr(packed_words, "_load_compiled", load_compiled)
    monkeypatch.setattr(packed_words, "_MIN_COMPILED_BYTES", 0)
    monkeypatch.setattr(packed_words, "load_module", fail)
    caplog.set_level(logging.INFO, logger="modular_kernel.loading")
    words = pack_words(make_random_codes(64, 40), -2, 4)
    assert torch.equal(packed_words.transpose_words(words), words.mT)
    (message,) = caplog.messages
    assert message.endswith("transposed by torch: no C compiler found (CC, gcc or clang)")


@pytest.mark.parametrize("batch", BATCHES)
def test_interleave_nibbles_sorts_awq_columns(batch: tuple[int, ...]) -> None:
    codes = make_random_codes(*batch, 6, 40)
    got = packed_words.interleave_nibbles(pack_words(codes, -1, 4, AWQ_ORDER))
    assert torch.equal(got, pack_words(codes, -1, 4))


def test_merge_scales_rounds_every_code_like_its_product() -> None:
    """A lookup table of 256 products must give the same bits as multiplication and conversion of
    each weight.
    """
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
