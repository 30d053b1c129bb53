"""Imports matrices that quantization libraries (packers) wrote, and compares them with a reference.

The reference is in float64. It is the packer's input if the packer only packs, and otherwise the
values of the codes that it wrote. The packer's own dequantizer is compared with it, too.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file

import modular_kernel as mk
from hf_suites.outcomes import Case, Outcome, format_reason
from modular_kernel.catalog import this_machine
from modular_kernel.checkpoints import Matrix, format_of, merge
from modular_kernel.checkpoints.formats import Format
from modular_kernel.errors import IncompatibleError, InputError
from modular_kernel.quant.quantized_weights import dequantize

Tensors = dict[str, torch.Tensor]
EXPERTS, TOP_K = 2, 2
# (I, H).
SHAPES = ((64, 128), (128, 64), (128, 256), (256, 128))
# Bounds on the relative error of a float32 layer's output, without and with activations that are
# rounded to 8 bits.
LAYER_BOUND, ROUNDED_BOUND = 1e-5, 8e-2
# Maximum relative distance of a packer's codes from its input weights.
MAX_DISTANCE = 0.35


@dataclass(frozen=True)
class Packed:
    """A packed matrix.

    tensors: the tensors by their names in files.
    expected: the exact values, (N, K) float64.
    their_values: the result of the packer's dequantizer.
    source: the input of the packer.
    is_rounded: whether our values may differ from the exact ones in the last bits of float32,
        because a stored number is a divisor.
    """

    tensors: Tensors
    expected: torch.Tensor
    their_values: torch.Tensor
    source: torch.Tensor
    is_rounded: bool = False


Make = Callable[[torch.Tensor, torch.Generator], Packed]


@dataclass(frozen=True)
class Packer:
    """A packer with its options.

    config: the quantization_config of its files.
    make: packs a weight.
    layer: whether to also write a Mixtral checkpoint with its tensors, and run the layer.
    """

    suite: str
    name: str
    config: dict[str, Any]
    make: Make
    layer: bool = True


def register_package(name: str, folder: Path) -> None:
    """Make a package's modules importable without running its __init__."""
    module = ModuleType(name)
    module.__path__ = [str(folder)]
    sys.modules[name] = module


def import_packer(name: str) -> Any:
    """Import a module of a packer."""
    return import_module(name)


def cases(packers: Iterator[Packer]) -> Iterator[Case]:
    """Yield a case for every packer and shape."""
    for packer in packers:
        for seed, (intermediate, hidden) in enumerate(SHAPES):
            name = f"{packer.name}, I={intermediate}, H={hidden}"
            try:
                outcome, detail = _run(packer, intermediate, hidden, seed)
            except (InputError, IncompatibleError) as error:
                outcome, detail = Outcome.REFUSED, _format_error(error)
            except TheirError as error:
                outcome, detail = Outcome.NOT_USABLE, str(error)
            except Exception as error:  # noqa: BLE001 (raw exceptions are findings)
                outcome, detail = Outcome.RAW, format_reason(error)
            yield Case(packer.suite, name, outcome, detail)


class TheirError(Exception):
    """The packer itself failed."""


def _format_error(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:160]


def _run(packer: Packer, intermediate: int, hidden: int, seed: int) -> tuple[Outcome, str]:
    g = torch.Generator().manual_seed(seed)
    matrices = []
    for _ in range(EXPERTS):
        for rows, depth in ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate)):
            try:
                matrices.append(packer.make(torch.randn(rows, depth, generator=g) / 8, g))
            except Exception as error:
                raise TheirError(format_reason(error)) from error
    format = format_of(packer.config, depth=max(intermediate, hidden))
    for packed in matrices:
        outcome, detail = _compare_matrix(format, packed)
        if outcome is not Outcome.AGREE:
            return outcome, detail
    return (
        _compare_layer(packer, matrices, intermediate, hidden, g)
        if packer.layer
        else (Outcome.AGREE, "")
    )


def dequantize_matrix(format: Format, matrix: Matrix) -> torch.Tensor:
    """Dequantize an imported matrix: float32 (N, K), with columns in their original order."""
    assert matrix.scale is not None
    zero = None if matrix.zero_point is None else matrix.zero_point[None]
    dequantized = dequantize(matrix.w[None], matrix.scale[None], zero, format.scheme)[0]
    if matrix.global_scale is not None:
        dequantized = dequantized * matrix.global_scale.float()
    return dequantized if matrix.order is None else dequantized[:, matrix.order.long().argsort()]


