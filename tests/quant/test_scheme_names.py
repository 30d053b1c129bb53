"""Names of schemes and activations: `parse` and `str` are inverse, and invalid names are
refused.
"""

from dataclasses import replace
from typing import Any

import pytest

from modular_kernel.errors import ConfigurationError
from modular_kernel.spec.problem import ActivationSpec, Problem
from modular_kernel.spec.quantization import QUANT_SCHEMES, QuantScheme

SCHEMES_WITH_OPTIONS = (
    "fp8_w8a8_block:block=64x32",
    "int8_w8a8_block:block=1x128",
    "fp8_w8a8_tensor:static=true",
    "int8_w8a16_group:group=64",
    "int4_w4a16_group:group=32,zero_points=true",
)


@pytest.mark.parametrize("scheme_name", [*QUANT_SCHEMES, *SCHEMES_WITH_OPTIONS])
def test_scheme_names_round_trip(scheme_name: str) -> None:
    scheme = QuantScheme.parse(scheme_name)
    assert str(scheme) == scheme_name
    assert QuantScheme.parse(scheme) == scheme
    assert Problem(1, 64, 64, 2, 1, quant=scheme_name).scheme == scheme


def test_default_options_are_omitted() -> None:
    assert str(QuantScheme.parse("fp8_w8a8_block:block=128x128")) == "fp8_w8a8_block"
    assert str(QuantScheme.parse("int4_w4a16_group:zero_points=false,")) == "int4_w4a16_group"


# If parsing ignored the invalid part, some of these would run with another block or group size than
# intended.
INVALID_SCHEMES: tuple[tuple[Any, str], ...] = (
    ("fp8_w8a8_block:block=foox128x128", "block=foox128x128"),
    ("fp8_w8a8_block:block=-1x128x128", "block=-1x128x128"),
    ("fp8_w8a8_block:block=128x128x", "block=128x128x"),
    ("fp8_w8a8_block:block=128", "block=128"),
    ("fp8_w8a8_block:block=0x128", "block=0x128"),
    ("fp8_w8a8_block:block=²x128", "block=²x128"),
    ("fp8_w8a8_block:group=128", "group=128"),
    ("int4_w4a16_group:group=x64", "group=x64"),
    ("int4_w4a16_group:group=32x32", "group=32x32"),
    ("int4_w4a16_group:group=-1", "group=-1"),
    ("int4_w4a16_group:group=33", "group=33"),
    ("int4_w4a16_group:group=٣٢", "group=٣٢"),
    ("int4_w4a16_group:group=" + "1" * 5000, "group=11"),
    ("int4_w4a16_group:group=64,group=32", "group=64,group=32"),
    ("int4_w4a16_group:zero_points", "zero_points="),
    ("int8_w8a16_channel:zero_points=true", "zero_points=true"),
    ("mxfp4_w4a16:group=16", "group=16"),
    ("mxfp4_w4a16:repacked=yes", "repacked=yes"),
    ("int4_w4a16_group:repacked=true", "repacked=true"),
    ("fp8_w8a8_channel:static=true", "static=true"),
    ("fp8_w8a8_tensor:static=yes", "static=yes"),
    ("", ""),
    ("x" * 5000, "xxx"),
    (None, "NoneType"),
    (4, "int"),
    (QuantScheme("another"), "another"),
    (replace(QUANT_SCHEMES["int4_w4a16_group"], group=(-4,)), "-4"),
    (replace(QUANT_SCHEMES["int8_w8a8_block"], weight="uint8"), "uint8"),
)


@pytest.mark.parametrize(("quant", "got"), INVALID_SCHEMES, ids=lambda value: repr(value)[:40])
def test_invalid_schemes_are_refused(quant: Any, got: str) -> None:
    with pytest.raises(ConfigurationError) as exc_info:
        Problem(1, 64, 64, 2, 1, quant=quant)
    assert exc_info.value.what.startswith("quant")
    assert got in str(exc_info.value.got)
    assert len(str(exc_info.value)) < 600


INVALID_ACTIVATIONS = (
    "swiglu_oai:interleaved=yes",
    "swiglu_oai:interleaved=",
    "swiglu_oai:alpha=1,alpha=2",
    "swiglu_oai:alpha=nan",
    "swiglu_oai:limit=inf",
    "swiglu_clamp_after:limit=nan",
    "silu:limit=7",
)


@pytest.mark.parametrize("activation_name", INVALID_ACTIVATIONS)
def test_invalid_activations_are_refused(activation_name: str) -> None:
    with pytest.raises(ConfigurationError, match="activation"):
        ActivationSpec.parse(activation_name)


def test_constructor_and_name_have_the_same_default_row_order() -> None:
    parsed = ActivationSpec.parse("swiglu_oai:alpha=1.702,limit=7.0")
    assert ActivationSpec("swiglu_oai", 1.702, 7.0) == parsed
    assert parsed.interleaved is True  # as in gpt-oss
    split = ActivationSpec.parse("swiglu_oai:alpha=1.702,limit=7.0,interleaved=false")
    assert ActivationSpec("swiglu_oai", 1.702, 7.0, interleaved=False) == split
    assert split.interleaved is False
    up_first = ActivationSpec.parse("swiglu_oai:up_first=true")
    assert ActivationSpec("swiglu_oai", 1.702, 7.0, up_first=True) == up_first
    assert ActivationSpec() == ActivationSpec.parse("silu")
    assert ActivationSpec().interleaved is False


@pytest.mark.parametrize(
    "activation_name",
    ["silu", "swiglu_oai:alpha=1.702,limit=7.0,interleaved=false", "silu:interleaved=true"],
)
def test_activation_names_round_trip(activation_name: str) -> None:
    assert str(ActivationSpec.parse(activation_name)) == activation_name
