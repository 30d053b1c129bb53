"""Quantization schemes by name, such as "fp8_w8a8_block"."""

import re
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from modular_kernel.errors import BrokenPartError, ConfigurationError, DuplicatePartError
from modular_kernel.spec.external_schemes import ExternalSchemes, TableScheme, external_schemes
from modular_kernel.utils.argument_checks import check_fields

_SIZES = re.compile(r"[1-9][0-9]{0,8}(x[1-9][0-9]{0,8})?", re.ASCII)


@dataclass(frozen=True)
class QuantScheme:
    """Element types of weights and activations, and the granularity of their scales.

    weight: element type of w1 and w2. "none" is the problem's dtype. "table4" and "table8" are
        codes of 4 or 8 bits, whose values are in `values`.
    activation: element type of the GEMMs' left operands. "none" is the problem's dtype.
    granularity: the weights that share a scale: "tensor" (all weights of an expert's matrix),
        "channel" (a row of the matrix), "block" (group[0] rows by group[1] columns), "group"
        (group[0] columns of a row) or "none".
    group: sizes of a block or a group; () for the other granularities.
    scale: element type of weight scales. "float" stands for the dtypes that
        `modular_kernel.quant.quantized_weights.weight_specs` lists. With "float8_e4m3fn", each
        matrix (gate, up, down) also has a float32 scale.
    zero_points: each group of unsigned weights has a zero point. If False, the zero point of
        unsigned weights is the middle of their range.
    act_order: columns of w1 and w2 are sorted by group (GPTQ's desc_act) instead of having the
        order of x and h. `w1_order` maps the columns of w1 to the columns of x. The rows of w1 have
        the order of the columns of w2.
    static: activation scales are given (a1_scale, a2_scale) instead of computed per call. With e2m1
        activations, the given scales are per expert, and the scales of groups are still computed.
    repacked: the bits of eight e2m1 weights are arranged in their 32-bit word so that unpacking
        takes fewer instructions (`modular_kernel.quant.repacking`).
    values: the value of each code for "table4" and "table8"; otherwise ().
    """

    name: str
    weight: str = "none"
    activation: str = "none"
    granularity: str = "none"
    group: tuple[int, ...] = ()
    scale: str = "float"
    zero_points: bool = False
    act_order: bool = False
    static: bool = False
    repacked: bool = False
    values: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, "quant ")

    @cached_property
    def quantized(self) -> bool:
        return self.weight != "none"

    @cached_property
    def quantizes_activations(self) -> bool:
        """Whether the left operands of the GEMMs are quantized, as in w8a8."""
        return self.activation != "none"

    @cached_property
    def dispatched_quantized(self) -> bool:
        """Whether activations can be quantized before dispatch."""
        return self.quantizes_activations and not self.scales_by_expert

    @cached_property
    def scales_by_expert(self) -> bool:
        """Whether each expert has its own activation scale. Rows are quantized after dispatch."""
        return self.activation == "float4_e2m1"

    @cached_property
    def matrix_scales(self) -> bool:
        """Whether each matrix has a float32 scale in addition to its group scales (nvfp4)."""
        return self.scale == "float8_e4m3fn"

    @cached_property
    def activation_granularity(self) -> str:
        """The activations that share a scale: "tensor", "token", "group" (of a token) or "none"."""
        if not self.quantizes_activations:
            return "none"
        return {"channel": "token", "block": "group"}.get(self.granularity, self.granularity)

    @cached_property
    def packed(self) -> bool:
        """Whether a byte holds two weights of a row."""
        return self.weight in ("uint4", "float4_e2m1", "table4")

    @cached_property
    def external(self) -> bool:
        """Whether another package provides the scheme."""
        return bool(self.values)

    @classmethod
    def parse(cls, text: "str | QuantScheme") -> "QuantScheme":
        """Parse `name[:option=value,...]`, the format of `str()`.

        Options are block=NxK (block schemes), group=G and zero_points=true (integer schemes),
        static=true (fp8_w8a8_tensor) and repacked=true (mxfp4_w4a16). Schemes of other packages
        have no options.

        Raises ConfigurationError for an unknown name or option, BrokenPartError for a scheme that
        failed to load, and DuplicatePartError if several packages have a scheme with this name.

        >>> scheme = QuantScheme.parse("int4_w4a16_group:group=64,zero_points=true")
        >>> scheme.weight, scheme.group, scheme.packed
        ('uint4', (64,), True)
        """
        if isinstance(text, QuantScheme):
            return text._validate()
        if not isinstance(text, str):
            raise ConfigurationError("quant", got=type(text).__name__, need="a scheme name")
        return _parse(text)

    def _validate(self) -> "QuantScheme":
        """Return this scheme. Raises ConfigurationError unless its text form parses to it."""
        is_known = self.external or self.name in QUANT_SCHEMES
        if is_known and QuantScheme.parse(str(self)) == self:
            return self
        raise ConfigurationError("quant", got=repr(self), need="a scheme that parse() returns")

    def _with_option(self, key: str, value: str) -> "QuantScheme":
        has_integer_weights = self.weight in ("uint8", "uint4")
        sizes = tuple(map(int, value.split("x"))) if _SIZES.fullmatch(value) else ()
        if self.external:
            need = "no options: a scheme from another package has none"
            raise ConfigurationError(f"quant {self.name}", got=f"{key}={value}"[:80], need=need)
        if key == "block" and self.granularity == "block" and len(sizes) == 2:
            return replace(self, group=sizes)
        if key == "group" and has_integer_weights and len(sizes) == 1 and sizes[0] % 2 == 0:
            return replace(self, group=sizes)
        if key == "zero_points" and has_integer_weights and value in ("true", "false"):
            return replace(self, zero_points=value == "true")
        if (
            key == "static"
            and self.activation_granularity == "tensor"
            and value in ("true", "false")
        ):
            return replace(self, static=value == "true")
        if key == "repacked" and self.name == "mxfp4_w4a16" and value in ("true", "false"):
            return replace(self, repacked=value == "true")
        options = "block=NxK, group=G, zero_points=true, static=true or repacked=true"
        need = f"an option that this scheme supports, among {options}"
        raise ConfigurationError(f"quant {self.name}", got=f"{key}={value}"[:80], need=need)

    def __str__(self) -> str:
        base = QUANT_SCHEMES.get(self.name, self)
        options = []
        if self.group != base.group:
            key = "block" if self.granularity == "block" else "group"
            options.append(f"{key}={'x'.join(map(str, self.group))}")
        if self.zero_points:
            options.append("zero_points=true")
        if self.static and not base.static:
            options.append("static=true")
        if self.repacked:
            options.append("repacked=true")
        return self.name + (":" + ",".join(options) if options else "")


