"""The quantization of each module of a model, from its quantization_config.

A config may exclude modules (`modules_to_not_convert`, `ignored_layers`, `ignore`,
`exclude_modules`), override options for some (`dynamic`, `extra_config`), or describe several
groups of modules (`config_groups`, `quantized_layers`). `ModuleQuantization.of` resolves all of
these for one module to a config without such entries, which `quantization_config.scheme_of` reads.

Entries that match no module of the model are accepted, as in vLLM and GPTQModel, because published
lists name modules of other model classes. The tensors of a checkpoint are checked against the
result when they are loaded.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from modular_kernel.errors import ConfigurationError
from modular_kernel.models import torchao_config
from modular_kernel.models.module_matcher import Entry, ModuleMatcher, PatternError, entry_of
from modular_kernel.models.quantization_config import (
    MIXED,
    UNQUANTIZED_KEYS,
    Config,
    check_method,
    config_error,
    shorten,
)
from modular_kernel.models.quantization_keys import is_empty

# Prefixes of the language model's layers, which differ between classes of one model. Lists use the
# names of one class, files those of another.
_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "backbone.")
_LAYER_NAME = re.compile(
    r"(?:model\.|model\.language_model\.|language_model\.model\.|language_model\.|backbone\.)?"
    r"((?:layers|blocks|h)\.\d+(?:\..*)?)",
    re.ASCII,
)
# The module of Mixtral's and MiniMax's experts in files, and in transformers since 5.0.
_OLD_BLOCK, _NEW_BLOCK = ".block_sparse_moe.", ".mlp."
_MAX_UNKNOWN_LAYER = 100  # layers up to this number are tried if the number of layers is unknown
_UNQUANTIZED_BITS = 16  # auto-round lists modules with at least this many bits as not quantized
_LINEAR_CLASSES = ("Linear", "LinearBase")  # names of classes that include experts
# Digits in an entry that cannot be the number of an expert: those of a layer, or after a letter.
_NON_EXPERT_DIGITS = re.compile(
    r"(?:layers|blocks|h)\.(?:\((?:\?:)?[\d|\[\]\-]+\)|\[[\d\-]+\]|\d+)|(?<!\\)[A-Za-z_]\d+",
    re.ASCII,
)
_OTHER_EXPERTS = re.compile(r"shared|mtp|vis(?:ion|ual)", re.ASCII)

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class ModuleConfig:
    """The quantization of one module.

    config: a quantization_config without lists of modules; None for an unquantized module.
    number: id of `config`; equal configs have equal ids. reason: the entry of the
    quantization_config that determined it, for messages; "" if none did.
    """

    config: Config | None
    number: int
    reason: str = ""


class _EntryList:
    """A list of entries with their labels, which messages show, and a matcher for them."""

    def __init__(self, path: str, entries: Sequence[tuple[str, Entry]]) -> None:
        self.labels = [label for label, _ in entries]
        self.text = " ".join(entry.text for _, entry in entries)
        try:
            self._matcher = ModuleMatcher([entry for _, entry in entries])
        except PatternError:
            _raise_bad_entry(path, entries)

    def first(self, names: Sequence[str]) -> int | None:
        return self._matcher.first(names) if self.labels else None


def _raise_bad_entry(path: str, entries: Sequence[tuple[str, Entry]]) -> None:
    """Raise ConfigurationError for the first invalid entry, or for too many entries."""
    for label, entry in entries:
        try:
            ModuleMatcher([entry])
        except PatternError as error:
            raise config_error(path, label, f"a pattern of names with {error}") from None
    raise config_error(path, f"{len(entries)} patterns", "fewer or shorter patterns")


class ModuleQuantization:
    """The quantization of each module of a model.

    path: path of the config.json, for messages. quantization: its quantization_config, or None for
    an unquantized model. Raises ConfigurationError for an unknown method, unknown keys and patterns
    that are refused.
    """

    def __init__(self, path: str, quantization: object) -> None:
        self.path = path
        self.config: Config | None = None
        if quantization is not None:
            self.config = check_method(path, quantization)
        config = self.config or {}
        self._numbers: dict[str, int] = {}
        self._configs_by_entry: dict[object, ModuleConfig] = {}
        self._used_groups = set[int]()
        self._excluded = _EntryList(path, [*_excluded_entries(path, config)])
        self._excludes_linear = any(
            name in _LINEAR_CLASSES for key in UNQUANTIZED_KEYS for name in config.get(key) or ()
        )
        self._included = _EntryList(path, [*_included_entries(path, config)])
        self._overrides = [*_overrides(path, config)]
        self._override_names = _EntryList(
            path, [(label, entry) for label, entry, _ in self._overrides]
        )
        self._layers = _quantized_layers(path, config)
        self._groups = _groups(path, config)
        self._group_entries = [*_group_entries(path, self._groups)]
        self._target_names = [
            self._named_targets(regex) for regex in (False, True) if self._group_entries
        ]
        texts = [self._excluded.text, self._included.text, self._override_names.text]
        texts += [*self._layers, *(text for _, text in self._group_entries)]
        text = "\n".join(texts).replace("\\.", ".")
        self._prefixes = tuple(prefix for prefix in _PREFIXES if prefix in text)
        # Numbers in entries, which may distinguish layers, or experts of a layer.
        self._named_numbers = {int(digits[:9]) for digits in re.findall(r"\d+", text, re.ASCII)}
        rest = _NON_EXPERT_DIGITS.sub("", text)
        self._names_experts = bool(re.search(r"\d", rest, re.ASCII))
        self._base = {
            key: value
            for key, value in config.items()
            if key not in (*UNQUANTIZED_KEYS, "dynamic", "extra_config", "layer_quant_config")
            and key not in ("modules_in_block_to_quantize", torchao_config.NAMES)
            and not (key == "quantized_layers" and self._layers)
        }

    def of(self, module: str) -> ModuleConfig:
        """Return the quantization of the module with this name.

        Raises ConfigurationError if config_groups with different options target it.
        """
        if self.config is None:
            return ModuleConfig(None, -1)
        names = [module]
        match = _LAYER_NAME.fullmatch(module)
        if match is not None:
            names += [prefix + match[1] for prefix in self._prefixes]
        if _OLD_BLOCK in module:
            names += [name.replace(_OLD_BLOCK, _NEW_BLOCK) for name in names]
        number = self._excluded.first(names)
        if number is not None:
            return ModuleConfig(None, -1, self._excluded.labels[number])
        if self._excludes_linear:
            return ModuleConfig(None, -1, "every Linear is excluded")
        if self._included.labels and self._included.first(names) is None:
            return ModuleConfig(None, -1, "modules_in_block_to_quantize has no entry for it")
        if self._layers:
            return self._of_quantized_layer(names)
        if self._group_entries:
            return self._of_group(module, names)
        if torchao_config.NAMES in self.config:
            names += [f"{name}.weight" for name in names]
        number = self._override_names.first(names)
        return self._cached(number, lambda: self._with_overrides(number))

    def layers_to_try(self, layers: Sequence[int] | None) -> Sequence[int]:
        """Return the numbers of layers that represent all layers of the model.

        layers: the numbers of the model's layers, which are returned as they are; None if unknown.
        """
        if layers is not None:
            return layers
        # If entries have no numbers, they can only distinguish layers by the length of the number.
        numbers = range(_MAX_UNKNOWN_LAYER + 1) if self._named_numbers else (0, 10, 100)
        return sorted({*numbers, *self._named_numbers})

    def experts_to_try(self, experts: int) -> Sequence[int]:
        """Return the numbers of experts that represent all experts of a layer.

        If entries have no numbers of experts, they can only distinguish experts by the length of
        the number.
        """
        if self._names_experts:
            return range(experts)
        return [0, *(10**length for length in range(1, len(str(experts - 1))))]

    def check_used(self) -> None:
        """Raise ConfigurationError for a group that targets experts but has matched no module.

        Call this after `of` was called for the modules of all experts.
        """
        for number, name in enumerate(self._groups):
            targets = [text for index, text in self._group_entries if index == number]
            targets_experts = all(
                "expert" in text and not _OTHER_EXPERTS.search(text) for text in targets
            )
            if targets and targets_experts and number not in self._used_groups:
                need = "targets that match modules of the model's experts"
                got = f"config_groups.{name}: targets {shorten(targets)}, which match none"
                raise config_error(self.path, got, need)

    def _of_quantized_layer(self, names: Sequence[str]) -> ModuleConfig:
        """Return the entry of modelopt's quantized_layers for a module or one that contains it."""
        for name in names:
            while name:
                if name in self._layers:
                    return self._of_layer(name)
                name = name.rpartition(".")[0]
        return ModuleConfig(None, -1, "quantized_layers has no entry for it")

    def _of_layer(self, name: str) -> ModuleConfig:
        options = self._layers[name]
        skipped = ("config_groups", "weights", "input_activations")
        base = {key: value for key, value in self._base.items() if key not in skipped}
        config = base | dict(options) | {"quant_algo": str(options["quant_algo"]).upper()}
        label = f"quantized_layers.{name} = {shorten(options)}"
        return self._cached(json.dumps(options, sort_keys=True), lambda: (config, label))

    def _of_group(self, module: str, names: Sequence[str]) -> ModuleConfig:
        """Return the config of the group that targets a module.

        An exact name comes before a regex, and a regex before a class, as in compressed-tensors.
        """
        for forward, backward, numbers in self._target_names:
            first, last = forward.first(names), backward.first(names)
            if first is not None and last is not None:
                return self._one_group(module, numbers[first], numbers[len(numbers) - 1 - last])
        classes = [number for number, text in self._group_entries if text in _LINEAR_CLASSES]
        if not classes:
            return ModuleConfig(None, -1, "no config_groups entry targets it")
        different = [number for number in classes if self._differ(number, classes[0])]
        return self._one_group(module, classes[0], different[0] if different else classes[0])

    def _one_group(self, module: str, first: int, last: int) -> ModuleConfig:
        names = list(self._groups)
        if self._differ(first, last):
            got = f"config_groups {names[first]!r} and {names[last]!r} that target {module}"
            raise config_error(self.path, got, "one group for each module")
        self._used_groups |= {first, last}
        name = names[first]
        config = self._base | {
            "config_groups": {name: self._groups[name] | {"targets": ["Linear"]}}
        }
        return self._cached(("group", first), lambda: (config, f"config_groups.{name}"))

    def _differ(self, first: int, second: int) -> bool:
        groups = list(self._groups.values())
        one, other = (
            {key: value for key, value in groups[number].items() if key != "targets"}
            for number in (first, second)
        )
        return one != other

    def _named_targets(self, regex: bool) -> tuple[_EntryList, _EntryList, list[int]]:
        """Return the targets that are regexes, or names, and the numbers of their groups.

        The targets are returned in their order and in reverse order, to find the first and the last
        one that matches.
        """
        targets = [
            (number, text)
            for number, text in self._group_entries
            if text.startswith("re:") == regex and text not in _LINEAR_CLASSES
        ]
        entries = [
            (f"config_groups has target {shorten(text)}", entry_of(text)) for _, text in targets
        ]
        forward, backward = _EntryList(self.path, entries), _EntryList(self.path, entries[::-1])
        return forward, backward, [number for number, _ in targets]

    def _with_overrides(self, number: int | None) -> tuple[Config | None, str]:
        if number is None:
            return self._base, ""
        label, _, options = self._overrides[number]
        if options is None:
            return None, label
        bits = options.get("bits")
        if type(bits) is int and bits >= _UNQUANTIZED_BITS and label.startswith("extra_config"):
            return None, label
        return self._base | dict(options), label

    def _cached(self, key: object, make: Callable[[], tuple[Config | None, str]]) -> ModuleConfig:
        module_config = self._configs_by_entry.get(key)
        if module_config is None:
            config, reason = make()
            text = json.dumps(config, sort_keys=True, default=str)
            number = -1 if config is None else self._numbers.setdefault(text, len(self._numbers))
            module_config = self._configs_by_entry[key] = ModuleConfig(config, number, reason)
        return module_config


