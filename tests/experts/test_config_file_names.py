"""Names of tuned config files contain all fields of the key, and equal those of vLLM and SGLang."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tuned_config_files import MIXTRAL, NAME

from experts.triton.configs.files import ConfigKey, device_key, file_names_for
from modular_kernel.errors import ConfigurationError
from modular_kernel.spec.problem import Problem
from modular_kernel.spec.quantization import QUANT_SCHEMES

SIZES = st.integers(1, 10**9)
KEYS = st.builds(
    ConfigKey,
    experts=SIZES,
    intermediate=SIZES,
    device=(st.text(max_size=150) | st.text("abc _", min_size=200)).map(device_key),
    dtype=st.sampled_from(["", "float32", "fp8_w8a8", "int4_w4a16", "int8_w8a8"]),
    block_shape=st.none() | st.tuples(st.integers(0, 512), st.integers(1, 512)),
    per_channel=st.booleans(),
    prepared=st.booleans(),
    down=st.booleans(),
)


@given(KEYS)
def test_a_name_has_exactly_the_fields_of_its_key(key: ConfigKey) -> None:
    name = key.file_name
    assert ConfigKey.parse(name) == key
    assert name.isascii()
    assert Path(name).name == name
    assert len(name.encode()) <= 255


@given(st.text(max_size=300))
def test_every_device_has_a_unique_key(name: str) -> None:
    key = device_key(name)
    assert device_key(key) == key
    assert ConfigKey.parse(ConfigKey(1, 2, key).file_name).device == key


@pytest.mark.parametrize(
    ("name", "key"),
    [
        (NAME, ConfigKey(8, 14336, "NVIDIA_H200")),
        (
            "E=256,N=256,device_name=NVIDIA_H20-3e,dtype=fp8_w8a8,block_shape=[128, 128].json",
            ConfigKey(256, 256, "NVIDIA_H20-3e", "fp8_w8a8", (128, 128)),
        ),
        (  # vLLM's spelling
            "E=128,N=384,device_name=AMD_Instinct_MI300X,dtype=fp8_w8a8,block_shape=[128,128].json",
            ConfigKey(128, 384, "AMD_Instinct_MI300X", "fp8_w8a8", (128, 128)),
        ),
        (
            "E=10,N=512,device_name=Intel(R)_Arc(TM)_Pro_B60_Graphics.json",
            ConfigKey(10, 512, "Intel(R)_Arc(TM)_Pro_B60_Graphics"),
        ),
        (
            "E=384,N=256,device_name=AMD_Instinct_MI350X,dtype=int4_w4a16_down.json",
            ConfigKey(384, 256, "AMD_Instinct_MI350X", "int4_w4a16", down=True),
        ),
        (
            "E=8,N=64,device_name=X,dtype=int8_w8a8,per_channel_quant=True.json",
            ConfigKey(8, 64, "X", "int8_w8a8", per_channel=True),
        ),
    ],
)
def test_names_of_published_files_are_parsed(name: str, key: ConfigKey) -> None:
    assert ConfigKey.parse(name) == key
    assert name in (key.file_name, key.file_name.replace(", ", ","))


@pytest.mark.parametrize(
    "name",
    [
        "E=08,N=64,device_name=X.json",
        "E=8,N=-64,device_name=X.json",
        "E=8,N=64,device_name=../X.json",
        "E=8,N=64,device_name=.json",
        "E=8,N=64,device_name=X,block_shape=[128].json",
        "E=8,N=64,device_name=X,per_channel_quant=False.json",
        "E=8,N=64,device_name=X.json\n",
        "moe_sum_reduce_NVIDIA-H200_t8_h2048_bfloat16.json",
        "",
    ],
)
def test_invalid_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="name of a config file"):
        ConfigKey.parse(name)


@pytest.mark.parametrize("fields", [{"experts": 0}, {"device": "a b"}, {"device": ""}])
def test_a_key_without_a_name_cannot_be_made(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="name of a config file"):
        ConfigKey(**{"experts": 8, "intermediate": 64, "device": "X", **fields})


@pytest.mark.parametrize("quant", sorted(QUANT_SCHEMES))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_problem_has_file_names(quant: str, dtype: str) -> None:
    problem = replace(MIXTRAL, quant=quant, dtype=dtype)
    names = file_names_for(problem, "NVIDIA H200")
    assert ConfigKey.from_problem(problem, "NVIDIA H200").file_name == names[0]
    keys = [ConfigKey.parse(name) for name in names]
    assert {key.experts for key in keys} == {8}
    dtypes = {"", "float32", "fp8_w8a8", "fp8_w8a16", "int8_w8a8", "int8_w8a16", "int4_w4a16"}
    dtypes |= {"int4_w4a16_act_order", "int8_w8a16_act_order"}
    dtypes |= {"mxfp4_w4a16", "nvfp4_w4a16", "nvfp4_w4a4"}
    assert {key.dtype for key in keys} <= dtypes


@pytest.mark.parametrize(
    ("quant", "names"),
    [
        ("fp8_w8a8_tensor", ["dtype=fp8_w8a8"]),
        ("fp8_w8a8_channel", ["dtype=fp8_w8a8,per_channel_quant=True", "dtype=fp8_w8a8"]),
        (
            "fp8_w8a8_block:block=64x128",
            ["dtype=fp8_w8a8,block_shape=[64, 128]", "dtype=fp8_w8a8,block_shape=[64,128]"],
        ),
        ("int8_w8a16_channel", ["dtype=int8_w8a16"]),
    ],
)
def test_file_names_contain_the_scheme(quant: str, names: list[str]) -> None:
    problem = replace(MIXTRAL, quant=quant)
    stem = NAME.removesuffix(".json")
    assert file_names_for(problem, "NVIDIA H200") == tuple(f"{stem},{name}.json" for name in names)


def test_packed_weights_are_found_under_both_sizes() -> None:
    """N is I = 14336 in vLLM's names, and the number of bytes of a packed row in SGLang's names."""
    names = file_names_for(replace(MIXTRAL, quant="int4_w4a16_group"), "NVIDIA H200")
    keys = [ConfigKey.parse(name) for name in names]
    assert (keys[0].intermediate, keys[0].block_shape) == (14336, (0, 128))
    assert ConfigKey(8, 14336, "NVIDIA_H200", "int4_w4a16") in keys
    assert ConfigKey(8, 7168, "NVIDIA_H200", "int4_w4a16") in keys
    sizes = [key.intermediate for key in keys]
    assert sizes == sorted(sizes, reverse=True)


def test_file_names_contain_the_local_experts() -> None:
    problem = replace(MIXTRAL, experts=64, local_experts=8, expert_map=True)
    assert file_names_for(problem, "NVIDIA H200") == (NAME,)


def test_repacked_weights_use_the_files_of_their_format() -> None:
    problem = Problem(1, 2048, 768, 128, 8, quant="mxfp4_w4a16")
    repacked = replace(problem, quant="mxfp4_w4a16:repacked=true")
    keys = {ConfigKey.from_problem(p, "NVIDIA H200") for p in (problem, repacked)}
    assert len(keys) == 1
