"""`format_of`, `fit_scheme`, `merge`: stacked tensors of experts give what `load_experts` gives."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import modular_kernel as mk
from modular_kernel.checkpoints import fit_scheme, format_of, from_compressed_tensors, merge
from modular_kernel.errors import (
    ConfigurationError,
    DtypeError,
    InputError,
    ShapeError,
    WeightsError,
)
from modular_kernel.testing.checkpoints.published_formats import CHECKPOINT_FORMATS
from modular_kernel.testing.checkpoints.samples import write

AT = "model.layers.0.block_sparse_moe.experts"
Projection = dict[str, torch.Tensor]


def projections(tensors: dict[str, torch.Tensor], kind: str) -> dict[str, Projection]:
    """The tensors (E, ...) of w1 (gate), w3 (up) and w2, by the format's own names."""
    found = {}
    for name in ("w1", "w3", "w2"):
        own: Projection = {}
        for stored in format_of(CHECKPOINT_FORMATS[kind].config, depth=192).stored_tensors:
            each = [
                tensors.get(f"{AT}.{e}.{name}.{alias}")
                for alias in (stored.name, *stored.aliases)
                for e in range(4)
            ]
            given = [tensor for tensor in each if tensor is not None]
            if given:
                own[stored.name] = torch.stack(given)
        found[name] = own
    return found


@pytest.mark.parametrize("kind", CHECKPOINT_FORMATS)
def test_stacks_and_single_matrices_merge_alike(kind: str, tmp_path: Path) -> None:
    write(tmp_path, "mixtral", kind, intermediate=192)
    loaded = mk.load_experts(tmp_path, 0)
    tensors = load_file(tmp_path / "model.safetensors")
    format, own = format_of(CHECKPOINT_FORMATS[kind].config, depth=192), projections(tensors, kind)
    scheme = fit_scheme(format, 192)
    assert str(scheme) == loaded.problem_fields["quant"]
    dtype = loaded.problem_fields["dtype"]
    w1 = merge(format, [own["w1"], own["w3"]], dtype, scheme=scheme)
    w2 = merge(format, [own["w2"]], dtype, scheme=scheme)
    for name, matrix in (("w1", w1), ("w2", w2)):
        assert torch.equal(matrix.w.float(), getattr(loaded.weights, name).float())
        for field in ("scale", "zero_point", "global_scale"):
            mine, need = getattr(matrix, field), getattr(loaded.weights, f"{name}_{field}")
            assert (mine is None) == (need is None)
            assert need is None or torch.equal(mine.float(), need.float())
            assert need is None or mine.dtype in (torch.float32, need.dtype)
        if scheme.static:
            assert matrix.a_scale.shape == (4,)
            assert float(matrix.a_scale.max()) == float(
                getattr(loaded.weights, f"a{name[1]}_scale")
            )
    for e in range(4):  # one at a time
        single = [{n: t[e] for n, t in own[name].items()} for name in ("w1", "w3")]
        one = merge(format, single, dtype, scheme=scheme)
        assert torch.equal(one.w.float(), w1.w[e].float())
        assert w1.scale is None or torch.equal(one.scale.float(), w1.scale[e].float())


def test_mxfp4_and_blocks_are_views(tmp_path: Path) -> None:
    for kind in ("mxfp4", "deepseek fp8", "compressed int4"):
        write(tmp_path, "mixtral", kind)
        own = projections(load_file(tmp_path / "model.safetensors"), kind)["w2"]
        first = next(iter(own.values()))
        made = merge(format_of(CHECKPOINT_FORMATS[kind].config), [own], torch.bfloat16)
        assert made.w.data_ptr() == first.data_ptr()


def test_formats_are_told() -> None:
    assert str(format_of(None)) == "none"
    told = {str(format_of(kind.config, depth=256)) for kind in CHECKPOINT_FORMATS.values()}
    assert {
        "fp8_w8a8_block (fp8)",
        "int4_w4a16_group:group=64 (gptq)",
        "mxfp4_w4a16 (mxfp4)",
        "nvfp4_w4a16 (modelopt; activations stay in 16 bits)",
        "nvfp4_w4a16 (compressed-tensors; activations stay in 16 bits)",
    } <= told
    with pytest.raises(ConfigurationError, match=r"config\.json: quantization_config"):
        format_of([])


