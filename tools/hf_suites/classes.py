"""Compares our implementation with the eager forward of every experts class of transformers.

The reference is the eager forward in float64, so that a mismatch can be attributed to one side.
"""

import copy
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_suites.outcomes import Case, Outcome, format_reason, judge_errors
from modular_kernel.errors import IncompatibleError, InputError
from modular_kernel.integrations.transformers import register, registration

E, H, I, K = 4, 32, 24, 2  # noqa: E741
PARTS = ("TorchExperts", "TritonExperts")
# Bounds of the relative error. They allow sums of 32 products in any order in float32, and three
# roundings to 8 bits in bfloat16.
BOUNDS = {torch.float32: 3e-6, torch.bfloat16: 1e-2}
TOKENS = (1, 11)
# For trainable weights in grad mode, transformers' grouped_mm runs.
MODES = ("no_grad", "grad, frozen", "grad, trainable")

_DECORATED = re.compile(r"^@use_experts_implementation.*\nclass (\w+)", re.MULTILINE)
# Values of config attributes, by substrings of their names. The first match is used.
_VALUES: tuple[tuple[tuple[str, ...], object], ...] = (
    (("latent",), None),
    (("act",), "silu"),
    (("alpha",), 1.7),
    (("limit",), 0.6),
    (("softcap",), 1.5),
    (("eps",), 1e-6),
    (("per_tok",), K),
    (("experts",), E),
    (("intermediate",), I),
    (("hidden",), H),
)


class Config:
    """A small configuration that works for the experts class of any model."""

    _experts_implementation = "eager"

    def __getattr__(self, name: str) -> object:
        """Return the value of a config attribute according to _VALUES."""
        for substrings, value in _VALUES:
            if any(substring in name for substring in substrings) and not name.startswith("__"):
                return value
        raise AttributeError(name)


def find_classes() -> dict[str, str]:
    """Return the module of every experts class by class name, without importing any module."""
    module_by_class = {}
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        for name in _DECORATED.findall(path.read_text()):
            module_by_class[name] = f"transformers.models.{path.parent.name}.{path.stem}"
    return module_by_class


def import_classes() -> list[type[torch.nn.Module]]:
    """Import and return every experts class, sorted by model."""
    return [getattr(import_module(module), name) for name, module in find_classes().items()]


def make_experts(cls: type[torch.nn.Module]) -> Any:
    """Build an experts module with random weights."""
    parameters = inspect.signature(inspect.unwrap(cls.__init__)).parameters
    arguments = {
        name: getattr(Config(), name)
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and name not in ("self", "config")
    }
    experts = cls(Config(), **arguments)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return experts.eval()


@dataclass(frozen=True)
class Call:
    """A call: experts part, dtype, number of tokens, and grad mode."""

    part: str
    dtype: torch.dtype
    tokens: int
    mode: str

    def __str__(self) -> str:
        return (
            f"{self.part}, {str(self.dtype).removeprefix('torch.')}, T={self.tokens}, {self.mode}"
        )


def list_calls(parts: tuple[str, ...] = PARTS) -> list[Call]:
    """Return all calls to make with a class."""
    return [Call(*options) for options in product(parts, BOUNDS, TOKENS, MODES)]


def cases(parts: tuple[str, ...] = PARTS) -> Iterator[Case]:
    """Yield a case for every class and call."""
    names = {
        part: register("MoEPrepareAndFinalizeNoEP", part, name=f"suites_{part}") for part in parts
    }
    for cls in import_classes():
        for call in list_calls(parts):
            yield case(cls, call, names[call.part])


def case(cls: type[torch.nn.Module], call: Call, our_name: str) -> Case:
    """Run one call of a class with and without our implementation."""
    name = f"{cls.__name__}, {call}"
    try:
        return Case(
            f"transformers' experts classes, {call.part}", name, *_compare(cls, call, our_name)
        )
    except (InputError, IncompatibleError) as error:
        outcome, detail = Outcome.REFUSED, f"{cls.__name__}: {getattr(error, 'got', error)}"
    except Exception as error:  # noqa: BLE001 (raw exceptions are findings)
        outcome, detail = Outcome.RAW, format_reason(error)
    return Case(f"transformers' experts classes, {call.part}", name, outcome, detail)


def _compare(cls: type[torch.nn.Module], call: Call, ours: str) -> tuple[Outcome, str]:
    experts = make_experts(cls).to(call.dtype).requires_grad_(call.mode == "grad, trainable")
    generator = torch.Generator().manual_seed(call.tokens)
    x = torch.randn(call.tokens, H, generator=generator).to(call.dtype)
    values, ids = torch.randn(call.tokens, E, generator=generator).topk(K)
    weights = values.softmax(-1).to(call.dtype)
    exact = copy.deepcopy(experts).double()
    with torch.no_grad():
        expected = _run(exact, "eager", x.double(), ids, weights.double())
    results = {}
    for side in ("eager", ours):
        with torch.set_grad_enabled(call.mode != "no_grad"):
            results[side] = _run(experts, side, x, ids, weights)
    registered = registration(ours)
    was_used = experts in registered.layers
    errors = {
        side: float((y.detach().double() - expected).norm() / expected.norm())
        for side, y in results.items()
    }
    outcome, detail = judge_errors(errors[ours], errors["eager"], BOUNDS[call.dtype])
    if results[ours].dtype is not call.dtype or results[ours].shape != x.shape:
        return Outcome.OURS, f"{results[ours].dtype} {tuple(results[ours].shape)}"
    if outcome is Outcome.AGREE and call.mode == "grad, trainable":
        outcome, detail = _compare_gradients(experts, results[ours], results["eager"], call.dtype)
    if outcome is Outcome.AGREE and not was_used:
        return Outcome.NOT_REACHED, detail
    return outcome, detail


def _run(experts: Any, side: str, *call: torch.Tensor) -> torch.Tensor:
    experts.config = Config()
    experts.config._experts_implementation = side
    result: torch.Tensor = experts(*call)
    return result


def _compare_gradients(
    experts: Any, ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype
) -> tuple[Outcome, str]:
    """Compare gradients of the weights. Both sides compute them with transformers' own code."""
    parameters = list(experts.parameters())
    pairs = [
        torch.autograd.grad(y.float().square().sum(), parameters, allow_unused=True)
        for y in (ours, theirs)
    ]
    for grad, expected in zip(*pairs, strict=True):
        if (grad is None) != (expected is None):
            return Outcome.OURS, "a gradient is missing"
        # `not <=` also catches NaN.
        if grad is not None and not (grad - expected).norm() <= 4 * BOUNDS[dtype] * expected.norm():
            return Outcome.OURS, "gradients differ"
    return Outcome.AGREE, ""