def _excluded_entries(path: str, config: Config) -> Iterator[tuple[str, Entry]]:
    for key in UNQUANTIZED_KEYS:
        names = config.get(key)
        if not isinstance(names, list | None):
            raise config_error(path, f"{key} = {shorten(names)}", "a list")
        for name in names or []:
            if not isinstance(name, str) or not name.strip("."):
                raise config_error(path, f"{key} has {shorten(name)}", "names of modules")
            if name not in _LINEAR_CLASSES:
                yield f"{key} has {shorten(name)}", entry_of(name)


def _included_entries(path: str, config: Config) -> Iterator[tuple[str, Entry]]:
    key = "modules_in_block_to_quantize"
    pending = [config.get(key) or []]
    while pending:
        item = pending.pop()
        if isinstance(item, list):
            pending += item
        elif isinstance(item, str) and item.strip("."):
            yield f"{key} has {shorten(item)}", Entry(item, "modules")
        else:
            raise config_error(path, f"{key} has {shorten(item)}", "names of modules")


def _overrides(path: str, config: Config) -> Iterator[tuple[str, Entry, Mapping[str, Any] | None]]:
    """Yield (label, entry, options) of the options by module. None means not quantized."""
    for pattern, options in _objects(path, config, "dynamic"):
        text = pattern[2:] if pattern[:2] in ("-:", "+:") else pattern
        is_skipped = pattern.startswith("-:") or options is False
        label = f"dynamic has {shorten(pattern)}"
        yield label, Entry(text, "regex"), _options(path, label, None if is_skipped else options)
    for name, options in _objects(path, config, torchao_config.NAMES):
        label = f"{torchao_config.NAMES} has {shorten(name)}"
        yield label, _torchao_entry(name), options or None
    for name, options in _objects(path, config, "layer_quant_config"):
        label = f"layer_quant_config has {shorten(name)}"
        yield label, entry_of(name), {"global_quant_config": options}
    exact, patterns = list[tuple[str, Any]](), list[tuple[str, Any]]()
    for name, options in _objects(path, config, "extra_config"):
        is_pattern = not re.fullmatch(r"[\w.\-]+", name, re.ASCII)
        (patterns if is_pattern else exact).append((name, options))
    for kind, named in (("modules", exact), ("search", patterns)):
        for name, options in named:
            label = f"extra_config has {shorten(name)}"
            # auto-round also lists modules without options of their own.
            yield label, Entry(name, kind), _options(path, label, options or {})  # type: ignore[arg-type]


