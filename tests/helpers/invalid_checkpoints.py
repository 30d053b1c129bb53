"""Functions that write invalid checkpoints, with the errors that loading the checkpoints raises."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from modular_kernel.errors import (
    ConfigurationError,
    DtypeError,
    InputError,
    ShapeError,
    WeightsError,
)
from modular_kernel.testing.checkpoints.samples import Tensors, write

EXPERTS = "model.layers.0.block_sparse_moe.experts"
FILE = "model.safetensors"


def write_changed(
    change: Callable[[Tensors], None], format_name: str = "bf16", family: str = "mixtral"
) -> Any:
    return lambda folder: write(folder, family, format_name, change=change)


def drop_tensors(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: [tensors.pop(n) for n in list(tensors) if n.endswith(name)] and None


def set_tensor(name: str, tensor: torch.Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({f"{EXPERTS}.{name}": tensor})


def cast_tensors(suffix: str, dtype: torch.dtype) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.endswith(suffix)]:
            tensors[name] = tensors[name].to(dtype)

    return change


def fill_first_value(name: str, value: float) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[f"{EXPERTS}.{name}"].flatten()[0] = value

    return change


def move_column(name: str) -> Callable[[Tensors], None]:
    """Move the first column from one of the two groups to the other."""

    def change(tensors: Tensors) -> None:
        groups = tensors[f"{EXPERTS}.{name}"]
        groups[0] = 1 - groups[0]

    return change


def reverse_order(name: str) -> Callable[[Tensors], None]:
    """Reverse the order of columns; group sizes do not change."""

    def change(tensors: Tensors) -> None:
        tensors[f"{EXPERTS}.{name}"] = tensors[f"{EXPERTS}.{name}"].flip(0)

    return change


def change_config(**changes: Any) -> Callable[[Path], None]:
    def write_checkpoint(folder: Path) -> None:
        contents = write(folder).config | changes
        (folder / "config.json").write_text(json.dumps(contents))

    return write_checkpoint


def rewrite_file(rewrite: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def write_checkpoint(folder: Path) -> None:
        write(folder)
        path = folder / FILE
        path.write_bytes(rewrite(path.read_bytes()))

    return write_checkpoint


def change_header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Rewrite the JSON header and keep the data. `change` returns new entries or edits them."""

    def rewrite(content: bytes) -> bytes:
        size = int.from_bytes(content[:8], "little")
        entries = json.loads(content[8 : 8 + size])
        header = json.dumps(change(entries) or entries).encode()
        return len(header).to_bytes(8, "little") + header + content[8 + size :]

    return rewrite_file(rewrite)


def change_index(change: Callable[[dict[str, str]], Any]) -> Callable[[Path], None]:
    def write_checkpoint(folder: Path) -> None:
        write(folder, shards=3)
        path = folder / "model.safetensors.index.json"
        content = json.loads(path.read_text())
        result = change(content["weight_map"])
        path.write_text(result if isinstance(result, str) else json.dumps(content))

    return write_checkpoint


def set_shape(name: str, shape: list[int]) -> Callable[[dict[str, Any]], None]:
    return lambda entries: entries[f"{EXPERTS}.{name}"].update(shape=shape)


