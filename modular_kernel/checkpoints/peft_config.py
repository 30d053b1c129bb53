"""Reads PEFT's adapter_config.json.

Only plain LoRA is supported, not variants such as DoRA. An unsupported field that would change the
result raises a ConfigurationError.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, sqrt
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from modular_kernel.errors import ConfigurationError
from modular_kernel.utils import json_files
from modular_kernel.utils.argument_checks import MAX_INT32, Between, Count, expect

_Value = TypeVar("_Value")
_MAX_BYTES = 1 << 20
_MAX_PATTERN_LENGTH = 256
# Fields about training, origin and target modules, which do not change the result.
_IGNORED_FIELDS = frozenset((
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying",
    "eva_config", "exclude_modules", "inference_mode", "layers_pattern", "loftq_config",
    "lora_dropout", "lora_ga_config", "megatron_core", "qalora_group_size", "revision",
    "runtime_config", "task_type",
))  # fmt: skip
_READ_FIELDS = frozenset((
    "alpha_pattern", "bias", "init_lora_weights", "layers_to_transform", "lora_alpha",
    "peft_type", "peft_version", "r", "rank_pattern", "target_modules", "target_parameters",
    "use_rslora",
))  # fmt: skip
# Initializations that do not change the base weights. Others, such as PiSSA, do.
_Initialization = bool | Literal["gaussian", "eva", "orthogonal"] | None
_Layer = Annotated[int, Between(0, MAX_INT32)]
_FIELDS: tuple[tuple[str, Any], ...] = (
    ("exclude_modules", str | list[str] | None),
    ("init_lora_weights", _Initialization),
    ("layers_to_transform", _Layer | list[_Layer] | None),
    ("peft_version", str | None),
    ("target_modules", str | list[str] | None),
    ("target_parameters", list[str] | None),
)


@dataclass(frozen=True)
class PeftConfig:
    """The settings of a plain LoRA adapter.

    path: the adapter_config.json.
    rank, alpha: defaults for modules that no pattern matches.
    ranks, alphas: overrides; maps a regular expression for module names to a value (rank_pattern,
        alpha_pattern).
    use_rslora: whether the scaling is alpha / sqrt(rank) instead of alpha / rank.
    layers: numbers of the layers with adapters; None for all.
    targets: names of the modules and parameters with adapters; () if the config selects them by a
        pattern or excludes some.
    peft_version: the version of PEFT that wrote the file, if known.
    """

    path: Path
    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    use_rslora: bool
    layers: frozenset[int] | None
    targets: tuple[str, ...]
    peft_version: str | None

    def rank_and_scaling(self, module: str) -> tuple[int, float]:
        """Return the rank of a module, and the factor by which B @ A is scaled."""
        name = module.removeprefix("base_model.model.")
        rank = _find_first_match(self.ranks, name, self.rank)
        alpha = _find_first_match(self.alphas, name, self.alpha)
        return rank, alpha / (sqrt(rank) if self.use_rslora else rank)

    def has_layer(self, layer: int) -> bool:
        return self.layers is None or layer in self.layers

    @property
    def has_fused_layout(self) -> bool:
        """Whether lora_A of a parameter of shape (E, rows, columns) is stored as (E * r, columns).

        PEFT has used this layout since version 0.19.
        """
        version = re.match(r"(\d{1,4})\.(\d{1,4})", self.peft_version or "")
        return version is not None and (int(version[1]), int(version[2])) >= (0, 19)


def read_config(path: Path) -> PeftConfig:
    """Read an adapter_config.json.

    Raises ConfigurationError if the file is malformed or the adapter is not plain LoRA.
    """
    what = str(path)
    try:
        config = json_files.parse(json_files.read_file(path, _MAX_BYTES))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigurationError(what, got=reason[:200], need="a PEFT config in JSON") from None
    if not isinstance(config, dict):
        raise ConfigurationError(what, got=type(config).__name__, need="an object")
    _check_plain_lora(what, config)
    for name, kind in _FIELDS:
        expect(f"{what}: {name}", config.get(name), kind)
    expect(f"{what}: use_rslora", use_rslora := config.get("use_rslora", False), bool)
    return PeftConfig(
        path=path,
        rank=_check_rank(f"{what}: r", config.get("r")),
        alpha=_check_alpha(f"{what}: lora_alpha", config.get("lora_alpha")),
        ranks={key: _check_rank(f"{what}: rank_pattern", value)
               for key, value in _read_patterns(what, config, "rank_pattern")},
        alphas={key: _check_alpha(f"{what}: alpha_pattern", value)
                for key, value in _read_patterns(what, config, "alpha_pattern")},
        use_rslora=use_rslora,
        layers=_read_layers(what, config),
        targets=_read_targets(config),
        peft_version=config.get("peft_version"),
    )  # fmt: skip


def _check_plain_lora(what: str, config: Mapping[str, Any]) -> None:
    """Raise ConfigurationError for methods other than LoRA, and for fields of LoRA variants."""
    if config.get("peft_type") != "LORA":
        got = _format_short(config.get("peft_type"))
        raise ConfigurationError(f"{what}: peft_type", got=got, need="LORA")
    if config.get("bias", "none") != "none":
        raise ConfigurationError(f"{what}: bias", got=_format_short(config["bias"]), need="none")
    for name, value in config.items():
        if value and name not in _IGNORED_FIELDS | _READ_FIELDS:
            need = "unset or false: only plain LoRA is supported"
            raise ConfigurationError(f"{what}: {name[:80]}", got=_format_short(value), need=need)


def _format_short(value: object) -> str:
    return repr(value)[:80]


def _check_rank(what: str, value: Any) -> int:
    expect(what, value, Count)
    rank: int = value
    return rank


def _check_alpha(what: str, value: Any) -> float:
    expect(what, value, int | float)
    try:
        alpha = float(value)
    except OverflowError:
        alpha = float("inf")
    if not isfinite(alpha):
        raise ConfigurationError(what, got=_format_short(value), need="a finite number")
    return alpha


def _read_patterns(what: str, config: Mapping[str, Any], name: str) -> list[tuple[str, Any]]:
    """Return (regular expression, value) for each item of a pattern field.

    Raises ConfigurationError for an invalid regular expression. The file may be untrusted, so an
    expression that could take exponential time to match is also rejected.
    """
    patterns = config.get(name) or {}
    if not isinstance(patterns, dict):
        raise ConfigurationError(f"{what}: {name}", got=_format_short(patterns), need="an object")
    for pattern in patterns:
        try:
            re.compile(pattern)
            re.compile(_make_suffix_pattern(pattern))  # fails if the pattern begins with flags
            is_valid = len(pattern) <= _MAX_PATTERN_LENGTH
        except (re.error, OverflowError, RecursionError):
            is_valid = False
        # Matching can take exponential time if groups are repeated or there are many repeats.
        unescaped = re.sub(r"\\.", "", pattern)
        has_repeated_group = re.search(r"\)[*+{?]", unescaped) is not None
        if not is_valid or has_repeated_group or len(re.findall(r"[*+{?]", unescaped)) > 3:
            need = f"a regular expression of at most {_MAX_PATTERN_LENGTH} characters and 3 repeats"
            raise ConfigurationError(f"{what}: {name}", got=_format_short(pattern), need=need)
    return list(patterns.items())


def _make_suffix_pattern(pattern: str) -> str:
    """Return a regular expression for names whose last components match `pattern`."""
    return rf"(.*\.)?({pattern})$"


def _find_first_match(patterns: Mapping[str, _Value], name: str, default: _Value) -> _Value:
    """Return the value of the first pattern that matches the end of a name, or `default`."""
    for pattern, value in patterns.items():
        if re.match(_make_suffix_pattern(pattern), name):
            return value
    return default


def _read_layers(what: str, config: Mapping[str, Any]) -> frozenset[int] | None:
    """Return the numbers of the layers with adapters, or None for all layers.

    As in PEFT, an empty list selects all layers.
    """
    layers = config.get("layers_to_transform")
    if layers is None:
        return None
    if isinstance(config.get("target_modules"), str):
        need = "none if target_modules is one pattern"
        raise ConfigurationError(
            f"{what}: layers_to_transform", got=_format_short(layers), need=need
        )
    return frozenset(layers if isinstance(layers, list) else [layers]) or None


def _read_targets(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of modules and parameters that have adapters in all included layers.

    Returns () if the config selects modules by a pattern or excludes some modules.
    """
    if config.get("exclude_modules"):
        return ()
    lists = [config.get(name) for name in ("target_modules", "target_parameters")]
    return tuple(name for names in lists if isinstance(names, list) for name in names)