def _compare_matrix(format: Format, packed: Packed) -> tuple[Outcome, str]:
    """Compare our values with the exact ones bitwise, and the packer's in their precision."""
    ours = dequantize_matrix(format, merge(format, [packed.tensors], torch.float32))
    expected = packed.expected.float()
    our_errors = (
        (ours != expected) if not packed.is_rounded else ~_is_close(ours, packed.expected, 2.0**-21)
    )
    if bool(our_errors.any()):
        return (
            Outcome.OURS,
            f"{int(our_errors.sum())} of {our_errors.numel()} values differ from float64",
        )
    their_values = packed.their_values
    their_errors = ~_is_close(
        their_values, packed.expected, 2 * torch.finfo(their_values.dtype).eps
    )
    if bool(their_errors.any()):
        return Outcome.THEIRS, f"its dequantizer is off in some values ({their_values.dtype})"
    distance = float((packed.expected - packed.source).norm() / packed.source.double().norm())
    if not distance < MAX_DISTANCE:
        return Outcome.THEIRS, "its codes differ from its input"
    return Outcome.AGREE, ""


def _is_close(actual: torch.Tensor, expected: torch.Tensor, eps: float) -> torch.Tensor:
    """Return a mask of values within a relative error of `eps` plus 2^-24, float16's minimum."""
    return (actual.double() - expected).abs() <= eps * expected.abs() + 2.0**-24


def _compare_layer(
    packer: Packer, matrices: list[Packed], intermediate: int, hidden: int, g: torch.Generator
) -> tuple[Outcome, str]:
    """Write the matrices as a Mixtral checkpoint, load and run it, and compare with float64."""
    tensors: Tensors = {}
    for number, packed in enumerate(matrices):
        expert, index = divmod(number, 3)
        for name, tensor in packed.tensors.items():
            prefix = f"model.layers.0.block_sparse_moe.experts.{expert}.{('w1', 'w3', 'w2')[index]}"
            tensors[f"{prefix}.{name}"] = tensor.clone().contiguous()
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_local_experts": EXPERTS}
    config = {"model_type": "mixtral", "hidden_act": "silu", "num_experts_per_tok": TOP_K}
    x = torch.randn(5, hidden, generator=g)
    routing = mk.Routing(torch.rand(5, TOP_K, generator=g), torch.tensor([[0, 1]] * 4 + [[1, 0]]))
    with tempfile.TemporaryDirectory() as folder:
        full_config = config | sizes | {"quantization_config": packer.config}
        Path(folder, "config.json").write_text(json.dumps(full_config, default=str))
        save_file(tensors, Path(folder, "model.safetensors"))
        loaded_experts = mk.load_experts(folder, layer=0, dtype=torch.float32)
        kernel = mk.make_kernel(
            "MoEPrepareAndFinalizeNoEP",
            "TorchExperts",
            loaded_experts.problem(tokens=5),
            machine=this_machine(device="cpu"),
        )
        ours = kernel(x, loaded_experts.weights, routing)
    expected = _compute_layer([packed.expected for packed in matrices], x.double(), routing)
    error = float((ours.double() - expected).norm() / expected.norm())
    rounds_activations = loaded_experts.format.scheme.quantizes_activations
    bound = ROUNDED_BOUND if rounds_activations else LAYER_BOUND
    return (Outcome.AGREE, "") if error <= bound else (Outcome.OURS, f"layer's error {error:.2e}")


def _compute_layer(
    matrices: list[torch.Tensor], x: torch.Tensor, routing: mk.Routing
) -> torch.Tensor:
    total = torch.zeros_like(x)
    for expert in range(EXPERTS):
        gate, up, down = matrices[3 * expert : 3 * expert + 3]
        rows = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
        weights = routing.topk_weights_TK.double() * (routing.topk_ids_TK == expert)
        total += weights.sum(1, keepdim=True) * rows
    return total


def grid(**options: tuple[Any, ...]) -> Iterator[Mapping[str, Any]]:
    """Yield every combination of option values."""
    names = list(options)
    if not names:
        yield {}
        return
    first, other_axes = names[0], {name: options[name] for name in names[1:]}
    for value in options[first]:
        for other_options in grid(**other_axes):
            yield {first: value, **other_options}
