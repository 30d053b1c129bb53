"""Resolves a quantization_config for single modules.

A quantization_config may exclude modules (`modules_to_not_convert`, `ignored_layers`, `ignore`,
`exclude_modules`), override the options of some modules (`dynamic`, `extra_config`), or describe
several groups of modules (`config_groups`, `quantized_layers`). `ModuleQuantization.config_of`
returns the options of one module as a quantization_config without these entries, which
`quantization_config.scheme_of` reads.

Entries that match no module of the model are accepted, as in vLLM and GPTQModel, because published
lists also name modules of other model classes. Loading compares the tensors in the files with the
result.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from modular_kernel.errors import ConfigurationError
from modular_kernel.models import torchao_config
from modular_kernel.models.module_matcher import Entry, ModuleMatcher, PatternError, parse_entry
from modular_kernel.models.quantization_config import (
    MIXED,
    UNQUANTIZED_KEYS,
    Config,
    canonicalize_config,
    config_error,
    shorten,
)
from modular_kernel.models.quantization_keys import is_empty

# Prefixes of the language model's layers. Names in lists and in files may come from different
# classes of a model, which have different prefixes.
_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "backbone.")
_LAYER_NAME = re.compile(
    r"(?:model\.|model\.language_model\.|language_model\.model\.|language_model\.|backbone\.)?"
    r"((?:layers|blocks|h)\.\d+(?:\..*)?)",
    re.ASCII,
)
# The module of Mixtral's and MiniMax's experts in files, and in transformers 5.0 and newer.
_OLD_BLOCK, _NEW_BLOCK = ".block_sparse_moe.", ".mlp."
_MAX_UNKNOWN_LAYER = 100  # highest layer that is tried if the number of layers is unknown
_UNQUANTIZED_BITS = 16  # auto-round lists unquantized modules with this many bits or more
_LINEAR_CLASSES = ("Linear", "LinearBase")  # class names that stand for all linear modules
# Digits that are not the number of an expert: the number of a layer, and digits after a letter.
_NON_EXPERT_DIGITS = re.compile(
    r"(?:layers|blocks|h)\.(?:\((?:\?:)?[\d|\[\]\-]+\)|\[[\d\-]+\]|\d+)|(?<!\\)[A-Za-z_]\d+",
    re.ASCII,
)
_OTHER_EXPERTS = re.compile(r"shared|mtp|vis(?:ion|ual)", re.ASCII)  # not the routed experts

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class ModuleConfig:
    """The quantization of one module.

    config: a quantization_config without entries for other modules; None for an unquantized module.
    number: id of `config`. Equal configs have equal ids.
    reason: the entry of the model's quantization_config that applies, for messages; "" if none.
    """

    config: Config | None
    number: int
    reason: str = ""


class _EntryList:
    """A list of entries, a matcher for them, and labels that describe them in messages."""

    def __init__(self, path: str, entries: Sequence[tuple[str, Entry]]) -> None:
        self.labels = [label for label, _ in entries]
        self.text = " ".join(entry.text for _, entry in entries)
        try:
            self._matcher = ModuleMatcher([entry for _, entry in entries])
        except PatternError:
            _raise_bad_entry(path, entries)

    def first_match(self, names: Sequence[str]) -> int | None:
        return self._matcher.first_match(names) if self.labels else None


def _raise_bad_entry(path: str, entries: Sequence[tuple[str, Entry]]) -> None:
    """Raise ConfigurationError for the first invalid entry, or for too many entries."""
    for label, entry in entries:
        try:
            ModuleMatcher([entry])
        except PatternError as error:
            raise config_error(path, label, f"a pattern of names with {error}") from None
    raise config_error(path, f"{len(entries)} patterns", "fewer or shorter patterns")


class ModuleQuantization:
    """The quantization of the modules of a model.

    path: path of the config.json, for messages.
    quantization: the quantization_config; None for an unquantized model.

    Raises ConfigurationError for an unknown method or key, and for patterns with unsupported
    syntax.
    """

    def __init__(self, path: str, quantization: object) -> None:
        self.path = path
        self.config: Config | None = None
        if quantization is not None:
            self.config = canonicalize_config(path, quantization)
        config = self.config or {}
        self._numbers: dict[str, int] = {}
        self._configs_by_entry: dict[object, ModuleConfig] = {}
        self._used_groups = set[int]()
        self._excluded = _EntryList(path, [*_parse_excluded_entries(path, config)])
        self._excludes_linear = any(
            name in _LINEAR_CLASSES for key in UNQUANTIZED_KEYS for name in config.get(key) or ()
        )
        self._included = _EntryList(path, [*_parse_included_entries(path, config)])
        self._overrides = [*_parse_overrides(path, config)]
        self._override_names = _EntryList(
            path, [(label, entry) for label, entry, _ in self._overrides]
        )
        self._layers = _read_quantized_layers(path, config)
        self._groups = _read_groups(path, config)
        self._group_entries = [*_list_group_entries(path, self._groups)]
        self._target_names = [
            self._list_targets(regex) for regex in (False, True) if self._group_entries
        ]
        texts = [self._excluded.text, self._included.text, self._override_names.text]
        texts += [*self._layers, *(text for _, text in self._group_entries)]
        text = "\n".join(texts).replace("\\.", ".")
        self._prefixes = tuple(prefix for prefix in _PREFIXES if prefix in text)
        # Entries with numbers may distinguish layers, or the experts of a layer.
        self._named_numbers = {int(digits[:9]) for digits in re.findall(r"\d+", text, re.ASCII)}
        without_layers = _NON_EXPERT_DIGITS.sub("", text)
        self._names_experts = bool(re.search(r"\d", without_layers, re.ASCII))
        self._base = {
            key: value
            for key, value in config.items()
            if key not in (*UNQUANTIZED_KEYS, "dynamic", "extra_config", "layer_quant_config")
            and key not in ("modules_in_block_to_quantize", torchao_config.OPTIONS_BY_NAME)
            and not (key == "quantized_layers" and self._layers)
        }

    def config_of(self, module: str) -> ModuleConfig:
        """Return the quantization of a module by its name.

        Raises ConfigurationError if config_groups with different options target the module.
        """
        if self.config is None:
            return ModuleConfig(None, -1)
        names = [module]
        match = _LAYER_NAME.fullmatch(module)
        if match is not None:
            names += [prefix + match[1] for prefix in self._prefixes]
        if _OLD_BLOCK in module:
            names += [name.replace(_OLD_BLOCK, _NEW_BLOCK) for name in names]
        number = self._excluded.first_match(names)
        if number is not None:
            return ModuleConfig(None, -1, self._excluded.labels[number])
        if self._excludes_linear:
            return ModuleConfig(None, -1, "every Linear is excluded")
        if self._included.labels and self._included.first_match(names) is None:
            return ModuleConfig(None, -1, "modules_in_block_to_quantize has no entry for it")
        if self._layers:
            return self._find_quantized_layer(names)
        if self._group_entries:
            return self._find_group(module, names)
        if torchao_config.OPTIONS_BY_NAME in self.config:
            names += [f"{name}.weight" for name in names]
        number = self._override_names.first_match(names)
        return self._get_or_make_config(number, lambda: self._apply_override(number))

    def representative_layers(self, layers: Sequence[int] | None) -> Sequence[int]:
        """Return the layers to look up in order to find all configs of the model.

        layers: numbers of the model's layers, which are returned unchanged; None if they are
            unknown.
        """
        if layers is not None:
            return layers
        # Patterns without numbers can distinguish layers only by the number of digits.
        numbers = range(_MAX_UNKNOWN_LAYER + 1) if self._named_numbers else (0, 10, 100)
        return sorted({*numbers, *self._named_numbers})

    def representative_experts(self, experts: int) -> Sequence[int]:
        """Return the experts to look up in order to find all configs in a layer.

        experts: number of experts in a layer.
        """
        if self._names_experts:
            return range(experts)
        # Patterns without numbers can distinguish experts only by the number of digits.
        return [0, *(10**length for length in range(1, len(str(experts - 1))))]

    def check_groups_used(self) -> None:
        """Raise ConfigurationError if a config_groups entry for experts has matched no module.

        Call this after `config_of` for the modules of all experts.
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

    def _find_quantized_layer(self, names: Sequence[str]) -> ModuleConfig:
        """Look up a module, or a module that contains it, in modelopt's quantized_layers.

        names: alternative names of the module.
        """
        for name in names:
            while name:
                if name in self._layers:
                    return self._make_quantized_layer_config(name)
                name = name.rpartition(".")[0]
        return ModuleConfig(None, -1, "quantized_layers has no entry for it")

    def _make_quantized_layer_config(self, name: str) -> ModuleConfig:
        options = self._layers[name]
        skipped = ("config_groups", "weights", "input_activations")
        base = {key: value for key, value in self._base.items() if key not in skipped}
        config = base | dict(options) | {"quant_algo": str(options["quant_algo"]).upper()}
        label = f"quantized_layers.{name} = {shorten(options)}"
        return self._get_or_make_config(
            json.dumps(options, sort_keys=True), lambda: (config, label)
        )

    def _find_group(self, module: str, names: Sequence[str]) -> ModuleConfig:
        """Look up a module in the targets of config_groups.

        As in compressed-tensors, an exact name takes precedence over a regex, and a regex takes
        precedence over a class.

        names: alternative names of the module.
        """
        for forward, backward, numbers in self._target_names:
            first, last = forward.first_match(names), backward.first_match(names)
            if first is not None and last is not None:
                last_group = numbers[len(numbers) - 1 - last]
                return self._make_group_config(module, numbers[first], last_group)
        classes = [number for number, text in self._group_entries if text in _LINEAR_CLASSES]
        if not classes:
            return ModuleConfig(None, -1, "no config_groups entry targets it")
        different = [number for number in classes if self._options_differ(number, classes[0])]
        return self._make_group_config(
            module, classes[0], different[0] if different else classes[0]
        )

    def _make_group_config(self, module: str, first: int, last: int) -> ModuleConfig:
        """Return the config of two groups that target a module, whose options must be equal."""
        names = list(self._groups)
        if self._options_differ(first, last):
            got = f"config_groups {names[first]!r} and {names[last]!r} that target {module}"
            raise config_error(self.path, got, "one group for each module")
        self._used_groups |= {first, last}
        name = names[first]
        config = self._base | {
            "config_groups": {name: self._groups[name] | {"targets": ["Linear"]}}
        }
        return self._get_or_make_config(("group", first), lambda: (config, f"config_groups.{name}"))

    def _options_differ(self, first: int, second: int) -> bool:
        groups = list(self._groups.values())
        first_options, second_options = (
            {key: value for key, value in groups[number].items() if key != "targets"}
            for number in (first, second)
        )
        return first_options != second_options

    def _list_targets(self, regex: bool) -> tuple[_EntryList, _EntryList, list[int]]:
        """Return the targets of config_groups that are regexes, or that are names.

        Returns (targets in order, targets in reverse order, number of each target's group). The
        reverse order finds the last target that matches.
        """
        targets = [
            (number, text)
            for number, text in self._group_entries
            if text.startswith("re:") == regex and text not in _LINEAR_CLASSES
        ]
        entries = [
            (f"config_groups has target {shorten(text)}", parse_entry(text)) for _, text in targets
        ]
        forward, backward = _EntryList(self.path, entries), _EntryList(self.path, entries[::-1])
        return forward, backward, [number for number, _ in targets]

    def _apply_override(self, number: int | None) -> tuple[Config | None, str]:
        """Return the config with the override at index `number`, and the override's label."""
        if number is None:
            return self._base, ""
        label, _, options = self._overrides[number]
        if options is None:
            return None, label
        bits = options.get("bits")
        if type(bits) is int and bits >= _UNQUANTIZED_BITS and label.startswith("extra_config"):
            return None, label
        return self._base | dict(options), label

    def _get_or_make_config(
        self, key: object, make_config: Callable[[], tuple[Config | None, str]]
    ) -> ModuleConfig:
        module_config = self._configs_by_entry.get(key)
        if module_config is None:
            config, reason = make_config()
            text = json.dumps(config, sort_keys=True, default=str)
            number = -1 if config is None else self._numbers.setdefault(text, len(self._numbers))
            module_config = self._configs_by_entry[key] = ModuleConfig(config, number, reason)
        return module_config