FP8_FORMAT = "deepseek fp8"
W1 = f"{EXPERTS}.1.w1.weight"
InvalidCheckpoint = tuple[Callable[[Path], Any], type[InputError], str]
INVALID_CHECKPOINTS: dict[str, InvalidCheckpoint] = {
    # Missing or additional tensors
    "a missing tensor": (
        write_changed(drop_tensors("1.w1.weight")),
        WeightsError,
        rf"got no {W1}, need 4 unquantized experts",
    ),
    "missing w2 of all experts": (
        write_changed(drop_tensors("w2.weight")),
        WeightsError,
        rf"no {EXPERTS}.0.w2.weight and 3 more",
    ),
    "a missing scale": (
        write_changed(drop_tensors("2.w3.weight_scale_inv"), FP8_FORMAT),
        WeightsError,
        "no .*2.w3.weight_scale_inv",
    ),
    "one expert too many": (
        write_changed(set_tensor("4.w1.weight", torch.zeros(256, 128))),
        WeightsError,
        rf"got {FILE}: {EXPERTS}.4.w1.weight, need 4 unquantized experts, and nothing else",
    ),
    "a scale of unquantized weights": (
        write_changed(set_tensor("0.w1.weight_scale", torch.zeros(1))),
        WeightsError,
        r"0.w1.weight_scale, need",
    ),
    "two tensors for one scale": (
        write_changed(set_tensor("0.w1.weight_scale", torch.zeros(2, 1)), FP8_FORMAT),
        WeightsError,
        "0.w1.weight_scale, need",
    ),
    "a bias in a family without biases": (
        write_changed(set_tensor("0.w1.bias", torch.zeros(256))),
        WeightsError,
        r"0.w1.bias, need",
    ),
    # Shapes and dtypes
    "a wrong shape": (
        write_changed(set_tensor("1.w1.weight", torch.zeros(255, 128))),
        ShapeError,
        rf"^model.safetensors: {W1}: got \(255, 128\), need \(256, 128\)",
    ),
    "a wrong hidden size in config.json": (
        change_config(hidden_size=64),
        ShapeError,
        r"w1.weight: got \(256, 128\), need \(256, 64\)",
    ),
    "too many experts in config.json": (
        change_config(num_local_experts=8),
        WeightsError,
        "no .*experts.4.w1.weight and 11 more",
    ),
    "a million experts in config.json": (
        change_config(num_local_experts=1 << 20),
        WeightsError,
        "experts.4.w1.weight and 10000 more",
    ),
    "too few experts in config.json": (
        change_config(num_local_experts=2),
        WeightsError,
        "experts.2.w1.weight and 5 more",
    ),
    "weights of another dtype": (
        write_changed(cast_tensors("w1.weight", torch.float64)),
        DtypeError,
        "got float64, need bfloat16 or float16 or float32",
    ),
    "unquantized weights in an fp8 checkpoint": (
        write_changed(cast_tensors("0.w2.weight", torch.bfloat16), FP8_FORMAT),
        DtypeError,
        "0.w2.weight: got bfloat16, need float8_e4m3fn",
    ),
    "integer scales": (
        write_changed(cast_tensors("weight_scale_inv", torch.int32), FP8_FORMAT),
        DtypeError,
        "w1.weight_scale_inv: got int32, need float32",
    ),
    "scales of another block size": (
        write_changed(set_tensor("0.w1.weight_scale_inv", torch.ones(4, 1)), FP8_FORMAT),
        ShapeError,
        r"got \(4, 1\), need \(2, 1\)",
    ),
    "packed weights in int64": (
        write_changed(cast_tensors("qweight", torch.int64), "awq"),
        DtypeError,
        "0.w1.qweight: got int64, need int32",
    ),
    # Invalid values
    "a scale of NaN": (
        write_changed(fill_first_value("3.w1.weight_scale_inv", float("nan")), FP8_FORMAT),
        WeightsError,
        rf"{EXPERTS}.3.w1: scale: got nan",
    ),
    "a group scale of infinity": (
        write_changed(fill_first_value("3.w1.scales", float("inf")), "awq"),
        WeightsError,
        rf"{EXPERTS}.3.w1: scale: got inf, need finite",
    ),
    "an E8M0 scale of NaN": (
        write_changed(fill_first_value("3.w2.weight_scale", 255), "compressed mxfp4"),
        WeightsError,
        rf"{EXPERTS}.3.w2: scale: got 255.0, need E8M0 below 255",
    ),
    "a channel scale of 0": (
        write_changed(fill_first_value("3.w2.weight_scale", 0.0), "compressed fp8 channel"),
        WeightsError,
        rf"{EXPERTS}.3.w2: scale: got 0.0",
    ),
    "a static scale below 0": (
        write_changed(fill_first_value("3.w2.input_scale", -1.0), "modelopt fp8"),
        WeightsError,
        rf"^model.safetensors: {EXPERTS}.3.w2.input_scale: got -1.0, need finite numbers above 0",
    ),
    "an infinite reciprocal of a matrix scale": (
        write_changed(
            fill_first_value("3.w2.weight_global_scale", float("inf")), "compressed nvfp4"
        ),
        WeightsError,
        rf"{EXPERTS}.3.w2: scale: got inf, need a finite matrix scale >= 0",
    ),
    "a matrix scale of NaN": (
        write_changed(fill_first_value("1.w3.weight_scale", float("nan")), "modelopt nvfp4"),
        WeightsError,
        rf"{EXPERTS}.1.w1: scale: got nan, need numbers",
    ),
    "columns out of order": (
        write_changed(fill_first_value("1.w3.g_idx", 1.0), "gptq"),
        WeightsError,
        rf"{EXPERTS}.1.w1: g_idx: got columns out of order .act-order",
    ),
    # config.json
    "no config.json": (
        lambda folder: (write(folder), (folder / "config.json").unlink()),
        ConfigurationError,
        "No such file",
    ),
    "act-order groups of different sizes": (
        write_changed(move_column("1.w3.g_idx"), "gptq, act-order"),
        WeightsError,
        rf"{EXPERTS}.1.w1: g_idx: got groups of different sizes, need 64 columns",
    ),
    "gate and up in different column orders": (
        write_changed(reverse_order("2.w3.g_idx"), "gptq, act-order"),
        WeightsError,
        rf"{EXPERTS}.2.w1: g_idx: got different column orders of gate and up",
    ),
    "an unknown format": (
        change_config(quantization_config={"quant_method": "bitnet"}),
        ConfigurationError,
        "quant_method = 'bitnet', ternary weights",
    ),
    "modelopt nvfp4 in groups of 32": (
        change_config(
            quantization_config={
                "quant_method": "modelopt",
                "quant_algo": "NVFP4",
                "group_size": 32,
            }
        ),
        ConfigurationError,
        "group_size = 32, need one of 16",
    ),
    "AWQ in the gemv layout": (
        change_config(
            quantization_config={
                "quant_method": "awq",
                "bits": 4,
                "group_size": 64,
                "zero_point": True,
                "version": "gemv",
            }
        ),
        ConfigurationError,
        "version = 'gemv', need one of gemm",
    ),
    "AWQ of 8 bits": (
        change_config(
            quantization_config={
                "quant_method": "awq",
                "bits": 8,
                "group_size": 64,
                "zero_point": True,
            }
        ),
        ConfigurationError,
        "need AWQ of 4 bits",
    ),
    "an unsupported model family": (
        change_config(model_type="jamba", num_experts=4),
        ConfigurationError,
        "no experts, need experts in ...layers.L.feed_forward.experts",
    ),
    # Files
    "an empty folder": (
        lambda folder: None,
        ConfigurationError,
        r"no safetensors, need .*safetensors or \*\.gguf in it",
    ),
    "an empty file": (
        rewrite_file(lambda c: b""),
        WeightsError,
        "model.safetensors: got .*header too small",
    ),
    "a truncated header": (
        rewrite_file(lambda c: c[:100]),
        WeightsError,
        "model.safetensors: got .*nvalid header length",
    ),
    "truncated data": (
        rewrite_file(lambda c: c[:-1]),
        WeightsError,
        "model.safetensors: got .*not fully covered",
    ),
    "additional data": (
        rewrite_file(lambda c: c + b"x"),
        WeightsError,
        "model.safetensors: got .*not fully covered",
    ),
    "a header longer than the file": (
        rewrite_file(lambda c: b"\xff" * 8 + c[8:]),
        WeightsError,
        "model.safetensors: got .*header too large",
    ),
    "a header that is no JSON": (
        rewrite_file(lambda c: c[:9] + b"\xff" + c[10:]),
        WeightsError,
        "model.safetensors: got .*header",
    ),
    "a shape of another size than the data": (
        change_header(set_shape("0.w1.weight", [128, 128])),
        WeightsError,
        "model.safetensors: got .*nvalid shape",
    ),
    "a shape that overflows": (
        change_header(set_shape("0.w1.weight", [2**62, 8])),
        WeightsError,
        "model.safetensors: got",
    ),
    "data of another tensor": (
        change_header(
            lambda e: e[W1].update(data_offsets=e[f"{EXPERTS}.0.w1.weight"]["data_offsets"])
        ),
        WeightsError,
        "model.safetensors: got",
    ),
    "an unknown dtype": (
        change_header(lambda e: e[W1].update(dtype="F12")),
        WeightsError,
        "model.safetensors: got",
    ),
    # Indices
    "an index that is no JSON": (
        change_index(lambda m: "{"),
        WeightsError,
        "index.json: got no JSON",
    ),
    "an index with a duplicate key": (
        change_index(lambda m: '{"weight_map": {}, "weight_map": {}}'),
        WeightsError,
        "a duplicate key",
    ),
    "an index of lists": (change_index(lambda m: "[[]]"), WeightsError, "got no weight_map"),
    "an index with a path outside of the folder": (
        change_index(lambda m: m.update({W1: "../x.safetensors"})),
        WeightsError,
        "w1.weight in '../x.safetensors', need a file in the folder",
    ),
    "an index with a missing file": (
        change_index(lambda m: m.update({W1: "x.safetensors"})),
        WeightsError,
        "got no x.safetensors, of 4 files that the index lists",
    ),
    "an index with the wrong file": (
        change_index(lambda m: m.update({W1: next(f for f in sorted(m.values()) if f != m[W1])})),
        WeightsError,
        rf"got no {W1}, need the tensors that the index lists",
    ),
    "an index without a tensor": (
        change_index(lambda m: m.pop(W1) and None),
        WeightsError,
        rf"got no {W1}",
    ),
}
