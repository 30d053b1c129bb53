"""Fuzz targets: load valid and damaged checkpoints (safetensors, index, config.json).

An unchanged checkpoint must be loaded with the weights that were written. For a damaged one, a
typed error of this package is also allowed.
"""

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import save

from modular_kernel.quant.quantized_weights import (
    check_weights_quantized,
    dequantize_weights,
    quantize_weights,
)
from modular_kernel.spec.placement import Placement
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights
from modular_kernel.testing.stress.fuzz.files import changed_json, damaged_text
from modular_kernel.testing.stress.fuzz.outcome import (
    CORRECT,
    INVALID_ACCEPTED,
    WRONG_RESULT,
    FuzzOutcome,
    run_or_classify,
)
from modular_kernel.testing.stress.fuzz.target import (
    Target,
    biased_bool,
    import_object,
    seeds,
)

Tensors = dict[str, torch.Tensor]
_EXPERTS_PREFIX = "model.layers.1.block_sparse_moe.experts"
_INDEX = "model.safetensors.index.json"
_INVALID_TENSORS = (
    torch.zeros(0),
    torch.zeros(3),
    torch.tensor(float("nan")),
    torch.zeros(2, 2).bool(),
)
# Descriptions of changes after which loading must fail.
_MUST_FAIL = (", tensor changed: no ", ", tensor changed: one more ")
_CAST_DTYPES = (torch.float32, torch.float64, torch.int32, torch.uint8, torch.float8_e4m3fn)


def _store_blocks(w: torch.Tensor, scale: torch.Tensor) -> Tensors:
    return {"weight": w, "weight_scale_inv": scale}


def _store_scaled(w: torch.Tensor, scale: torch.Tensor) -> Tensors:
    return {"weight": w, "weight_scale": scale}


def _store_packed(w: torch.Tensor, scale: torch.Tensor) -> Tensors:
    return {"weight_packed": w.contiguous().view(torch.int32), "weight_scale": scale}