def _parse_excluded_entries(path: str, config: Config) -> Iterator[tuple[str, Entry]]:
    for key in UNQUANTIZED_KEYS:
        names = config.get(key)
        if not isinstance(names, list | None):
            raise config_error(path, f"{key} = {shorten(names)}", "a list")
        for name in names or []:
            if not isinstance(name, str) or not name.strip("."):
                raise config_error(path, f"{key} has {shorten(name)}", "names of modules")
            if name not in _LINEAR_CLASSES:
                yield f"{key} has {shorten(name)}", parse_entry(name)


def _parse_included_entries(path: str, config: Config) -> Iterator[tuple[str, Entry]]:
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


def _parse_overrides(
    path: str, config: Config
) -> Iterator[tuple[str, Entry, Mapping[str, Any] | None]]:
    """Yield (label, entry, options) for options by module. None means unquantized."""
    for pattern, options in _iterate_objects(path, config, "dynamic"):
        text = pattern[2:] if pattern[:2] in ("-:", "+:") else pattern
        is_skipped = pattern.startswith("-:") or options is False
        label = f"dynamic has {shorten(pattern)}"
        yield (
            label,
            Entry(text, "regex"),
            _check_options(path, label, None if is_skipped else options),
        )
    for name, options in _iterate_objects(path, config, torchao_config.OPTIONS_BY_NAME):
        label = f"{torchao_config.OPTIONS_BY_NAME} has {shorten(name)}"
        yield label, _make_torchao_entry(name), options or None
    for name, options in _iterate_objects(path, config, "layer_quant_config"):
        label = f"layer_quant_config has {shorten(name)}"
        yield label, parse_entry(name), {"global_quant_config": options}
    exact, patterns = list[tuple[str, Any]](), list[tuple[str, Any]]()
    for name, options in _iterate_objects(path, config, "extra_config"):
        is_pattern = not re.fullmatch(r"[\w.\-]+", name, re.ASCII)
        (patterns if is_pattern else exact).append((name, options))
    for kind, options_by_name in (("modules", exact), ("search", patterns)):
        for name, options in options_by_name:
            label = f"extra_config has {shorten(name)}"
            # auto-round also lists modules without options.
            yield label, Entry(name, kind), _check_options(path, label, options or {})  # type: ignore[arg-type]


