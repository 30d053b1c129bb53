"""Checkpoints with combinations of features, and rules that state which `load_experts` refuses.

A row has a value for each of `AXES`. `write_row` writes the checkpoint of a row and returns the
exact weights of its last layer. `REFUSALS` has the rules for refused rows. If gate and up are
fused, they are quantized as one matrix of 2I rows.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from covering_rows import Refusal, Values, draw, one_of

from modular_kernel.errors import ConfigurationError, ShapeError
from modular_kernel.testing.cases.covering import Axis
from modular_kernel.testing.checkpoints.formats import (
    Make,
    StoredMatrix,
    awq,
    compressed_tensors,
    fp8_block,
    fp8_channel,
    fp8_tensor,
    gptq,
    int8_channel,
    mxfp4,
    mxfp4_compressed,
    nvfp4,
    plain,
    with_act_order,
)
from modular_kernel.testing.checkpoints.published_formats import CHECKPOINT_FORMATS
from modular_kernel.testing.checkpoints.samples import FAMILIES, Sample, save

EXPERTS, HIDDEN, TOP_K = 4, 128, 2
ALL_COLUMNS = -1


@dataclass(frozen=True)
class Layout:
    """How a model family names and stores experts.

    gate_up: one name if gate and up are fused, otherwise two. style: "modules" (one per expert),
    "stacked modules" or "stacked parameters". transposed: names of matrices stored as (K, N).
    interleaved: whether rows of gate and up alternate. flat: whether the expert and row dimensions
    of a stack are flattened into one.
    """

    family: str
    block: str
    gate_up: tuple[str, ...]
    down: str
    style: str = "modules"
    transposed: tuple[str, ...] = ()
    interleaved: bool = False
    flat: bool = False

    @property
    def gated(self) -> bool:
        return self.family != "nemotron_h"

    @property
    def fused(self) -> bool:
        return self.gated and len(self.gate_up) == 1

    def name_tensors(
        self, matrices_by_name: dict[str, list[StoredMatrix]]
    ) -> dict[str, torch.Tensor]:
        """Return the tensors of a layer by name, given the matrices of each expert."""
        tensors = {}
        for name, experts in matrices_by_name.items():
            for suffix in experts[0].tensors:
                values = [matrix.tensors[suffix].clone() for matrix in experts]
                if self.style == "modules":
                    tensors |= {f"{e}.{name}.{suffix}": value for e, value in enumerate(values)}
                    continue
                stack = torch.stack(values)
                if name in self.transposed and stack.dim() > 2:
                    stack = stack.transpose(1, 2).contiguous()
                stack = stack.flatten(0, 1) if self.flat and stack.dim() > 1 else stack
                tensors[self._stacked_name(name, suffix)] = stack
        return {f"{self.block}.{name}": tensor for name, tensor in tensors.items()}

    def _stacked_name(self, name: str, suffix: str) -> str:
        if self.style == "stacked modules":
            return f"{name}.{suffix}"
        return name if suffix == "weight" else f"{name}_{suffix}"


_GATE_UP, _DOWN, _STACK = ("gate_up_proj",), "down_proj", "stacked parameters"
_BOTH = (*_GATE_UP, _DOWN)
LAYOUTS = {
    layout.family: layout
    for layout in (
        Layout("qwen3_moe", "mlp.experts", ("gate_proj", "up_proj"), _DOWN),
        Layout("mixtral", "block_sparse_moe.experts", ("w1", "w3"), "w2"),
        Layout("nemotron_h", "mixer.experts", ("up_proj",), _DOWN),
        Layout("mistral4", "mlp.experts", _GATE_UP, _DOWN, _STACK),
        Layout("qwen3_vl_moe_text", "mlp.experts", _GATE_UP, _DOWN, _STACK, _BOTH),
        Layout("gpt_oss", "mlp.experts", _GATE_UP, _DOWN, _STACK, _BOTH, True),
        Layout("inkling_text", "mlp.experts", ("w13_weight",), "w2_weight", _STACK, (), True),
        Layout(
            "granitemoe", "block_sparse_moe", ("input_linear",), "output_linear", "stacked modules"
        ),
        Layout(
            "aria_text", "mlp.experts", ("fc1",), "fc2", "stacked modules", ("fc1", "fc2")
        ),
        Layout("step3p5", "moe", ("gate_proj", "up_proj"), _DOWN, "stacked modules"),
        Layout("dbrx", "ffn.experts.mlp", ("w1", "v1"), "w2", _STACK, ("w2",), flat=True),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Method:
    """A quantization method.

    format_name: key in CHECKPOINT_FORMATS of the published format with the same config. tile: the
    elements that share a scale, "groups" of columns or square "blocks" whose size is the axis
    `group`, or "" if their size is fixed. options: axes for which the config has a key. scales:
    granularity of the scales, if a refusal depends on it, otherwise "other". weight_only: whether
    activations stay unquantized. allows_input_quantization: whether `quantize_inputs` is allowed.
    """

    format_name: str
    tile: str = ""
    options: tuple[str, ...] = ()
    scales: str = "other"
    weight_only: bool = True
    allows_input_quantization: bool = False


METHODS = {
    "none": Method("bf16", scales="none"),
    "fp8 block": Method("deepseek fp8", "blocks", scales="block", weight_only=False),
    "fp8 tensor": Method("fp8 tensor, dynamic", scales="tensor", weight_only=False),
    "fp8 static": Method("fp8 tensor, static", scales="tensor", weight_only=False),
    "modelopt fp8": Method("modelopt fp8", scales="tensor", weight_only=False),
    "ct fp8 channel": Method("compressed fp8 channel", weight_only=False),
    "ct fp8 block": Method("compressed fp8 block", "blocks", scales="block", weight_only=False),
    "ct fp8 weights, tensor": Method("compressed fp8 weights, tensor", scales="tensor"),
    "ct fp8 weights, channel": Method("compressed fp8 weights, channel"),
    "ct fp8 weights, block": Method("compressed fp8 weights, block", "blocks", scales="block"),
    "ct int8": Method("compressed int8", weight_only=False),
    "ct int": Method("compressed int4", "groups", ("bits", "zero points", "act-order")),
    "ct mxfp4": Method("compressed mxfp4", scales="groups of 32"),
    "ct nvfp4": Method("compressed nvfp4", scales="nvfp4", allows_input_quantization=True),
    "modelopt nvfp4": Method("modelopt nvfp4", scales="nvfp4", allows_input_quantization=True),
    "awq": Method("awq", "groups", ("bits", "zero points")),
    "gptq": Method("gptq", "groups", ("bits", "zero points", "act-order")),
    "gptq v2": Method("gptq v2", "groups", ("bits", "zero points", "act-order")),
    "mxfp4": Method("mxfp4", scales="groups of 32"),
}

AXES = (
    Axis("method", tuple(METHODS)),
    Axis("group", (64, 32, 128, ALL_COLUMNS)),
    Axis("bits", (4, 8)),
    Axis("zero points", (False, True)),
    Axis("act-order", (False, True)),
    Axis("family", tuple(LAYOUTS)),
    Axis("bias", (False, True)),
    Axis("intermediate", (256, 192, 136)),
    Axis("ep", (1, 2, 4)),
    Axis("tp", (1, 2, 4)),
    Axis("placement", ("linear", "round_robin", "reversed")),
    Axis("files", (1, 3)),
    Axis("layers", (1, 2)),
    Axis("dtype", (None, "float32")),
    Axis("inputs", (False, True)),
    Axis("pieces", (False, True)),
)


def list_conflicts(row: Values) -> list[str]:
    """Return the reasons why no checkpoint has this combination."""
    method, reasons = METHODS[row["method"]], []
    for option, default in (("bits", 4), ("zero points", False), ("act-order", False)):
        if row[option] != default and option not in method.options:
            reasons.append(f"{row['method']} has no {option}")
    if not method.tile and row["group"] != 64:
        reasons.append(f"{row['method']} has no group or block size")
    if row["group"] == ALL_COLUMNS:
        if method.tile == "blocks":
            reasons.append("a block cannot have all columns")
        if row["act-order"]:
            reasons.append("one group has no act-order")
        if row["method"] == "ct int" and row["bits"] == 8 and row["zero points"]:
            reasons.append("int8 channels are symmetric")
    if method.scales == "groups of 32" and row["intermediate"] % 32:
        reasons.append("mxfp4 has groups of exactly 32 columns")
    if method.format_name == "mxfp4" and _is_transposed(row):
        reasons.append("blocks of mxfp4 have three dimensions")
    return reasons


def _is_transposed(row: Values) -> bool:
    layout = LAYOUTS[row["family"]]
    return bool(layout.transposed) and not layout.flat


def _has_tp_ranks(row: Values) -> bool:
    return bool(row["tp"] > 1)


def _is_quantized(row: Values) -> bool:
    return bool(row["method"] != "none")


def _lacks_transposed_form(row: Values) -> bool:
    return METHODS[row["method"]].scales not in ("none", "tensor", "block", "nvfp4")


REFUSALS = (
    Refusal(
        "act-order over TP ranks",
        ConfigurationError,
        r"tp: ranks: got \d, need 1: act-order scatters",
        (one_of("act-order", True), _has_tp_ranks),
    ),
    Refusal(
        "awq of 8 bits",
        ConfigurationError,
        "need AWQ of 4 bits",
        (one_of("method", "awq"), one_of("bits", 8)),
    ),
    Refusal(
        "a quantized flat stack",
        ConfigurationError,
        "layout of whole matrices",
        (one_of("family", "dbrx"), _is_quantized),
    ),
    Refusal(
        "a transposed stack of another format",
        ConfigurationError,
        "layout of whole matrices",
        (one_of("family", "aria_text"), _is_quantized, _lacks_transposed_form),
    ),
    # These families also have a layout that is not transposed. The error states its shapes.
    Refusal(
        "a transposed stack where another layout is known",
        ShapeError,
        r"got \(4, .*need \(4, ",
        (one_of("family", "qwen3_vl_moe_text", "gpt_oss"), _is_quantized, _lacks_transposed_form),
    ),
    Refusal(
        "quantize_inputs without a recipe that rounds inputs",
        ConfigurationError,
        "quantize_inputs",
        (one_of("inputs", True), lambda row: not METHODS[row["method"]].allows_input_quantization),
    ),
)
DRAWN = draw(AXES, REFUSALS, list_conflicts)


def choose_make(row: Values) -> Make:
    """Return the function that makes the quantized matrices of a row."""
    width, group = max(HIDDEN, row["intermediate"]), row["group"]
    symmetric, act_order = not row["zero points"], row["act-order"]
    columns = width if group == ALL_COLUMNS else group
    if row["method"] in ("gptq", "gptq v2"):
        offset = int(row["method"] == "gptq")
        make = gptq(row["bits"], columns, symmetric=symmetric, zero_point_offset=offset)
        return with_act_order(make, "g_idx", columns, "qweight") if act_order else make
    if row["method"] == "ct int":
        make = compressed_tensors(row["bits"], columns, symmetric=symmetric)
        return with_act_order(make, "weight_g_idx", columns, "weight_packed") if act_order else make
    if row["method"] == "awq":
        return awq(columns, zero_point=row["zero points"])
    block = (group, group)
    make_by_method: dict[str, Make] = {
        "none": plain(torch.bfloat16),
        "fp8 block": fp8_block(torch.float32, block=block),
        "fp8 tensor": fp8_tensor(static=False),
        "fp8 static": fp8_tensor(static=True, shape=(1,)),
        "modelopt fp8": fp8_tensor(static=True),
        "ct fp8 channel": fp8_channel(),
        "ct fp8 block": fp8_block(torch.bfloat16, "weight_scale", block),
        "ct fp8 weights, tensor": fp8_tensor(static=False, shape=(1,)),
        "ct fp8 weights, channel": fp8_channel(),
        "ct fp8 weights, block": fp8_block(torch.bfloat16, "weight_scale", block),
        "ct int8": int8_channel,
        "ct mxfp4": mxfp4_compressed,
        "mxfp4": mxfp4,
        "ct nvfp4": nvfp4(
            "weight_packed", "weight_global_scale", "input_global_scale", divides=True
        ),
        "modelopt nvfp4": nvfp4("weight", "weight_scale_2", "input_scale", divides=False),
    }  # fmt: skip
    return make_by_method[row["method"]]


def make_quantization_config(row: Values) -> dict[str, Any] | None:
    """Return the quantization_config of a row."""
    published_config = CHECKPOINT_FORMATS[METHODS[row["method"]].format_name].config
    config: dict[str, Any] = json.loads(json.dumps(published_config))
    if row["method"] in ("gptq", "gptq v2"):
        options = {"sym": not row["zero points"], "desc_act": row["act-order"]}
        return config | options | {"bits": row["bits"], "group_size": row["group"]}
    if row["method"] == "awq":
        options = {"zero_point": row["zero points"]}
        return config | options | {"bits": row["bits"], "group_size": row["group"]}
    if METHODS[row["method"]].tile == "blocks" and config["quant_method"] == "fp8":
        return config | {"weight_block_size": [row["group"]] * 2}
    if METHODS[row["method"]].tile == "blocks":
        group_config = config["config_groups"]["group_0"]
        group_config["weights"]["block_structure"] = [row["group"]] * 2
        if group_config["input_activations"]:
            group_config["input_activations"]["group_size"] = row["group"]
    if row["method"] == "ct int":
        weights = config["config_groups"]["group_0"]["weights"]
        weights |= {"num_bits": row["bits"], "symmetric": not row["zero points"]}
        weights |= {"actorder": "group" if row["act-order"] else None}
        channel = {"strategy": "channel", "group_size": None}
        weights |= channel if row["group"] == ALL_COLUMNS else {"group_size": row["group"]}
    return config


@dataclass(frozen=True)
class Written:
    """A written checkpoint. input_scales: (E, projections) float64 for w1 and w2, or None."""

    sample: Sample
    input_scales: tuple[torch.Tensor, torch.Tensor] | None


def write_row(folder: Path, row: Values) -> Written:
    """Write the checkpoint of a row; return the exact weights of its last layer."""
    layout, family = LAYOUTS[row["family"]], FAMILIES[row["family"]]
    tensors: dict[str, torch.Tensor] = {}
    g = torch.Generator().manual_seed(3)
    for layer in range(row["layers"]):
        matrices_by_name = _make_matrices(row, g)
        layer_tensors = layout.name_tensors(matrices_by_name)
        tensors |= {f"{family.layer_prefix}{layer}.{name}": t for name, t in layer_tensors.items()}
    sizes = EXPERTS, TOP_K, row["intermediate"], HIDDEN
    config = family.config(row["family"], sizes) | {"torch_dtype": "bfloat16"}
    if row["method"] != "none":
        config["quantization_config"] = make_quantization_config(row)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save(folder, tensors, row["files"])
    w1 = torch.stack(
        [
            _put_gate_first(layout, *projections)
            for projections in _values_by_expert(matrices_by_name, layout.gate_up)
        ]
    )
    w2 = torch.stack([matrix.values for matrix in matrices_by_name[layout.down]])
    b1 = b2 = None
    if row["bias"]:
        biases_by_expert = zip(
            *(_biases_of(matrices_by_name, name) for name in layout.gate_up), strict=True
        )
        b1 = torch.stack([_put_gate_first(layout, *biases) for biases in biases_by_expert])
        b2 = torch.stack(_biases_of(matrices_by_name, layout.down))
    scaling = next((value for key, value in family.extra_config.items() if "scal" in key), 1.0)
    format_ = CHECKPOINT_FORMATS[METHODS[row["method"]].format_name]
    sample = Sample(folder, config, format_, family, w1, w2, b1, b2, TOP_K, scaling)
    return Written(sample, _stack_input_scales(matrices_by_name, layout))


# Name of a tensor with the scale of inputs -> whether the tensor holds the reciprocal.
_INPUT_SCALES = {"input_scale": False, "input_global_scale": True}


def _make_matrices(row: Values, g: torch.Generator) -> dict[str, list[StoredMatrix]]:
    """Make the matrices of each expert, with biases and input scales that all differ."""
    layout, make = LAYOUTS[row["family"]], choose_make(row)
    rows = row["intermediate"] * (2 if layout.fused else 1)
    sizes = {name: (rows, HIDDEN, 1.0 + 0.7 * i) for i, name in enumerate(layout.gate_up)}
    sizes[layout.down] = (HIDDEN, row["intermediate"], 1.0)
    matrices_by_name = {}
    for name, (n, k, gain) in sizes.items():
        matrices_by_name[name] = [make(n, k, g, gain) for _ in range(EXPERTS)]
        for e, matrix in enumerate(matrices_by_name[name]):
            if row["bias"]:
                matrix.tensors["bias"] = torch.randn(n, generator=g).bfloat16()
            for scale, divides in _INPUT_SCALES.items():
                if scale in matrix.tensors:
                    factor = 1 + (7 * e + 3 * len(matrices_by_name)) % 5 / 8
                    # relu2 squares the input of w2, which therefore needs a larger scale.
                    factor *= 8 if name == layout.down and not layout.gated else 1
                    matrix.tensors[scale] = matrix.tensors[scale] * (
                        1 / factor if divides else factor
                    )
    return matrices_by_name


def _values_by_expert(
    matrices_by_name: dict[str, list[StoredMatrix]], names: tuple[str, ...]
) -> list[list[torch.Tensor]]:
    return [[matrices_by_name[name][e].values for name in names] for e in range(EXPERTS)]


def _biases_of(matrices_by_name: dict[str, list[StoredMatrix]], name: str) -> list[torch.Tensor]:
    return [matrix.tensors["bias"].double() for matrix in matrices_by_name[name]]


def _put_gate_first(layout: Layout, *projections: torch.Tensor) -> torch.Tensor:
    rows = torch.cat(projections)
    return torch.cat([rows[0::2], rows[1::2]]) if layout.interleaved else rows


def _stack_input_scales(
    matrices_by_name: dict[str, list[StoredMatrix]], layout: Layout
) -> tuple[torch.Tensor, torch.Tensor] | None:
    by_projection = []
    for names in (layout.gate_up, (layout.down,)):
        scales = [
            [matrix.tensors[scale_name].double().reshape(()) ** (-1 if divides else 1)
             for name in names for matrix in (matrices_by_name[name][e],)
             for scale_name, divides in _INPUT_SCALES.items() if scale_name in matrix.tensors]
            for e in range(EXPERTS)
        ]  # fmt: skip
        if not scales[0]:
            return None
        by_projection.append(torch.stack([torch.stack(row) for row in scales]))
    return by_projection[0], by_projection[1]
