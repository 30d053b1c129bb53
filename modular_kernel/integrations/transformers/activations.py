"""Find what an experts module computes between its two projections, by probing it."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from math import isfinite

import torch
from torch.utils._python_dispatch import _disable_current_modes

from modular_kernel.errors import UnsupportedError
from modular_kernel.reference import activation
from modular_kernel.spec.problem import GATED, UNGATED, ActivationSpec

_PROBE_PAIRS = 4096

# What the names of such attributes have in them.
_KINDS = {"alpha": ("alpha", "beta", "softcap"), "limit": ("limit", "softcap")}

Facts = tuple[object, ...]


def activation_of(module: torch.nn.Module) -> ActivationSpec:
    """Find what the module computes between its projections, by comparing it with every rule.

    The module's own `_apply_gate`, or `act_fn` if it has no gate, is called once with float32
    values from 0 to +-10000, close around its limits too. Synchronizes with the device.
    """
    with _disable_current_modes():  # while somebody traces, the values are needed all the same
        return _activation_of(module)


def _activation_of(module: torch.nn.Module) -> ActivationSpec:
    gated = getattr(module, "has_gate", True)
    function: Callable[[torch.Tensor], torch.Tensor] = getattr(module, label(module))
    numbers = dict(zip(_KINDS, _by_kind(module), strict=True))
    probe = _probe(_rows(module), numbers["limit"])
    device = next(iter(module.parameters())).device
    try:
        with torch.no_grad():
            found = function(probe.to(device, torch.float32))
            found = found.detach().to("cpu", torch.float64)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        got = f"{label(module)} that raised {type(e).__name__}: {e}"
        raise unsupported(module, got, "a function of (rows, columns) values") from e
    for spec in _candidates(gated, numbers):
        if _same(found, probe, spec):
            # Weights that were loaded packed may lie otherwise than the module would have them.
            interleaved: bool = getattr(module, "_mk_interleaved", spec.interleaved)
            return replace(spec, interleaved=interleaved)
    need = f"one of {', '.join(GATED if gated else UNGATED)}"
    raise unsupported(module, f"{label(module)} that computes something else", need)


def facts_of(module: torch.nn.Module) -> Facts:
    """Return whatever, once changed, may change the activation."""
    gate = getattr(module, "_apply_gate", None)
    return getattr(gate, "__func__", gate), getattr(module, "act_fn", None), numbers_of(module)


def numbers_of(module: torch.nn.Module) -> tuple[tuple[tuple[str, ...], float], ...]:
    """Return what can be an activation's alpha or limit: the way to an attribute, and its value.

    Attributes of the module and of its `act_fn`. UnsupportedError for one of each expert.
    """
    found = _numbers_in(module, ())
    act = vars(module).get("_modules", {}).get("act_fn")
    if act is not None and act._modules:
        for way, inner in act.named_modules():
            found += _numbers_in(inner, ("act_fn", *filter(None, way.split("."))))
    elif act is not None:
        found += _numbers_in(act, ("act_fn",))
    return tuple(found)


def _numbers_in(
    module: torch.nn.Module, way: tuple[str, ...]
) -> list[tuple[tuple[str, ...], float]]:
    found = []
    for name, value in vars(module).items():
        named = name if not way else f"{way[-1]} {name}"
        if not any(word in named for words in _KINDS.values() for word in words):
            continue
        if isinstance(value, torch.Tensor):
            raise unsupported(module, f"{name}, a tensor", "one number for all experts")
        if isinstance(value, (int, float)) and isfinite(value) and value > 0:
            found.append(((*way, name), float(value)))
    return found


def _by_kind(module: torch.nn.Module) -> Iterator[list[float]]:
    """Return the numbers that can be alpha, then those that can be the limit."""
    numbers = [(" ".join(way), value) for way, value in numbers_of(module)]
    for words in _KINDS.values():
        yield [value for name, value in numbers if any(word in name for word in words)]


def _rows(module: torch.nn.Module) -> int:
    """Return N of its first projection, (e, N, K) or transposed."""
    gated = getattr(module, "has_gate", True)
    shape = getattr(module, "gate_up_proj" if gated else "up_proj").shape
    packed = hasattr(module, "_mk_interleaved")
    return int(shape[2 if getattr(module, "is_transposed", False) and not packed else 1])


def _candidates(gated: bool, numbers: dict[str, list[float]]) -> Iterator[ActivationSpec]:
    if not gated:
        yield from (ActivationSpec(kind) for kind in UNGATED)
        return
    for interleaved in (False, True):
        for kind in GATED:
            alphas = numbers["alpha"] if kind in ("swiglu_oai", "situ") else [None]
            limits: list[float | None] = [*numbers["limit"]] if kind != "silu" else []
            if not kind.startswith("swiglu"):
                limits = [None, *limits]
            for alpha, limit in product(alphas, limits):
                yield ActivationSpec(kind, alpha, limit, interleaved)


def _probe(columns: int, limits: list[float]) -> torch.Tensor:
    """(rows, columns) float64 of float32 values: small and large ones, and some around limits."""
    large = torch.logspace(-3, 4, 64, dtype=torch.float64)
    near = [limit * factor for limit in limits for factor in (0.5, 0.99, 1.0, 1.01, 2.0)]
    positive = torch.cat([large, torch.linspace(0, 10, 128), torch.tensor(near)])
    values = torch.cat([positive, -positive]).float().double()
    shape = (-(-2 * _PROBE_PAIRS // columns), columns)
    generator = torch.Generator().manual_seed(0)  # leaves the caller's random numbers alone
    return values[torch.randint(len(values), shape, generator=generator)]


def _same(found: torch.Tensor, probe: torch.Tensor, spec: ActivationSpec) -> bool:
    """Whether `found` is `spec` of the probe, up to what float32 loses in 1 + tanh(-x)."""
    want = activation(probe, spec)
    if found.shape != want.shape:
        return False
    half = probe.abs() + 1
    if spec.gated:
        split = (half[:, 0::2], half[:, 1::2]) if spec.interleaved else half.chunk(2, dim=1)
        half = split[0] * split[1]
    return bool(((found - want).abs() <= 1e-5 * want.abs() + 1e-6 * half).all())


def label(module: torch.nn.Module) -> str:
    """Name what computes it."""
    return "_apply_gate" if getattr(module, "has_gate", True) else "act_fn"


def unsupported(module: torch.nn.Module, got: str, need: str) -> UnsupportedError:
    """Make the error of an experts module that is refused."""
    return UnsupportedError(f"experts module {type(module).__name__}", got=got, need=need)
