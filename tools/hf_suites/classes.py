"""Every experts class that the installed transformers decorates, against its own eager forward.

The truth is that forward in float64: a mismatch says whose it is.
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

from hf_suites.outcomes import Case, Outcome, judged, reason
from modular_kernel.errors import IncompatibleError, InputError
from modular_kernel.integrations.transformers import register, registration

E, H, I, K = 4, 32, 24, 2  # noqa: E741
PARTS = ("TorchExperts", "TritonExperts")
# float32: sums of 32 products in any order. bfloat16: three roundings to 8 bits.
BOUNDS = {torch.float32: 3e-6, torch.bfloat16: 1e-2}
TOKENS = (1, 11)
# Grad mode off; on over frozen weights; on over weights that require grad, where transformers'
# grouped_mm runs.
MODES = ("no_grad", "grad, frozen", "grad, trainable")

_DECORATED = re.compile(r"^@use_experts_implementation.*\nclass (\w+)", re.MULTILINE)
# What a class asks its config for, by words in the name; the first line that fits counts.
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
    """A configuration of any model, as small as it gets."""

    _experts_implementation = "eager"

    def __getattr__(self, name: str) -> object:
        """Return what a class asks for."""
        for words, value in _VALUES:
            if any(word in name for word in words) and not name.startswith("__"):
                return value
        raise AttributeError(name)


def decorated() -> dict[str, str]:
    """Return the name of every decorated class, and the module that it is in; imports none."""
    modules = {}
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        for name in _DECORATED.findall(path.read_text()):
            modules[name] = f"transformers.models.{path.parent.name}.{path.stem}"
    return modules


def found() -> list[type[torch.nn.Module]]:
    """Return every decorated class, by model."""
    return [getattr(import_module(module), name) for name, module in decorated().items()]


def made(cls: type[torch.nn.Module]) -> Any:
    """Make an experts module with random weights."""
    given = inspect.signature(inspect.unwrap(cls.__init__)).parameters
    more = {
        name: getattr(Config(), name)
        for name, parameter in given.items()
        if parameter.default is parameter.empty and name not in ("self", "config")
    }
    experts = cls(Config(), **more)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return experts.eval()


@dataclass(frozen=True)
class Call:
    """One call: its parts, dtype, tokens and mode."""

    part: str
    dtype: torch.dtype
    tokens: int
    mode: str

    def __str__(self) -> str:
        return (
            f"{self.part}, {str(self.dtype).removeprefix('torch.')}, T={self.tokens}, {self.mode}"
        )


def calls(parts: tuple[str, ...] = PARTS) -> list[Call]:
    """Return every call of a class."""
    return [Call(*each) for each in product(parts, BOUNDS, TOKENS, MODES)]


def cases(parts: tuple[str, ...] = PARTS) -> Iterator[Case]:
    """Yield a case for every class and call."""
    names = {
        part: register("MoEPrepareAndFinalizeNoEP", part, name=f"suites_{part}") for part in parts
    }
    for cls in found():
        for call in calls(parts):
            yield case(cls, call, names[call.part])


def case(cls: type[torch.nn.Module], call: Call, ours: str) -> Case:
    """Run one call of a class on both sides."""
    name = f"{cls.__name__}, {call}"
    try:
        return Case(
            f"transformers' experts classes, {call.part}", name, *_compared(cls, call, ours)
        )
    except (InputError, IncompatibleError) as error:
        end, why = Outcome.REFUSED, f"{cls.__name__}: {getattr(error, 'got', error)}"
    except Exception as error:  # noqa: BLE001 (that is what is looked for)
        end, why = Outcome.RAW, reason(error)
    return Case(f"transformers' experts classes, {call.part}", name, end, why)


def _compared(cls: type[torch.nn.Module], call: Call, ours: str) -> tuple[Outcome, str]:
    experts = made(cls).to(call.dtype).requires_grad_(call.mode == "grad, trainable")
    generator = torch.Generator().manual_seed(call.tokens)
    x = torch.randn(call.tokens, H, generator=generator).to(call.dtype)
    values, ids = torch.randn(call.tokens, E, generator=generator).topk(K)
    scores = values.softmax(-1).to(call.dtype)
    exact = copy.deepcopy(experts).double()
    with torch.no_grad():
        want = _run(exact, "eager", x.double(), ids, scores.double())
    results = {}
    for side in ("eager", ours):
        with torch.set_grad_enabled(call.mode != "no_grad"):
            results[side] = _run(experts, side, x, ids, scores)
    served = registration(ours)
    ran = experts in served.layers
    errors = {
        side: float((y.detach().double() - want).norm() / want.norm())
        for side, y in results.items()
    }
    end, why = judged(errors[ours], errors["eager"], BOUNDS[call.dtype])
    if results[ours].dtype is not call.dtype or results[ours].shape != x.shape:
        return Outcome.OURS, f"{results[ours].dtype} {tuple(results[ours].shape)}"
    if end is Outcome.AGREE and call.mode == "grad, trainable":
        end, why = _same_gradients(experts, results[ours], results["eager"], call.dtype)
    if end is Outcome.AGREE and not ran:
        return Outcome.NOT_REACHED, why
    return end, why


def _run(experts: Any, side: str, *call: torch.Tensor) -> torch.Tensor:
    experts.config = Config()
    experts.config._experts_implementation = side
    result: torch.Tensor = experts(*call)
    return result


def _same_gradients(
    experts: Any, ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype
) -> tuple[Outcome, str]:
    """Compare gradients of the weights; both are transformers' own."""
    given = list(experts.parameters())
    pairs = [
        torch.autograd.grad(y.float().square().sum(), given, allow_unused=True)
        for y in (ours, theirs)
    ]
    for one, other in zip(*pairs, strict=True):
        if (one is None) != (other is None):
            return Outcome.OURS, "a gradient is missing"
        # A NaN is a difference.
        if one is not None and not (one - other).norm() <= 4 * BOUNDS[dtype] * other.norm():
            return Outcome.OURS, "gradients differ"
    return Outcome.AGREE, ""