def _make_torchao_entry(name: str) -> Entry:
    """Return the entry for a key of torchao's FqnToConfig.

    A key is the name of a module or of its weight, "re:" and a regex for whole names, or "_default"
    for all modules.
    """
    if name == "_default":
        return Entry(".*", "regex")
    pattern = name[3:] if name.startswith("re:") else re.escape(name)
    return Entry(pattern, "module regex")


def _check_options(path: str, label: str, options: Any) -> Mapping[str, Any] | None:
    if options is not None and not isinstance(options, Mapping):
        raise config_error(path, f"{label} = {shorten(options)}", "an object of options")
    return options


def _iterate_objects(path: str, config: Config, key: str) -> Iterator[tuple[str, Any]]:
    entries = config.get(key)
    if not isinstance(entries, dict | None):
        raise config_error(path, f"{key} = {shorten(entries)}", "an object")
    for name, value in (entries or {}).items():
        if not isinstance(name, str) or not name.strip("+-:."):
            raise config_error(path, f"{key} has {shorten(name)}", "names of modules")
        yield name, value if value is not None else {}


def _read_quantized_layers(path: str, config: Config) -> dict[str, Mapping[str, Any]]:
    if str(config.get("quant_algo")).upper() != MIXED or "quant_method" not in config:
        return {}
    layers = dict(_iterate_objects(path, config, "quantized_layers"))
    if not layers:
        raise config_error(path, f"quant_algo = {MIXED}", "quantized_layers that are not empty")
    for name, options in layers.items():
        if not isinstance(options, Mapping) or is_empty(options.get("quant_algo")):
            got = f"quantized_layers.{name} = {shorten(options)}"
            raise config_error(path, got, "an object with a quant_algo")
    return layers


