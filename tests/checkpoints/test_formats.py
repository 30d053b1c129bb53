"""`format_of`, `fit_scheme` and `merge` return the same weights that `load_experts` loads."""

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

EXPERTS_PREFIX = "model.layers.0.block_sparse_moe.experts"
Projection = dict[str, torch.Tensor]


def stack_projections(tensors: dict[str, torch.Tensor], kind: str) -> dict[str, Projection]:
    """Stack the tensors of all experts for each of w1 (gate), w3 (up) and w2.

    Returns tensors (E, ...) by the name of the projection, then by the name of the tensor.
    """
    projections = {}
    for name in ("w1", "w3", "w2"):
        stacks: Projection = {}
        for stored in format_of(CHECKPOINT_FORMATS[kind].config, depth=192).stored_tensors:
            tensors_of_experts = [
                tensors.get(f"{EXPERTS_PREFIX}.{expert}.{name}.{alias}")
                for alias in (stored.name, *stored.aliases)
                for expert in range(4)
            ]
            existing = [tensor for tensor in tensors_of_experts if tensor is not None]
            if existing:
                stacks[stored.name] = torch.stack(existing)
        projections[name] = stacks
    return projections


@pytest.mark.parametrize("kind", CHECKPOINT_FORMATS)
def test_merge_of_stacks_and_single_matrices_equals_load_experts(kind: str, tmp_path: Path) -> None:
    write(tmp_path, "mixtral", kind, intermediate=192)
    loaded = mk.load_experts(tmp_path, 0)
    tensors = load_file(tmp_path / "model.safetensors")
    format = format_of(CHECKPOINT_FORMATS[kind].config, depth=192)
    projections = stack_projections(tensors, kind)
    scheme = fit_scheme(format, 192)
    assert str(scheme) == loaded.problem_fields["quant"]
    dtype = loaded.problem_fields["dtype"]
    w1 = merge(format, [projections["w1"], projections["w3"]], dtype, scheme=scheme)
    w2 = merge(format, [projections["w2"]], dtype, scheme=scheme)
    for name, matrix in (("w1", w1), ("w2", w2)):
        assert torch.equal(matrix.w.float(), getattr(loaded.weights, name).float())
        for field in ("scale", "zero_point", "global_scale"):
            got, want = getattr(matrix, field), getattr(loaded.weights, f"{name}_{field}")
            assert (got is None) == (want is None)
            assert want is None or torch.equal(got.float(), want.float())
            assert want is None or got.dtype in (torch.float32, want.dtype)
        if scheme.static:
            assert matrix.a_scale.shape == (4,)
            assert float(matrix.a_scale.max()) == float(
                getattr(loaded.weights, f"a{name[1]}_scale")
            )
    for expert in range(4):  # a single expert per call
        gate_up = [{n: t[expert] for n, t in projections[name].items()} for name in ("w1", "w3")]
        merged = merge(format, gate_up, dtype, scheme=scheme)
        assert torch.equal(merged.w.float(), w1.w[expert].float())
        assert w1.scale is None or torch.equal(merged.scale.float(), w1.scale[expert].float())


def test_merge_returns_views_if_nothing_is_rearranged(tmp_path: Path) -> None:
    for kind in ("mxfp4", "deepseek fp8", "compressed int4"):
        write(tmp_path, "mixtral", kind)
        down = stack_projections(load_file(tmp_path / "model.safetensors"), kind)["w2"]
        stored_weight = next(iter(down.values()))
        merged = merge(format_of(CHECKPOINT_FORMATS[kind].config), [down], torch.bfloat16)
        assert merged.w.data_ptr() == stored_weight.data_ptr()


