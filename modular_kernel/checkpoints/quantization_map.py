"""The format of each module of a checkpoint, from its quantization_config.

    formats = QuantizationMap(config["quantization_config"])
    formats.format_of("model.layers.3.mlp.experts.0.gate_proj")  # None: not quantized

All experts of a layer must have one format; layers may differ.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from modular_kernel.checkpoints.formats import Format, format_of
from modular_kernel.models.layer_quantization import SchemeReader
from modular_kernel.models.module_quantization import ModuleQuantization, common_value
from modular_kernel.utils.argument_checks import Count, expect

UNQUANTIZED = format_of(None)


class QuantizationMap:
    """The format of each module.

    quantization: the quantization_config; None for an unquantized checkpoint. path: of the file,
    for messages. depth: max(H, I) of the layer, as for `format_of`. expert_dtype: the value of the
    config.json's key.

    Raises ConfigurationError for an unknown method or key, and for patterns that are refused. A
    format is read on first use, so that an unknown one is refused only where it is needed.
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
        given = dict(quantization) if isinstance(quantization, Mapping) else quantization
        self._quantization = ModuleQuantization(path, given)
        self._read_scheme = SchemeReader(path, {"expert_dtype": expert_dtype}, depth)
        self._path, self._depth = path, depth
        self._expert_dtype = {} if expert_dtype is None else {"expert_dtype": expert_dtype}
        self._formats: dict[tuple[int, bool], Format] = {}

    @property
    def quantized(self) -> bool:
        """Whether any module may be quantized."""
        return self._quantization.config is not None

    def format_of(self, module: str) -> Format | None:
        """Return the format of a module, or None if it is not quantized.

        module: its name, without the tensor's, such as "model.layers.3.self_attn.q_proj".
        """
        expect("module", module, str)
        found = self._quantization.of(module)
        if found.config is None:
            return None
        is_expert = "experts" in module.split(".")
        key = found.number, is_expert
        if key not in self._formats:
            # `expert_dtype` is that of experts only.
            config = found.config if is_expert else found.config | {"expert_dtype": None}
            self._formats[key] = self._read(config, expert=is_expert)
        return self._formats[key]

    def experts_to_try(self, experts: int) -> Sequence[int]:
        """Return numbers of experts that stand for all: those that no entry tells apart are alike.

        experts: their number in a layer.
        """
        return self._quantization.experts_to_try(experts)

    def common_format(self, modules: Iterable[str], what: str) -> Format:
        """Return the format of all of some modules, of which there is at least one.

        what: names the modules, for messages. Raises ConfigurationError with two modules and their
        formats if they differ.
        """
        return common_value(self._quantization, modules, self._read, what)

    def _read(self, config: dict[str, Any] | None, *, expert: bool = True) -> Format:
        if config is None:
            return UNQUANTIZED
        config = (self._expert_dtype if expert else {}) | config
        self._read_scheme(config)
        return format_of(config, path=self._path, depth=self._depth)
