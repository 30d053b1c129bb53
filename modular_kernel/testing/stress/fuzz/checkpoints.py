"""Third-party checkpoints: safetensors, an index and a config.json, valid or damaged."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save

from modular_kernel.quant.quantized_weights import (
    check_weights_quantized,
    dequantized_weights,
    quantize_weights,
)
from modular_kernel.spec.placement import Placement
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights
from modular_kernel.testing.stress.fuzz.entry_functions import import_name
from modular_kernel.testing.stress.fuzz.files import changed, damage_text
from modular_kernel.testing.stress.fuzz.outcome import (
    ACCEPTED,
    RIGHT,
    WRONG,
    FuzzOutcome,
    run_or_outcome,
)
from modular_kernel.testing.stress.fuzz.random_problems import generator_of

Tensors = dict[str, torch.Tensor]
_AT = "model.layers.1.block_sparse_moe.experts"
_INDEX = "model.safetensors.index.json"
_JUNK = (torch.zeros(0), torch.zeros(3), torch.tensor(float("nan")), torch.zeros(2, 2).bool())
# Changes after which loading must fail.
_NEVER = (", tensor changed: no ", ", tensor changed: one more ")
_CASTS = (torch.float32, torch.float64, torch.int32, torch.uint8, torch.float8_e4m3fn)


def _blocks(w: torch.Tensor, scale: torch.Tensor) -> Tensors:
    return {"weight": w, "weight_scale_inv": scale}


def _scaled(w: torch.Tensor, scale: torch.Tensor) -> Tensors:
    return {"weight": w, "weight_scale": scale}


def _packed(w: torch.Tensor, scale: torch.Tensor) -> Tensors:
    return {"weight_packed": w.contiguous().view(torch.int32), "weight_scale": scale}


def _compressed(packing: str, weights: dict[str, Any], inputs: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    config = {"quant_method": "compressed-tensors", "format": packing}
    return config | {"config_groups": {"group_0": group}}


_INT = {"type": "int", "symmetric": True}
_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
_FORMATS: tuple[tuple[str, dict[str, Any] | None, Callable[..., Tensors]], ...] = (
    ("none", None, lambda w, _: {"weight": w}),
    (
        "fp8_w8a8_block:block=32x32",
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
        _blocks,
    ),
    (
        "int8_w8a8_channel",
        _compressed("int-quantized", _INT | {"num_bits": 8, "strategy": "channel"}, _TOKEN),
        _scaled,
    ),
    (
        "int4_w4a16_group:group=32",
        _compressed(
            "pack-quantized", _INT | {"num_bits": 4, "strategy": "group", "group_size": 32}, None
        ),
        _packed,
    ),
)


def checkpoints(rng: Random) -> FuzzOutcome:
    """Load a checkpoint, unchanged or with one change: correct weights, or a typed error."""
    quant, quantization, stored = rng.choice(_FORMATS)
    experts, width = rng.choice((2, 3, 4)), rng.choice((64, 128))
    problem = Problem(1, 64, width, experts, 2, dtype=torch.float32, quant=quant)
    weights = _weights(problem, rng)
    tensors, config = _tensors(weights, problem, stored), _config(problem, quantization)
    ep, tp = _draw_grid(rng, experts, width)
    what = f"a checkpoint of {problem} on {ep} x {tp}"
    with tempfile.TemporaryDirectory() as folder:
        change_text = _write_files(rng, Path(folder), tensors, config)
        result = run_or_outcome(
            f"{what}{change_text}",
            lambda: import_name("modular_kernel.checkpoints.loading:load_experts")(
                folder, 1, ep=ep, tp=tp
            ),
        )
        if isinstance(result, FuzzOutcome):
            return result if change_text else FuzzOutcome(WRONG, f"{what}: refused")
        if change_text.startswith(_NEVER):
            return FuzzOutcome(ACCEPTED, f"{what}{change_text}")
        fault = run_or_outcome(
            what, lambda: _fault(result, None if change_text else weights, problem)
        )
    if isinstance(fault, FuzzOutcome):
        return FuzzOutcome(
            WRONG, f"{what}{change_text}: the loaded weights are inconsistent: {fault.what}"
        )
    return (
        FuzzOutcome(WRONG, f"{what}{change_text}: {fault}") if fault else FuzzOutcome(RIGHT, what)
    )


def _weights(problem: Problem, rng: Random) -> ExpertWeights:
    g = generator_of(rng)
    e, hidden, width = problem.experts, problem.hidden, problem.intermediate
    w1, w2 = (torch.randn(e, *s, generator=g) for s in ((2 * width, hidden), (hidden, width)))
    unquantized = ExpertWeights(w1, w2)
    return quantize_weights(unquantized, problem) if problem.scheme.quantized else unquantized


def _tensors(weights: ExpertWeights, problem: Problem, stored: Callable[..., Tensors]) -> Tensors:
    """Return the tensors with Mixtral's names: gate is w1, up w3, down w2."""
    tensors: Tensors = {}
    none = [None] * problem.experts
    for e in range(problem.experts):
        halves = weights.w1[e].chunk(2)
        scales = (weights.w1_scale if weights.w1_scale is not None else none)[e]
        pair = (None, None) if scales is None else scales.chunk(2)
        down = (weights.w2_scale if weights.w2_scale is not None else none)[e]
        parts = {"w1": (halves[0], pair[0]), "w3": (halves[1], pair[1])}
        for name, (w, scale) in (parts | {"w2": (weights.w2[e], down)}).items():
            for kind, tensor in stored(w, scale).items():
                tensors[f"{_AT}.{e}.{name}.{kind}"] = tensor.contiguous()
    return tensors