def test_str_of_a_format_has_scheme_and_method() -> None:
    assert str(format_of(None)) == "none"
    names = {str(format_of(kind.config, depth=256)) for kind in CHECKPOINT_FORMATS.values()}
    assert {
        "fp8_w8a8_block (fp8)",
        "int4_w4a16_group:group=64 (gptq)",
        "mxfp4_w4a16 (mxfp4)",
        "nvfp4_w4a16 (modelopt; activations stay in 16 bits)",
        "nvfp4_w4a16 (compressed-tensors; activations stay in 16 bits)",
    } <= names
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
def test_fit_scheme_divides_tiles_to_fit_shares(
    kind: str, intermediate: int, world: int, gated: bool, scheme: str
) -> None:
    format = format_of(CHECKPOINT_FORMATS[kind].config)
    assert str(fit_scheme(format, intermediate, world=world, gated=gated)) == scheme


def make_packed_tensors(rows: int = 8, depth: int = 64, groups: int = 2) -> dict[str, Any]:
    """Return the arguments of `from_compressed_tensors` for a random int4 matrix."""
    words = torch.randint(-(2**31), 2**31, (rows, depth // 8), dtype=torch.int64)
    return {
        "weight_packed": words.to(torch.int32),
        "weight_scale": torch.rand(rows, groups),
        "weight_zero_point": torch.zeros(rows // 8, groups, dtype=torch.int32),
        "group": depth // groups,
    }


def test_from_compressed_tensors_decodes_a_known_word() -> None:
    """Value k of a word is in bits 4k to 4k + 3, with an offset of 8. Zero points are packed along
    rows, so each word has the zero points of eight rows.
    """
    arguments = make_packed_tensors()
    arguments["weight_packed"][0, 0] = 0x76543210
    arguments["weight_zero_point"][0] = 0x76543210
    imported = from_compressed_tensors(**arguments)
    assert imported.w[0, :4].tolist() == [0x10, 0x32, 0x54, 0x76]
    assert imported.zero_point.tolist() == [[0x10, 0x10], [0x32, 0x32], [0x54, 0x54], [0x76, 0x76]]
    assert imported.quant == "int4_w4a16_group:group=32,zero_points=true"
    one_group = from_compressed_tensors(**make_packed_tensors(groups=1) | {"group": -1})
    assert one_group.group == 64


INVALID_TENSORS: dict[str, tuple[dict[str, Any], type[InputError], str]] = {
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


def test_groups_of_a_whole_row_fit_any_share() -> None:
    """No divisor of a share's 50 columns is a supported group size, but a group of a whole row can
    be cut anywhere.
    """
    format = format_of(CHECKPOINT_FORMATS["awq, one group"].config, depth=100)
    assert fit_scheme(format, 100, world=2).group == (100,)


@pytest.mark.parametrize("case", INVALID_TENSORS)
def test_from_compressed_tensors_refuses_invalid_tensors(case: str) -> None:
    change, error, message = INVALID_TENSORS[case]
    with pytest.raises(error, match=message):
        from_compressed_tensors(**make_packed_tensors() | change)


def test_merge_refuses_missing_extra_and_misshapen_tensors() -> None:
    block_format = format_of(CHECKPOINT_FORMATS["deepseek fp8"].config)
    weight, scale = torch.zeros(192, 128).to(torch.float8_e4m3fn), torch.ones(2, 1)
    gate = {"weight": weight, "weight_scale_inv": scale}
    with pytest.raises(
        WeightsError, match="got no weight_scale_inv, need weight, weight_scale_inv"
    ):
        merge(block_format, [{"weight": weight}], torch.bfloat16)
    with pytest.raises(WeightsError, match="got unexpected bias"):
        merge(block_format, [gate | {"bias": scale}], torch.bfloat16)
    with pytest.raises(ShapeError, match=r"weight_scale_inv: got \(3, 1\), need \(2, 1\)"):
        merge(block_format, [gate | {"weight_scale_inv": torch.ones(3, 1)}], torch.bfloat16)
    with pytest.raises(
        ShapeError, match=r"192 rows of blocks of 128, need a multiple of the block"
    ):
        merge(block_format, [gate, gate], torch.bfloat16)
    with pytest.raises(ShapeError, match=r"weight: got \(128,\), need 2 dimensions"):
        merge(block_format, [gate | {"weight": weight[0]}], torch.bfloat16)
