"""Experts parts of `MoeRunner`'s backends, and options from SGLang's environment variables."""

from collections.abc import Mapping

from modular_kernel.catalog import load_catalog
from modular_kernel.contracts import PermuteExpertsUnpermute
from modular_kernel.errors import ConfigurationError, UnknownPartError, UnsupportedError
from modular_kernel.runner import FORMATS, FUSED, PERMUTES
from modular_kernel.spec.problem import ActivationFormat
from modular_kernel.utils.argument_checks import expect

_STANDARD, _BATCHED = ActivationFormat.STANDARD, ActivationFormat.BATCHED_EXPERTS
# The experts part of each backend, by activation format. Names follow SGLang if it has the backend.
# Registered stages (`modular_kernel.runner`) add further backends.
BACKENDS: Mapping[str, Mapping[ActivationFormat, str]] = {
    "triton": {_STANDARD: "TritonExperts", _BATCHED: "BatchedTritonExperts"},
    "triton_kernel": {_STANDARD: "TritonKernelsExperts"},
    "deep_gemm": {_STANDARD: "DeepGemmExperts", _BATCHED: "BatchedDeepGemmExperts"},
    "flashinfer_cutlass": {_STANDARD: "FlashInferExperts"},
    "cutlass": {_STANDARD: "CutlassExpertsFP8", _BATCHED: "BatchedCutlassExpertsFP8"},
    "torch": {_STANDARD: "TorchExperts", _BATCHED: "NaiveBatchedExperts"},
}
# The all2all backend of each dispatch format, for looking up fused operations.
A2A_BACKENDS = {"standard": "none", "deepep_normal": "deepep", "deepep_ll": "deepep"}
# SGLang's environment variable -> (option of MoeRunner, value of the option for "1").
SWITCHES: Mapping[str, tuple[str, bool]] = {
    "SGLANG_CI_DISABLE_MOE_FUSED_FUNC": ("fused", False),
    "SGLANG_MOE_PADDING": ("padding", True),
    "SGLANG_MASKED_GEMM_FAST_ACT": ("fast_act", True),
    "SGLANG_MOE_USE_AITER": ("aiter", True),
}


def find_parts(backend: str, *, fused: bool) -> dict[str, type[PermuteExpertsUnpermute]]:
    """Return a backend's part for each dispatch format that it supports.

    fused: whether to prefer fused operations. If False, only parts with stages are returned.

    Raises UnknownPartError for an unknown name, and UnsupportedError if `fused` is False and there
    are no stages.
    """
    expect("runner_backend", backend, str)
    parts: dict[str, type[PermuteExpertsUnpermute]] = {}
    staged = False
    for format, a2a in A2A_BACKENDS.items():
        part, op = PERMUTES.parts.get((backend, format)), FUSED.find_fused_op(a2a, backend)
        if op is not None and op.unfused.requires.activation_format is FORMATS[format]:
            part = FUSED.parts.get((a2a, backend), op.unfused) if fused else op.unfused
        staged |= part is not None
        if part is None and fused:
            part = _find_part(backend, FORMATS[format])
        if part is not None:
            parts[format] = part
    if parts:
        return parts
    stages = sorted({key[0] for key in PERMUTES.parts})
    if not fused and not staged and _is_known_backend(backend):
        need = f"True, or a backend with stages: {', '.join(stages)}"
        raise UnsupportedError(f"fused of backend {backend!r}", got=False, need=need)
    names = ", ".join(sorted({*BACKENDS, *stages}))
    need = f"one of {names}, or the name of an experts part"
    raise UnknownPartError("runner backend", got=repr(backend)[:80], need=need)


def has_stages(backend: str) -> bool:
    """Return whether the backend has stages, so that it supports fused=False."""
    try:
        return bool(find_parts(backend, fused=False))
    except (UnsupportedError, UnknownPartError):
        return False


def _is_known_backend(backend: str) -> bool:
    return backend in BACKENDS or backend in load_catalog().names("experts")


def _find_part(backend: str, format: ActivationFormat) -> type[PermuteExpertsUnpermute] | None:
    """Return the backend's part for a format, or None if it has none.

    backend: a name in BACKENDS, or the name of an experts part.
    """
    catalog = load_catalog()
    name = BACKENDS.get(backend, {}).get(format, backend)
    if name not in catalog.names("experts"):
        return None
    part = catalog.experts(name)
    return part if part.requires.activation_format is format else None


def switches(environment: Mapping[str, str]) -> dict[str, bool]:
    """Return the options of `MoeRunner` that SGLang's environment variables set.

    environment: names and values of environment variables. Other variables are ignored.

    Raises ConfigurationError for a value that is not 0 or 1.
    """
    expect("environment", environment, Mapping)
    options: dict[str, bool] = {}
    for name, (option, value_if_set) in SWITCHES.items():
        setting = environment.get(name, "0")
        expect(name, setting, str)
        value = setting.strip().lower()
        if value not in ("0", "1", "true", "false", ""):
            raise ConfigurationError(name, got=repr(value)[:80], need="0 or 1")
        if name in environment:
            options[option] = value_if_set == (value in ("1", "true"))
    return options