def _torchao_entry(name: str) -> Entry:
    """Return the entry of a name, or of a regex for whole names, of modules or their weights."""
    if name == "_default":
        return Entry(".*", "regex")
    pattern = name[3:] if name.startswith("re:") else re.escape(name)
    return Entry(pattern, "module regex")


def _options(path: str, label: str, options: Any) -> Mapping[str, Any] | None:
    if options is not None and not isinstance(options, Mapping):
        raise config_error(path, f"{label} = {shorten(options)}", "an object of options")
    return options


def _objects(path: str, config: Config, key: str) -> Iterator[tuple[str, Any]]:
    entries = config.get(key)
    if not isinstance(entries, dict | None):
        raise config_error(path, f"{key} = {shorten(entries)}", "an object")
    for name, value in (entries or {}).items():
        if not isinstance(name, str) or not name.strip("+-:."):
            raise config_error(path, f"{key} has {shorten(name)}", "names of modules")
        yield name, value if value is not None else {}


def _quantized_layers(path: str, config: Config) -> dict[str, Mapping[str, Any]]:
    if str(config.get("quant_algo")).upper() != MIXED or "quant_method" not in config:
        return {}
    layers = dict(_objects(path, config, "quantized_layers"))
    if not layers:
        raise config_error(path, f"quant_algo = {MIXED}", "quantized_layers that are not empty")
    for name, options in layers.items():
        if not isinstance(options, Mapping) or is_empty(options.get("quant_algo")):
            got = f"quantized_layers.{name} = {shorten(options)}"
            raise config_error(path, got, "an object with a quant_algo")
    return layers