_SCHEMES = (
    QuantScheme("none"),
    QuantScheme("fp8_w8a8_tensor", "float8_e4m3fn", "float8_e4m3fn", "tensor"),
    QuantScheme("fp8_w8a8_channel", "float8_e4m3fn", "float8_e4m3fn", "channel"),
    QuantScheme("fp8_w8a8_block", "float8_e4m3fn", "float8_e4m3fn", "block", (128, 128)),
    QuantScheme("fp8_w8a16_tensor", "float8_e4m3fn", "none", "tensor"),
    QuantScheme("fp8_w8a16_channel", "float8_e4m3fn", "none", "channel"),
    QuantScheme("fp8_w8a16_block", "float8_e4m3fn", "none", "block", (128, 128)),
    QuantScheme("int8_w8a8_channel", "int8", "int8", "channel"),
    QuantScheme("int8_w8a8_block", "int8", "int8", "block", (128, 128)),
    QuantScheme("int8_w8a16_channel", "int8", "none", "channel"),
    QuantScheme("int8_w8a16_group", "uint8", "none", "group", (128,)),
    QuantScheme("int4_w4a16_group", "uint4", "none", "group", (128,)),
    QuantScheme("int8_w8a16_act_order", "uint8", "none", "group", (128,), act_order=True),
    QuantScheme("int4_w4a16_act_order", "uint4", "none", "group", (128,), act_order=True),
    QuantScheme("mxfp4_w4a16", "float4_e2m1", "none", "group", (32,), "float8_e8m0fnu"),
    QuantScheme("nvfp4_w4a16", "float4_e2m1", "none", "group", (16,), "float8_e4m3fn"),
    QuantScheme(
        "nvfp4_w4a4", "float4_e2m1", "float4_e2m1", "group", (16,), "float8_e4m3fn", static=True
    ),
)
# The built-in schemes by name.
QUANT_SCHEMES = {scheme.name: scheme for scheme in _SCHEMES}


def load_external_schemes() -> ExternalSchemes:
    """Return the schemes that other packages provide."""
    return external_schemes(QUANT_SCHEMES)


def list_external_schemes() -> tuple[str, ...]:
    """Return the names of the usable schemes of other packages."""
    return tuple(external.name for external in load_external_schemes().usable)


def find_scheme(name: str) -> QuantScheme:
    """Return the built-in or external scheme with this name, without options.

    Raises the errors of `QuantScheme.parse`.
    """
    if name in QUANT_SCHEMES:
        return QUANT_SCHEMES[name]
    schemes = load_external_schemes()
    for external in schemes.usable:
        if external.name == name:
            return _make_table_scheme(external.scheme)
    for broken in schemes.broken:
        if broken.name == name and broken.is_duplicate:
            origins = " and ".join(entry.origin for entry in schemes.broken if entry.name == name)
            raise DuplicatePartError(f"quant {name!r}", got=origins, need="one origin")
        if broken.name == name:
            need = "a scheme that can be used"
            raise BrokenPartError(f"quant {name!r}", got=broken.error, need=need)
    names = (*QUANT_SCHEMES, *(external.name for external in schemes.usable))
    need = f"one of {', '.join(sorted(names))}"
    if schemes.broken:
        failures = "; ".join(f"{b.name} from {b.origin}: {b.error}" for b in schemes.broken)
        need = f"{need}. Not usable: {failures}"
    raise ConfigurationError("quant", got=name[:80], need=need)


@lru_cache(maxsize=256)
def _make_table_scheme(table: TableScheme) -> QuantScheme:
    weight = f"table{table.bits}"
    return QuantScheme(
        table.name, weight, "none", table.granularity, table.group, values=table.values
    )


@lru_cache(maxsize=256)
def _parse(text: str) -> QuantScheme:
    """Parse a scheme. Cached, because many problems name the same scheme."""
    name, _, options = text.partition(":")
    scheme, seen_keys = find_scheme(name), set[str]()
    for option in filter(None, options.split(",")):
        key, _, value = option.partition("=")
        if key in seen_keys:
            raise ConfigurationError(f"quant {name}", got=text[:80], need=f"{key} once")
        scheme = scheme._with_option(key, value)
        seen_keys.add(key)
    return scheme