def _make_compressed_config(packing: str, weights: dict[str, Any], inputs: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    config = {"quant_method": "compressed-tensors", "format": packing}
    return config | {"config_groups": {"group_0": group}}


_INT_WEIGHTS = {"type": "int", "symmetric": True}
_TOKEN_INPUTS = {
    "num_bits": 8,
    "type": "int",
    "strategy": "token",
    "dynamic": True,
    "symmetric": True,
}
_FORMATS: tuple[tuple[str, dict[str, Any] | None, Callable[..., Tensors]], ...] = (
    ("none", None, lambda w, _: {"weight": w}),
    (
        "fp8_w8a8_block:block=32x32",
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
        _store_blocks,
    ),
    (
        "int8_w8a8_channel",
        _make_compressed_config(
            "int-quantized", _INT_WEIGHTS | {"num_bits": 8, "strategy": "channel"}, _TOKEN_INPUTS
        ),
        _store_scaled,
    ),
    (
        "int4_w4a16_group:group=32",
        _make_compressed_config(
            "pack-quantized",
            _INT_WEIGHTS | {"num_bits": 4, "strategy": "group", "group_size": 32},
            None,
        ),
        _store_packed,
    ),
)


@dataclass(frozen=True)
class CheckpointCase:
    """A checkpoint, and the rank whose weights are loaded from it.

    Attributes:
        format: index in _FORMATS.
        experts, intermediate: sizes of the layer.
        seed: seed of the weights.
        ep, tp: (rank, world size) of expert and tensor parallelism, which determine the loaded
            slice.
        change: what is changed; "" for nothing.
        data: draws the details of the change, which depend on the contents of the files.
    """

    format: int
    experts: int
    intermediate: int
    seed: int
    ep: tuple[int, int]
    tp: tuple[int, int]
    change: str
    data: st.DataObject


@st.composite
def _checkpoints(draw: st.DrawFn) -> CheckpointCase:
    experts, intermediate = draw(st.sampled_from((2, 3, 4))), draw(st.sampled_from((64, 128)))
    ep_size = draw(st.sampled_from([n for n in (1, 2, 3) if n <= experts]))
    tp_size = draw(st.sampled_from([n for n in (1, 2) if intermediate // n % 32 == 0]))
    return CheckpointCase(
        format=draw(st.integers(0, len(_FORMATS) - 1)),
        experts=experts,
        intermediate=intermediate,
        seed=draw(seeds),
        ep=(draw(st.integers(0, ep_size - 1)), ep_size),
        tp=(draw(st.integers(0, tp_size - 1)), tp_size),
        change=draw(st.sampled_from(("", "", "tensor", "bytes", "header", "index", "config"))),
        data=draw(st.data()),
    )


def check_checkpoint(case: CheckpointCase) -> FuzzOutcome:
    """Load a checkpoint, unchanged or with one change.

    The weights must be loaded correctly. If there is a change, a typed error is also allowed.
    """
    quant, quantization, to_tensors = _FORMATS[case.format]
    problem = Problem(1, 64, case.intermediate, case.experts, 2, dtype=torch.float32, quant=quant)
    weights = _make_weights(problem, case.seed)
    tensors, config = (
        _name_tensors(weights, problem, to_tensors),
        _make_config(problem, quantization),
    )
    description = f"a checkpoint of {problem} on {case.ep} x {case.tp}"
    with tempfile.TemporaryDirectory() as folder:
        change_description = _write_files(case, Path(folder), tensors, config)
        result = run_or_classify(
            f"{description}{change_description}",
            lambda: import_object("modular_kernel.checkpoints.loading:load_experts")(
                folder, 1, ep=case.ep, tp=case.tp
            ),
        )
        if isinstance(result, FuzzOutcome):
            return (
                result
                if change_description
                else FuzzOutcome(WRONG_RESULT, f"{description}: refused")
            )
        if change_description.startswith(_MUST_FAIL):
            return FuzzOutcome(INVALID_ACCEPTED, f"{description}{change_description}")
        mismatch = run_or_classify(
            description,
            lambda: _find_weights_mismatch(
                result, None if change_description else weights, problem
            ),
        )
    if isinstance(mismatch, FuzzOutcome):
        mismatch_description = f"the loaded weights are inconsistent: {mismatch.description}"
        return FuzzOutcome(
            WRONG_RESULT, f"{description}{change_description}: {mismatch_description}"
        )
    if mismatch:
        return FuzzOutcome(WRONG_RESULT, f"{description}{change_description}: {mismatch}")
    return FuzzOutcome(CORRECT, description)


def _make_weights(problem: Problem, seed: int) -> ExpertWeights:
    generator = torch.Generator().manual_seed(seed)
    e, hidden, intermediate = problem.experts, problem.hidden, problem.intermediate
    w1, w2 = (
        torch.randn(e, *shape, generator=generator)
        for shape in ((2 * intermediate, hidden), (hidden, intermediate))
    )
    unquantized = ExpertWeights(w1, w2)
    return quantize_weights(unquantized, problem) if problem.scheme.quantized else unquantized


def _name_tensors(
    weights: ExpertWeights, problem: Problem, to_tensors: Callable[..., Tensors]
) -> Tensors:
    """Return tensors by their names in a Mixtral checkpoint: gate is w1, up is w3, down is w2."""
    tensors: Tensors = {}
    no_scales = [None] * problem.experts
    for e in range(problem.experts):
        w1_halves = weights.w1[e].chunk(2)
        w1_scale = (weights.w1_scale if weights.w1_scale is not None else no_scales)[e]
        scale_halves = (None, None) if w1_scale is None else w1_scale.chunk(2)
        w2_scale = (weights.w2_scale if weights.w2_scale is not None else no_scales)[e]
        parts = {"w1": (w1_halves[0], scale_halves[0]), "w3": (w1_halves[1], scale_halves[1])}
        for name, (w, scale) in (parts | {"w2": (weights.w2[e], w2_scale)}).items():
            for kind, tensor in to_tensors(w, scale).items():
                tensors[f"{_EXPERTS_PREFIX}.{e}.{name}.{kind}"] = tensor.contiguous()
    return tensors


def _make_config(problem: Problem, quantization: dict[str, Any] | None) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model_type": "mixtral",
        "hidden_size": problem.hidden,
        "intermediate_size": problem.intermediate,
        "num_local_experts": problem.experts,
        "num_experts_per_tok": 2,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    return config if quantization is None else config | {"quantization_config": quantization}


def _write_files(case: CheckpointCase, folder: Path, tensors: Tensors, config: Any) -> str:
    """Write the files; return a description of the change, or ""."""
    kind, draw = case.change, case.data.draw
    description = f", {kind} changed" if kind else ""
    json_text = json.dumps(config)
    if kind == "config":
        json_text = draw(_changed_text(config))
    (folder / "config.json").write_bytes(json_text.encode("utf-8", "surrogatepass"))
    if kind == "tensor":
        description += draw(_changed_tensors(tensors))
    content = save(tensors)
    if kind == "bytes":
        content, detail = draw(_changed_bytes(content))
        description += detail
    elif kind == "header":
        content = draw(_changed_header(content))
    (folder / "model.safetensors").write_bytes(content)
    if kind == "index" or (not kind and draw(biased_bool(percent_true=30))):
        index: Any = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
        json_text = draw(_changed_text(index)) if kind else json.dumps(index)
        (folder / _INDEX).write_bytes(json_text.encode("utf-8", "surrogatepass"))
    return description


@st.composite
def _changed_text(draw: st.DrawFn, value: Any) -> str:
    json_text = json.dumps(draw(changed_json(value)))
    return draw(damaged_text(json_text)) if draw(biased_bool(percent_true=20)) else json_text


@st.composite
def _changed_tensors(draw: st.DrawFn, tensors: Tensors) -> str:
    """Change `tensors` in place; return a description of the change."""
    name, kind = draw(st.sampled_from(sorted(tensors))), draw(st.integers(0, 4))
    if kind == 0:
        del tensors[name]
        return f": no {name}"
    if kind == 1:
        new_name = name.replace("experts.0", "experts.9") + draw(
            st.sampled_from(("", "x", "_scale"))
        )
        tensors[new_name if new_name not in tensors else f"{name}.x"] = torch.zeros(2)
        return f": one more beside {name}"
    if kind == 2:
        tensors[name] = draw(st.sampled_from(_INVALID_TENSORS)).clone()
        return f": {name} {tuple(tensors[name].shape)}"
    if kind == 3:
        dtype = draw(st.sampled_from(_CAST_DTYPES))
        tensors[name] = tensors[name].float().to(dtype)
        return f": {name} {dtype}"
    flat = tensors[name].flatten()
    tensors[name] = flat[: draw(st.integers(0, flat.numel() - 1))].clone()
    return f": {name} cut"


@st.composite
def _changed_bytes(draw: st.DrawFn, content: bytes) -> tuple[bytes, str]:
    """Draw the contents truncated, extended, or with changed bytes in the length or header."""
    kind = draw(st.integers(0, 3))
    header_end = int.from_bytes(content[:8], "little") + 8
    if kind == 0:
        positions = st.one_of(
            st.sampled_from((0, 1, 8, header_end)), st.integers(0, len(content) - 1)
        )
        position = draw(positions)
        return content[:position], f": cut at {position}"
    if kind == 1:
        return content + bytes(draw(st.integers(1, 63))), ": longer"
    if kind == 2:
        size = draw(st.sampled_from((0, 1, header_end, 2**31, 2**62, 2**64 - 1)))
        return size.to_bytes(8, "little") + content[8:], f": a header of {size}"
    position = draw(st.integers(0, header_end - 1))
    byte = bytes([draw(st.integers(0, 255))])
    return content[:position] + byte + content[position + 1 :], f": byte {position} is {byte!r}"


@st.composite
def _changed_header(draw: st.DrawFn, content: bytes) -> bytes:
    size = int.from_bytes(content[:8], "little")
    json_text = draw(_changed_text(json.loads(content[8 : 8 + size])))
    header = json_text.encode("utf-8", "surrogatepass")
    return len(header).to_bytes(8, "little") + header + content[8 + size :]


def _find_weights_mismatch(loaded: Any, expected: ExpertWeights | None, problem: Problem) -> str:
    """Describe how the loaded weights differ from the expected weights; "" if they do not.

    expected: all weights; None for a changed checkpoint, whose values are not compared.
    """
    partial_problem, weights = loaded.partial(1)
    if partial_problem.scheme.quantized:
        check_weights_quantized(weights, partial_problem, weights.w1.device)
    if weights.w1.shape != (
        partial_problem.e,
        partial_problem.w1_rows,
        partial_problem.hidden // (2 if partial_problem.scheme.packed else 1),
    ):
        return f"w1 {tuple(weights.w1.shape)}"
    if expected is None:
        return ""
    slots = list(Placement.linear(problem.experts, loaded.ep[1]).slots[loaded.ep[0]])
    intermediate, rank = partial_problem.intermediate, loaded.tp[0]
    columns = slice(rank * intermediate, (rank + 1) * intermediate)
    w1, w2 = _dequantize(expected, problem)
    gate, up = w1[slots].chunk(2, 1)
    values = _dequantize(weights, partial_problem)
    if not torch.equal(values[0], torch.cat([gate[:, columns], up[:, columns]], 1)):
        return "w1 has other values"
    return "" if torch.equal(values[1], w2[slots][..., columns]) else "w2 has other values"


def _dequantize(weights: ExpertWeights, problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    if not problem.scheme.quantized:
        return weights.w1, weights.w2
    return dequantize_weights(weights, "w1", problem), dequantize_weights(weights, "w2", problem)


_DEVICES: tuple[Any, ...] = (
    "cpu", "cuda", "cuda:0", "cuda:9", "cuda:-1", "meta", "mps", "xpu", "hpu", "vulkan",
    "privateuseone", "",
    " cpu", "CPU", "cpu:1", "gpu", "\x1b[2J", torch.device("meta"), torch.device("cpu"),
    torch.device("cuda", 3), None, 0, 3, -1, 1.5, b"cpu", [], torch.float32, True,
)  # fmt: skip


def check_load_device(device: Any) -> FuzzOutcome:
    """Load a checkpoint to a device. This must return the weights or raise a typed error."""
    problem = Problem(1, 64, 64, 2, 2, dtype=torch.float32)
    weights = _make_weights(problem, 0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "config.json").write_text(json.dumps(_make_config(problem, None)))
        (path / "model.safetensors").write_bytes(
            save(_name_tensors(weights, problem, _FORMATS[0][2]))
        )
        description = f"load_experts to {device!r}"
        result = run_or_classify(
            description,
            lambda: import_object("modular_kernel.checkpoints.loading:load_experts")(
                folder, 1, device=device
            ),
        )
        if isinstance(result, FuzzOutcome):
            return result
        loaded = result.partial(1)[1]
        is_correct = loaded.w1.device.type == "cpu" and torch.equal(loaded.w1, weights.w1)
    return FuzzOutcome(CORRECT if is_correct else WRONG_RESULT, description)


TARGETS: tuple[Target[Any], ...] = (
    Target("checkpoints", 2, _checkpoints(), check_checkpoint),
    Target("load_devices", 0.3, st.sampled_from(_DEVICES), check_load_device),
)