@pytest.mark.parametrize(
    ("kind", "intermediate", "world", "gated", "scheme"),
    [
        ("deepseek fp8", 2048, 8, True, "fp8_w8a8_block"),
        ("deepseek fp8", 192, 1, True, "fp8_w8a8_block:block=64x128"),
        ("deepseek fp8", 192, 1, False, "fp8_w8a8_block"),
        ("deepseek fp8", 1536, 16, True, "fp8_w8a8_block:block=32x32"),
        ("awq", 1536, 16, True, "int4_w4a16_group:group=32,zero_points=true"),
        ("mxfp4", 2880, 2, True, "mxfp4_w4a16"),
        ("bf16", 6, 3, True, "none"),
    ],
)
def test_a_share_has_tiles_of_its_own(
    kind: str, intermediate: int, world: int, gated: bool, scheme: str
) -> None:
    found = fit_scheme(
        format_of(CHECKPOINT_FORMATS[kind].config), intermediate, world=world, gated=gated
    )
    assert str(found) == scheme


def packed(rows: int = 8, depth: int = 64, groups: int = 2) -> dict[str, Any]:
    words = torch.randint(-(2**31), 2**31, (rows, depth // 8), dtype=torch.int64)
    return {
        "weight_packed": words.to(torch.int32),
        "weight_scale": torch.rand(rows, groups),
        "weight_zero_point": torch.zeros(rows // 8, groups, dtype=torch.int32),
        "group": depth // groups,
    }


def test_compressed_integers_by_hand() -> None:
    """Value k of a word is in its bits 4k on, plus 8; zero point n is packed along rows."""
    given = packed()
    given["weight_packed"][0, 0] = 0x76543210
    given["weight_zero_point"][0] = 0x76543210
    made = from_compressed_tensors(**given)
    assert made.w[0, :4].tolist() == [0x10, 0x32, 0x54, 0x76]
    assert made.zero_point.tolist() == [[0x10, 0x10], [0x32, 0x32], [0x54, 0x54], [0x76, 0x76]]
    assert made.quant == "int4_w4a16_group:group=32,zero_points=true"
    whole = from_compressed_tensors(**packed(groups=1) | {"group": -1})
    assert whole.group == 64


BAD: dict[str, tuple[dict[str, Any], type[InputError], str]] = {
    "dtype": ({"weight_packed": torch.zeros(8, 8)}, DtypeError, "weight_packed: got float32"),
    "scale": ({"weight_scale": torch.rand(8, 3)}, ShapeError, r"weight_scale: got \(8, 3\)"),
    "scale dtype": (
        {"weight_scale": torch.ones(8, 2).int()},
        DtypeError,
        "weight_scale: got int32",
    ),
    "zero points": (
        {"weight_zero_point": torch.zeros(2, 2).int()},
        ShapeError,
        "weight_zero_point",
    ),
    "group": ({"group": 31}, ConfigurationError, "group: got 31"),
    "bits": ({"bits": 5}, ConfigurationError, "bits: got 5"),
    "order": ({"weight_g_idx": torch.zeros(64).int()}, WeightsError, "weight_g_idx: got columns"),
}


def test_one_group_of_a_row_is_one_of_each_share() -> None:
    """However it is cut: 100 halves to no group of 32 or more that divides 50."""
    format = format_of(CHECKPOINT_FORMATS["awq, one group"].config, depth=100)
    assert fit_scheme(format, 100, world=2).group == (100,)


@pytest.mark.parametrize("case", BAD)
def test_compressed_integers_are_checked(case: str) -> None:
    change, kind, words = BAD[case]
    with pytest.raises(kind, match=words):
        from_compressed_tensors(**packed() | change)


def test_what_merge_is_given_is_checked() -> None:
    block = format_of(CHECKPOINT_FORMATS["deepseek fp8"].config)
    weight, scale = torch.zeros(192, 128).to(torch.float8_e4m3fn), torch.ones(2, 1)
    gate = {"weight": weight, "weight_scale_inv": scale}
    with pytest.raises(
        WeightsError, match="got no weight_scale_inv, need weight, weight_scale_inv"
    ):
        merge(block, [{"weight": weight}], torch.bfloat16)
    with pytest.raises(WeightsError, match="got unexpected bias"):
        merge(block, [gate | {"bias": scale}], torch.bfloat16)
    with pytest.raises(ShapeError, match=r"weight_scale_inv: got \(3, 1\), need \(2, 1\)"):
        merge(block, [gate | {"weight_scale_inv": torch.ones(3, 1)}], torch.bfloat16)
    with pytest.raises(
        ShapeError, match=r"192 rows of blocks of 128, need a multiple of the block"
    ):
        merge(block, [gate, gate], torch.bfloat16)
    with pytest.raises(ShapeError, match=r"weight: got \(128,\), need 2 dimensions"):
        merge(block, [gate | {"weight": weight[0]}], torch.bfloat16)
