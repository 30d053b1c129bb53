"""adapter_config.json of PEFT: plain LoRA, or a typed error that names the field."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, sqrt
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from modular_kernel.errors import ConfigurationError
from modular_kernel.utils import json_files
from modular_kernel.utils.argument_checks import MOST, Between, Count, expect

_V = TypeVar("_V")
_MOST_BYTES = 1 << 20
_MOST_PATTERN = 256
# Fields that change no product: how it was trained, where it came from, which modules it targets.
_IDLE = frozenset((
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying",
    "eva_config", "exclude_modules", "inference_mode", "layers_pattern", "loftq_config",
    "lora_dropout", "lora_ga_config", "megatron_core", "qalora_group_size", "revision",
    "runtime_config", "task_type",
))  # fmt: skip
_READ = frozenset((
    "alpha_pattern", "bias", "init_lora_weights", "layers_to_transform", "lora_alpha",
    "peft_type", "peft_version", "r", "rank_pattern", "target_modules", "target_parameters",
    "use_rslora",
))  # fmt: skip
# Starts that leave the base model's weights as they are; others, as pissa, change them.
_Start = bool | Literal["gaussian", "eva", "orthogonal"] | None
_Layer = Annotated[int, Between(0, MOST)]
_FIELDS: tuple[tuple[str, Any], ...] = (
    ("exclude_modules", str | list[str] | None),
    ("init_lora_weights", _Start),
    ("layers_to_transform", _Layer | list[_Layer] | None),
    ("peft_version", str | None),
    ("target_modules", str | list[str] | None),
    ("target_parameters", list[str] | None),
)


@dataclass(frozen=True)
class PeftConfig:
    """What a config settles: ranks and scalings of modules, and which of them it is for.

    layers: None for all. targets: names of modules and parameters, () where a pattern has them.
    """

    path: Path
    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    root: bool
    layers: frozenset[int] | None
    targets: tuple[str, ...]
    peft_version: str | None

    def rank_and_scaling(self, module: str) -> tuple[int, float]:
        """Return the rank of a module and what its product is multiplied by."""
        name = module.removeprefix("base_model.model.")
        rank = _first_match(self.ranks, name, self.rank)
        alpha = _first_match(self.alphas, name, self.alpha)
        return rank, alpha / (sqrt(rank) if self.root else rank)

    def has_layer(self, layer: int) -> bool:
        """Tell whether the adapter is for this layer too."""
        return self.layers is None or layer in self.layers

    @property
    def swaps(self) -> bool:
        """Whether PEFT 0.19 or newer wrote it, where A of a fused weight has its columns."""
        numbers = re.match(r"(\d{1,4})\.(\d{1,4})", self.peft_version or "")
        return numbers is not None and (int(numbers[1]), int(numbers[2])) >= (0, 19)


def read_config(path: Path) -> PeftConfig:
    """Read an adapter_config.json; ConfigurationError for one that is not of plain LoRA."""
    what = str(path)
    try:
        found = json_files.parse(json_files.content(path, _MOST_BYTES))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigurationError(what, got=why[:200], need="a config of PEFT, JSON") from None
    if not isinstance(found, dict):
        raise ConfigurationError(what, got=type(found).__name__, need="an object")
    _refuse_others(what, found)
    for name, kind in _FIELDS:
        expect(f"{what}: {name}", found.get(name), kind)
    expect(f"{what}: use_rslora", root := found.get("use_rslora", False), bool)
    return PeftConfig(
        path=path,
        rank=_rank(f"{what}: r", found.get("r")),
        alpha=_alpha(f"{what}: lora_alpha", found.get("lora_alpha")),
        ranks={key: _rank(f"{what}: rank_pattern", value)
               for key, value in _patterns(what, found, "rank_pattern")},
        alphas={key: _alpha(f"{what}: alpha_pattern", value)
                for key, value in _patterns(what, found, "alpha_pattern")},
        root=root,
        layers=_layers(what, found),
        targets=_targets(found),
        peft_version=found.get("peft_version"),
    )  # fmt: skip


def _refuse_others(what: str, found: Mapping[str, Any]) -> None:
    """Refuse another method than LoRA, and each field that would change what LoRA computes."""
    if found.get("peft_type") != "LORA":
        got = _short(found.get("peft_type"))
        raise ConfigurationError(f"{what}: peft_type", got=got, need="LORA")
    if found.get("bias", "none") != "none":
        raise ConfigurationError(f"{what}: bias", got=_short(found["bias"]), need="none")
    for name, value in found.items():
        if value and name not in _IDLE | _READ:
            need = "it left out, or off: plain LoRA is read"
            raise ConfigurationError(f"{what}: {name[:80]}", got=_short(value), need=need)


def _short(value: object) -> str:
    return repr(value)[:80]


def _rank(what: str, value: Any) -> int:
    expect(what, value, Count)
    rank: int = value
    return rank


def _alpha(what: str, value: Any) -> float:
    expect(what, value, int | float)
    try:
        alpha = float(value)
    except OverflowError:
        alpha = float("inf")
    if not isfinite(alpha):
        raise ConfigurationError(what, got=_short(value), need="a finite number")
    return alpha


def _patterns(what: str, found: Mapping[str, Any], name: str) -> list[tuple[str, Any]]:
    """Return the items of a field of patterns, each a regular expression that ends in time."""
    given = found.get(name) or {}
    if not isinstance(given, dict):
        raise ConfigurationError(f"{what}: {name}", got=_short(given), need="an object")
    for pattern in given:
        try:
            re.compile(pattern)
            re.compile(_ending(pattern))  # flags at its start are none there
            whole = len(pattern) <= _MOST_PATTERN
        except (re.error, OverflowError, RecursionError):
            whole = False
        # A repeated group, or many repeats, can take time without end; no module needs them.
        bare = re.sub(r"\\.", "", pattern)
        if not whole or re.search(r"\)[*+{?]", bare) or len(re.findall(r"[*+{?]", bare)) > 3:
            need = f"a regular expression of at most {_MOST_PATTERN} characters and 3 repeats"
            raise ConfigurationError(f"{what}: {name}", got=_short(pattern), need=need)
    return list(given.items())


def _ending(pattern: str) -> str:
    return rf"(.*\.)?({pattern})$"


def _first_match(patterns: Mapping[str, _V], name: str, default: _V) -> _V:
    """Return the value of the first pattern that a name, or its end behind a dot, matches."""
    for pattern, value in patterns.items():
        if re.match(_ending(pattern), name):
            return value
    return default


def _layers(what: str, found: Mapping[str, Any]) -> frozenset[int] | None:
    """Return the layers that it is for, None for all: PEFT takes a list of none as no choice."""
    layers = found.get("layers_to_transform")
    if layers is None:
        return None
    if isinstance(found.get("target_modules"), str):
        need = "none beside target_modules as one pattern"
        raise ConfigurationError(f"{what}: layers_to_transform", got=_short(layers), need=need)
    return frozenset(layers if isinstance(layers, list) else [layers]) or None


def _targets(found: Mapping[str, Any]) -> tuple[str, ...]:
    """Return names that are targeted wherever they stand; none where something is excluded."""
    if found.get("exclude_modules"):
        return ()
    lists = [found.get(name) for name in ("target_modules", "target_parameters")]
    return tuple(name for each in lists if isinstance(each, list) for name in each)