def _config(problem: Problem, quantization: dict[str, Any] | None) -> dict[str, Any]:
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


def _draw_grid(rng: Random, experts: int, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
    world = rng.choice([n for n in (1, 2, 3) if n <= experts])
    tp = rng.choice([n for n in (1, 2) if width // n % 32 == 0])
    return (rng.randrange(world), world), (rng.randrange(tp), tp)


def _write_files(rng: Random, folder: Path, tensors: Tensors, config: Any) -> str:
    """Write the files; return a description of the change made, or ""."""
    kind = rng.choice(("", "", "tensor", "bytes", "header", "index", "config"))
    description = f", {kind} changed" if kind else ""
    text = json.dumps(config)
    if kind == "config":
        text = json.dumps(changed(rng, config))
        text = damage_text(rng, text) if rng.random() < 0.2 else text
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    if kind == "tensor":
        description += _tensor_changed(rng, tensors)
    content = save(tensors)
    if kind == "bytes":
        content, detail = _bytes_changed(rng, content)
        description += detail
    elif kind == "header":
        content = _header_changed(rng, content)
    (folder / "model.safetensors").write_bytes(content)
    if kind == "index" or (not kind and rng.random() < 0.3):
        index: Any = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
        text = json.dumps(changed(rng, index) if kind else index)
        text = damage_text(rng, text) if kind and rng.random() < 0.3 else text
        (folder / _INDEX).write_bytes(text.encode("utf-8", "surrogatepass"))
    return description


def _tensor_changed(rng: Random, tensors: Tensors) -> str:
    name = rng.choice(sorted(tensors))
    kind = rng.randrange(5)
    if kind == 0:
        del tensors[name]
        return f": no {name}"
    if kind == 1:
        other = name.replace("experts.0", "experts.9") + rng.choice(("", "x", "_scale"))
        tensors[other if other not in tensors else f"{name}.x"] = torch.zeros(2)
        return f": one more beside {name}"
    if kind == 2:
        tensors[name] = rng.choice(_JUNK).clone()
        return f": {name} {tuple(tensors[name].shape)}"
    if kind == 3:
        dtype = rng.choice(_CASTS)
        tensors[name] = tensors[name].float().to(dtype)
        return f": {name} {dtype}"
    flat = tensors[name].flatten()
    tensors[name] = flat[: rng.randrange(flat.numel())].clone()
    return f": {name} cut"


def _bytes_changed(rng: Random, content: bytes) -> tuple[bytes, str]:
    """Return the file truncated, extended, or with changed bytes in its length or header."""
    kind = rng.randrange(4)
    header = int.from_bytes(content[:8], "little") + 8
    if kind == 0:
        at = rng.choice((0, 1, 8, header, rng.randrange(len(content))))
        return content[:at], f": cut at {at}"
    if kind == 1:
        return content + bytes(rng.randrange(1, 64)), ": longer"
    if kind == 2:
        size = rng.choice((0, 1, header, 2**31, 2**62, 2**64 - 1))
        return size.to_bytes(8, "little") + content[8:], f": a header of {size}"
    at = rng.randrange(header)
    byte = bytes([rng.randrange(256)])
    return content[:at] + byte + content[at + 1 :], f": byte {at} is {byte!r}"


def _header_changed(rng: Random, content: bytes) -> bytes:
    size = int.from_bytes(content[:8], "little")
    entries = json.loads(content[8 : 8 + size])
    text = json.dumps(changed(rng, entries))
    text = damage_text(rng, text) if rng.random() < 0.2 else text
    header = text.encode("utf-8", "surrogatepass")
    return len(header).to_bytes(8, "little") + header + content[8 + size :]


def _fault(found: Any, whole: ExpertWeights | None, problem: Problem) -> str:
    """Return what is wrong with loaded weights, or "".

    whole: all weights, to compare values; None if the checkpoint was changed.
    """
    partial_problem, weights = found.partial(1)
    if partial_problem.scheme.quantized:
        check_weights_quantized(weights, partial_problem, weights.w1.device)
    if weights.w1.shape != (
        partial_problem.e,
        partial_problem.w1_rows,
        partial_problem.hidden // (2 if partial_problem.scheme.packed else 1),
    ):
        return f"w1 {tuple(weights.w1.shape)}"
    if whole is None:
        return ""
    slots = list(Placement.linear(problem.experts, found.ep[1]).slots[found.ep[0]])
    width, rank = partial_problem.intermediate, found.tp[0]
    columns = slice(rank * width, (rank + 1) * width)
    w1, w2 = _numbers(whole, problem)
    gate, up = w1[slots].chunk(2, 1)
    loaded = _numbers(weights, partial_problem)
    if not torch.equal(loaded[0], torch.cat([gate[:, columns], up[:, columns]], 1)):
        return "w1 has other values"
    return "" if torch.equal(loaded[1], w2[slots][..., columns]) else "w2 has other values"


def _numbers(weights: ExpertWeights, problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    if not problem.scheme.quantized:
        return weights.w1, weights.w2
    return dequantized_weights(weights, "w1", problem), dequantized_weights(weights, "w2", problem)