def _read_groups(path: str, config: Config) -> dict[str, Config]:
    if config.get("quant_method") != "compressed-tensors":
        return {}
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise config_error(path, f"config_groups = {shorten(groups)}", "an object of objects")
    if not all(isinstance(group, dict) for group in groups.values()):
        raise config_error(path, f"config_groups = {shorten(groups)}", "an object of objects")
    return groups


def _list_group_entries(path: str, groups: Mapping[str, Config]) -> Iterator[tuple[int, str]]:
    for number, (name, group) in enumerate(groups.items()):
        targets = group.get("targets")
        if not isinstance(targets, list) or not targets:
            raise config_error(path, f"config_groups.{name}: targets {shorten(targets)}", "a list")
        for target in targets:
            if not isinstance(target, str) or not target.strip("."):
                got = f"config_groups.{name} has target {shorten(target)}"
                raise config_error(path, got, "names of modules")
            yield number, target


def find_common_value(
    quantization: ModuleQuantization,
    modules: Iterable[str],
    read: Callable[[Config | None], _Value],
    what: str,
) -> _Value:
    """Return the value that `read` returns for all modules.

    modules: one or more names.
    read: function of a module's quantization_config, which is None for an unquantized module.
    what: description of the modules, for messages.

    Raises ConfigurationError, with two modules and their values, if the values differ.
    """
    first: tuple[str, ModuleConfig] | None = None
    values: dict[int, _Value] = {}
    for module in modules:
        module_config = quantization.config_of(module)
        if module_config.number not in values:
            values[module_config.number] = read(module_config.config)
        first = first or (module, module_config)
        if values[module_config.number] != values[first[1].number]:
            got = " and ".join(
                f"{values[config.number]} of {name}{f' ({config.reason})' if config.reason else ''}"
                for name, config in (first, (module, module_config))
            )
            raise ConfigurationError(
                f"model {quantization.path[:200]}: quantization_config: {what}",
                got=got,
                need="one format for all experts of a layer",
            )
    assert first is not None
    return values[first[1].number]
