"""Conversion of SGLang's MoeRunnerConfig and TritonMoeQuantInfo to the arguments of `MoeRunner`.

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
_IGNORED_FIELDS = frozenset({"layer", "runner_backend"})
# Fields of SGLang's TritonMoeQuantInfo that MoeQuantInfo does not have.
_MXFP8, _INTERLEAVED = "use_mxfp8", "fuse_swiglu_interleaved"


def convert_runner_config(config: Any, *, interleaved: bool = False) -> MoeRunnerConfig:
    """Convert SGLang's MoeRunnerConfig to ours.

    interleaved: whether SGLang has permuted w13 so that its rows alternate gate and up.

    Raises ConfigurationError or UnsupportedError for values that no part supports.
    """
    known_fields = {field.name for field in fields(MoeRunnerConfig)}
    values = _read_fields(config, known_fields, "MoeRunnerConfig")
    options = {name: value for name, value in values.items() if name not in _IGNORED_FIELDS}
    if interleaved:
        kind = options.get("activation", "silu")
        options["activation"] = ActivationSpec(str(kind), interleaved=True)
    our_config = MoeRunnerConfig(**options)
    our_config.activation_spec()  # raises if the fields contradict each other
    return our_config


def convert_quant_info(info: Any) -> tuple[MoeQuantInfo, bool]:
    """Convert SGLang's TritonMoeQuantInfo to ours.

    Returns (quantization info, whether the rows of w13 are interleaved). Raises UnsupportedError
    for mxfp8 and for an object of another class, and ConfigurationError for an unknown field that
    does not have its default value.
    """
    name = type(info).__name__
    if name != "TritonMoeQuantInfo":
        need = "TritonMoeQuantInfo, because other layouts of weights are not supported"
        raise UnsupportedError("quant_info", got=name, need=need)
    known_fields = {field.name for field in fields(MoeQuantInfo)} | {_MXFP8, _INTERLEAVED}
    values = _read_fields(info, known_fields, name)
    if values.pop(_MXFP8, False):
        raise UnsupportedError(_MXFP8, got=True, need="False")
    interleaved = bool(values.pop(_INTERLEAVED, False))
    return MoeQuantInfo(**values), interleaved


def check_biases(config: MoeRunnerConfig, info: MoeQuantInfo) -> None:
    """Raise UnsupportedError if SGLang multiplies the first bias by the router weights.

    With apply_router_weight_on_input, SGLang computes w (w13 x + b13) for a token x with router
    weight w. This package computes w13 (w x) + b13.
    """
    if config.apply_router_weight_on_input and info.b13 is not None:
        need = "None, because apply_router_weight_on_input is True"
        raise UnsupportedError("b13", got="a tensor", need=need)


def _read_fields(record: Any, known_fields: set[str], what: str) -> dict[str, Any]:
    """Return the values of the known fields of a dataclass instance.

    Raises ConfigurationError if an unknown field does not have its default value.
    """
    values: dict[str, Any] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if field.name in known_fields:
            values[field.name] = value
        elif not _is_default(field, value):
            got = format_value(value)
            need = "the default value, because this field is not supported"
            raise ConfigurationError(f"{what}.{field.name}", got=got, need=need)
    return values


def _is_default(field: "Field[Any]", value: object) -> bool:
    if field.default is not MISSING:
        return value is field.default or (
            isinstance(value, bool | int | float | str) and value == field.default
        )
    return False
