"""Identifies the activation of an experts module by evaluating it on sample values."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from math import isfinite
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from modular_kernel.errors import UnsupportedError
from modular_kernel.reference import activation
from modular_kernel.spec.problem import GATED, UNGATED, ActivationSpec

_NUM_PROBE_PAIRS = 4096  # number of sample values of gate and up

# Substrings in the names of attributes that may hold the alpha or the limit of an activation.
_PARAMETER_WORDS = {"alpha": ("alpha", "beta", "softcap"), "limit": ("limit", "softcap")}

ActivationKey = tuple[object, ...]


def activation_of(module: torch.nn.Module) -> ActivationSpec:
    """Return the ActivationSpec that computes the same as the module's own activation.

    The module's `_apply_gate`, or `act_fn` if it has no gate, is called once with float32 values
    between -10000 and 10000, which include values near possible limits. Synchronizes with the
    device. Raises UnsupportedError if no activation matches.
    """
    with _disable_current_modes():  # compute real values, even during tracing
        return _identify_activation(module)


def _identify_activation(module: torch.nn.Module) -> ActivationSpec:
    gated = getattr(module, "has_gate", True)
    function: Callable[[torch.Tensor], torch.Tensor] = getattr(
        module, get_activation_attribute(module)
    )
    candidates = dict(zip(_PARAMETER_WORDS, _list_parameter_candidates(module), strict=True))
    probe = _make_probe(_get_projection_width(module), candidates["limit"])
    device = next(iter(module.parameters())).device
    try:
        with torch.no_grad():
            values = function(probe.to(device, torch.float32))
            values = values.detach().to("cpu", torch.float64)
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        got = f"{get_activation_attribute(module)} that raised {type(error).__name__}: {error}"
        raise unsupported_error(
            module, got, "a function that accepts (rows, columns) values"
        ) from error
    for spec in _list_candidate_specs(gated, candidates):
        if _matches(values, probe, spec):
            # The rows of packed weights may be in a different order from the one that the module's
            # code expects. `_mk_interleaved` stores the order.
            interleaved: bool = getattr(module, "_mk_interleaved", spec.interleaved)
            return replace(spec, interleaved=interleaved)
    need = f"one of {', '.join(GATED if gated else UNGATED)}"
    raise unsupported_error(
        module, f"{get_activation_attribute(module)} that computes another function", need
    )


def read_activation_key(module: torch.nn.Module) -> ActivationKey:
    """Return the values that determine the activation.

    If they change, the activation must be identified again.
    """
    gate = getattr(module, "_apply_gate", None)
    return (
        getattr(gate, "__func__", gate),
        getattr(module, "act_fn", None),
        find_alpha_and_limit_candidates(module),
    )


def find_alpha_and_limit_candidates(
    module: torch.nn.Module,
) -> tuple[tuple[tuple[str, ...], float], ...]:
    """Return (path, value) of each attribute that may be the activation's alpha or limit.

    The module and its `act_fn` are searched. Raises UnsupportedError for a tensor, because it may
    have a different value for each expert.
    """
    candidates = _find_numbers(module, ())
    act = vars(module).get("_modules", {}).get("act_fn")
    if act is not None and act._modules:
        for path, inner in act.named_modules():
            candidates += _find_numbers(inner, ("act_fn", *filter(None, path.split("."))))
    elif act is not None:
        candidates += _find_numbers(act, ("act_fn",))
    return tuple(candidates)


def _find_numbers(
    module: torch.nn.Module, path_prefix: tuple[str, ...]
) -> list[tuple[tuple[str, ...], float]]:
    candidates = []
    for name, value in vars(module).items():
        qualified_name = name if not path_prefix else f"{path_prefix[-1]} {name}"
        if not any(word in qualified_name for words in _PARAMETER_WORDS.values() for word in words):
            continue
        if isinstance(value, torch.Tensor):
            raise unsupported_error(module, f"a tensor {name}", "one number for all experts")
        if isinstance(value, (int, float)) and isfinite(value) and value > 0:
            candidates.append(((*path_prefix, name), float(value)))
    return candidates


def _list_parameter_candidates(module: torch.nn.Module) -> Iterator[list[float]]:
    """Yield the candidate values of alpha, then the candidate values of the limit."""
    candidates = [
        (" ".join(path), value) for path, value in find_alpha_and_limit_candidates(module)
    ]
    for words in _PARAMETER_WORDS.values():
        yield [value for name, value in candidates if any(word in name for word in words)]


def _get_projection_width(module: torch.nn.Module) -> int:
    """Return the number of outputs of the projection before the activation.

    This is N of the weight, which is (e, N, K), or (e, K, N) if the module is transposed.
    """
    gated = getattr(module, "has_gate", True)
    shape = getattr(module, "gate_up_proj" if gated else "up_proj").shape
    packed = hasattr(module, "_mk_interleaved")
    return int(shape[2 if getattr(module, "is_transposed", False) and not packed else 1])


def _list_candidate_specs(
    gated: bool, candidates: dict[str, list[float]]
) -> Iterator[ActivationSpec]:
    if not gated:
        yield from (ActivationSpec(kind) for kind in UNGATED)
        return
    for interleaved in (False, True):
        for kind in GATED:
            alphas = candidates["alpha"] if kind in ("swiglu_oai", "situ") else [None]
            limits: list[float | None] = [*candidates["limit"]] if kind != "silu" else []
            if not kind.startswith("swiglu"):
                limits = [None, *limits]
            for alpha, limit in product(alphas, limits):
                yield ActivationSpec(kind, alpha, limit, interleaved)


def _make_probe(columns: int, limits: list[float]) -> torch.Tensor:
    """Return float64 sample values (rows, columns), which include values near `limits`."""
    options: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
    all_magnitudes = torch.logspace(-3, 4, 64, **options)
    near_limits = [limit * factor for limit in limits for factor in (0.5, 0.99, 1.0, 1.01, 2.0)]
    positive = torch.cat(
        [
            all_magnitudes,
            torch.linspace(0, 10, 128, **options),
            torch.tensor(near_limits, **options),
        ]
    )
    values = torch.cat([positive, -positive]).float().double()
    shape = (-(-2 * _NUM_PROBE_PAIRS // columns), columns)
    generator = torch.Generator("cpu").manual_seed(0)  # does not affect the global generator
    return values[torch.randint(len(values), shape, generator=generator, device="cpu")]


def _matches(values: torch.Tensor, probe: torch.Tensor, spec: ActivationSpec) -> bool:
    """Return whether `spec` applied to `probe` equals `values`, up to rounding errors."""
    expected = activation(probe, spec)
    if values.shape != expected.shape:
        return False
    magnitude = probe.abs() + 1
    if spec.gated:
        magnitudes = (
            (magnitude[:, 0::2], magnitude[:, 1::2])
            if spec.interleaved
            else magnitude.chunk(2, dim=1)
        )
        magnitude = magnitudes[0] * magnitudes[1]
    # The absolute tolerance covers the cancellation of 1 + tanh(-x) in float32.
    return bool(((values - expected).abs() <= 1e-5 * expected.abs() + 1e-6 * magnitude).all())


def get_activation_attribute(module: torch.nn.Module) -> str:
    """Return the name of the attribute that computes the activation."""
    return "_apply_gate" if getattr(module, "has_gate", True) else "act_fn"


def unsupported_error(module: torch.nn.Module, got: str, need: str) -> UnsupportedError:
    """Return an UnsupportedError for an experts module."""
    return UnsupportedError(f"experts module {type(module).__name__}", got=got, need=need)