def _groups(path: str, config: Config) -> dict[str, Config]:
    """Return the config_groups of compressed-tensors."""
    if config.get("quant_method") != "compressed-tensors":
        return {}
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise config_error(path, f"config_groups = {shorten(groups)}", "an object of objects")
    if not all(isinstance(group, dict) for group in groups.values()):
        raise config_error(path, f"config_groups = {shorten(groups)}", "an object of objects")
    return groups


def _group_entries(path: str, groups: Mapping[str, Config]) -> Iterator[tuple[int, str]]:
    for number, (name, group) in enumerate(groups.items()):
        targets = group.get("targets")
        if not isinstance(targets, list) or not targets:
            raise config_error(path, f"config_groups.{name}: targets {shorten(targets)}", "a list")
        for target in targets:
            if not isinstance(target, str) or not target.strip("."):
                got = f"config_groups.{name} has target {shorten(target)}"
                raise config_error(path, got, "names of modules")
            yield number, target


def common_value(
    quantization: ModuleQuantization,
    modules: Iterable[str],
    read: Callable[[Config | None], _Value],
    what: str,
) -> _Value:
    """Return the value that `read` returns for every one of the modules.

    read: function that takes the quantization_config of a module, or None for an unquantized one.
    what: what the modules are, for messages. Raises ConfigurationError, with two modules and their
    values, if the values differ.
    """
    first: tuple[str, ModuleConfig] | None = None
    values: dict[int, _Value] = {}
    for module in modules:
        module_config = quantization.of(module)
        if module_config.number not in values:
            values[module_config.number] = read(module_config.config)
        first = first or (module, module_config)
        if values[module_config.number] != values[first[1].number]:
            got = " and ".join(
                f"{values[each.number]} of {name}{f' ({each.reason})' if each.reason else ''}"
                for name, each in (first, (module, module_config))
            )
            raise ConfigurationError(
                f"model {quantization.path[:200]}: quantization_config: {what}",
                got=got,
                need="one format for all experts of a layer",
            )
    assert first is not None
    return values[first[1].number]
