"""Finds a module's storage format by name, from the quantization_config of a checkpoint.

    formats = QuantizationMap(config["quantization_config"])
    formats.format_of("model.layers.3.mlp.experts.0.gate_proj")  # None if unquantized

The modules of a checkpoint may have different formats, but all experts of a layer must have the
same format.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from modular_kernel.checkpoints.formats import Format, format_of
from modular_kernel.models.layer_quantization import SchemeReader
from modular_kernel.models.module_quantization import ModuleQuantization, find_common_value
from modular_kernel.utils.argument_checks import Count, expect

UNQUANTIZED = format_of(None)


class QuantizationMap:
    """The storage formats of a checkpoint's modules.

    quantization: the quantization_config; None for an unquantized checkpoint.
    path: path of the config.json, for messages.
    depth: max(H, I) of the layer, as for `formats.format_of`.
    expert_dtype: the value of "expert_dtype" in the config.json.

    Raises ConfigurationError for an unknown method or key, and for name patterns with unsupported
    syntax. Formats are read on first use, so an unsupported format raises an error only when one of
    its modules is looked up.
    """

    def __init__(
        self,
        quantization: Mapping[str, Any] | None,
        *,
        path: str = "config.json",
        depth: int | None = None,
        expert_dtype: object = None,
    ) -> None:
        expect("path", path, str)
        expect("depth", depth, Count | None)
        config = dict(quantization) if isinstance(quantization, Mapping) else quantization
        self._quantization = ModuleQuantization(path, config)
        self._read_scheme = SchemeReader(path, {"expert_dtype": expert_dtype}, depth)
        self._path, self._depth = path, depth
        self._expert_dtype = {} if expert_dtype is None else {"expert_dtype": expert_dtype}
        self._formats: dict[tuple[int, bool], Format] = {}

    @property
    def quantized(self) -> bool:
        """Whether any module may be quantized."""
        return self._quantization.config is not None

    def format_of(self, module: str) -> Format | None:
        """Return the format of a module, or None if the module is not quantized.

        module: name of the module, such as "model.layers.3.self_attn.q_proj".
        """
        expect("module", module, str)
        module_config = self._quantization.config_of(module)
        if module_config.config is None:
            return None
        is_expert = "experts" in module.split(".")
        key = module_config.number, is_expert
        if key not in self._formats:
            config = module_config.config
            if not is_expert:  # `expert_dtype` applies to experts only
                config = config | {"expert_dtype": None}
            self._formats[key] = self._read_format(config, expert=is_expert)
        return self._formats[key]

    def representative_experts(self, experts: int) -> Sequence[int]:
        """Return the numbers of experts to look up in order to find all formats in a layer.

        If the quantization_config cannot distinguish some experts by name, only one of them is
        included.

        experts: number of experts in a layer.
        """
        return self._quantization.representative_experts(experts)

    def common_format(self, modules: Iterable[str], what: str) -> Format:
        """Return the format that all of the modules have.

        modules: one or more names.
        what: description of the modules, for messages.

        Raises ConfigurationError, with the names and formats of two modules, if formats differ.
        """
        return find_common_value(self._quantization, modules, self._read_format, what)

    def _read_format(self, config: dict[str, Any] | None, *, expert: bool = True) -> Format:
        if config is None:
            return UNQUANTIZED
        config = (self._expert_dtype if expert else {}) | config
        self._read_scheme(config)
        return format_of(config, path=self._path, depth=self._depth)
