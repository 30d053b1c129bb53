"""Conversion of SGLang's runner config and quantization record to those of `MoeRunner`.

Fields are read by name, so this module does not import SGLang. An unknown field, or a value that is
not supported, raises an error that names the field.
"""

from dataclasses import MISSING, Field, fields
from typing import Any

from modular_kernel.errors import ConfigurationError, UnsupportedError
from modular_kernel.integrations.moe_runner import MoeQuantInfo, MoeRunnerConfig
from modular_kernel.spec.problem import ActivationSpec
from modular_kernel.utils.argument_checks import format_value

# Fields of SGLang's config that are ignored: the layer's module, and the backend's name in SGLang.
_IGNORED = frozenset({"layer", "runner_backend"})
# Fields of SGLang's TritonMoeQuantInfo without a counterpart of the same name.
_MXFP8, _INTERLEAVED = "use_mxfp8", "fuse_swiglu_interleaved"


def runner_config(config: Any, *, interleaved: bool = False) -> MoeRunnerConfig:
    """Return SGLang's MoeRunnerConfig as ours.

    interleaved: SGLang has permuted w13 so that its rows alternate gate and up. Raises
    ConfigurationError or UnsupportedError for values that no part supports.
    """
    known = {field.name for field in fields(MoeRunnerConfig)}
    values = _values(config, known, "MoeRunnerConfig")
    options = {name: value for name, value in values.items() if name not in _IGNORED}
    if interleaved:
        kind = options.get("activation", "silu")
        options["activation"] = ActivationSpec(str(kind), interleaved=True)
    ours = MoeRunnerConfig(**options)
    ours.activation_spec()
    return ours


def quant_info(info: Any) -> tuple[MoeQuantInfo, bool]:
    """Return SGLang's TritonMoeQuantInfo as ours, and whether w13's rows are interleaved.

    Raises UnsupportedError for mxfp8 and for records of another class, and ConfigurationError for
    an unknown field that is not at its default.
    """
    name = type(info).__name__
    if name != "TritonMoeQuantInfo":
        need = "a TritonMoeQuantInfo: other layouts of weights are not supported"
        raise UnsupportedError("quant_info", got=name, need=need)
    known = {field.name for field in fields(MoeQuantInfo)} | {_MXFP8, _INTERLEAVED}
    values = _values(info, known, name)
    if values.pop(_MXFP8, False):
        raise UnsupportedError(_MXFP8, got=True, need="False")
    interleaved = bool(values.pop(_INTERLEAVED, False))
    return MoeQuantInfo(**values), interleaved


def _values(record: Any, known: set[str], what: str) -> dict[str, Any]:
    """Return the known fields. Raises ConfigurationError if another one is not at its default."""
    values: dict[str, Any] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if field.name in known:
            values[field.name] = value
        elif not _is_default(field, value):
            got = format_value(value)
            raise ConfigurationError(f"{what}.{field.name}", got=got, need="its default")
    return values


def _is_default(field: "Field[Any]", value: object) -> bool:
    if field.default is not MISSING:
        return value is field.default or (
            isinstance(value, bool | int | float | str) and value == field.default
        )
    return False
