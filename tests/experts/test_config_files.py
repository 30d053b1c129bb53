"""Tuned config files in our format and in the format of vLLM and SGLang, and malformed files."""

import json
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tuned_config_files import (
    BLOCK_FP8,
    H200,
    MIXTRAL,
    NAME,
    file_contents,
    make_lookup,
    vllm_launch,
    write_config_file,
)

from experts.triton.configs.files import (
    FORMAT,
    MAX_FILE_BYTES,
    dump_config_file,
    parse_config_file,
    read_config_file,
)
from experts.triton.configs.lookup import fit_to_problem, nearest_count
from experts.triton.configs.select import choose_config, override_config
from experts.triton.launch_config import Device, LaunchConfig, MoEConfig, gemms, violations
from modular_kernel.errors import ConfigurationError


def test_vllm_counts_fused_columns(tmp_path: Path) -> None:
    """If the activation is gated, vLLM's BLOCK_SIZE_N is twice our block_n of GEMM 1, which is at
    least 16.
    """
    path = write_config_file(
        tmp_path / "x.json",
        {"triton_version": "3.4.0", "64": vllm_launch(32, 128, 64, USE_TMA=True)},
    )
    config_file = read_config_file(path)
    gated = fit_to_problem(config_file, MIXTRAL, H200).steps.choose(64)
    assert gated == MoEConfig(
        LaunchConfig(32, 64, 64, 1, 4, 3), LaunchConfig(32, 128, 64, 1, 4, 3), "aligned"
    )
    ungated_problem = replace(MIXTRAL, activation="relu2")
    ungated = fit_to_problem(config_file, ungated_problem, H200).steps.choose(64)
    assert ungated.gemm1 == ungated.gemm2 == LaunchConfig(32, 128, 64, 1, 4, 3)
    narrow_file = parse_config_file(json.dumps({"64": vllm_launch(n=16)}), "x")
    assert fit_to_problem(narrow_file, MIXTRAL, H200).steps.choose(64).gemm1.block_n == 16


def test_vllm_files_may_omit_triton_defaults() -> None:
    launch = vllm_launch()
    del launch["num_warps"], launch["num_stages"]
    config_file = parse_config_file(json.dumps({"1": launch}), "x")
    gemm2 = fit_to_problem(config_file, MIXTRAL, H200).steps.choose(1).gemm2
    assert (gemm2.num_warps, gemm2.num_stages) == (4, 3)


def test_the_second_file_of_sglang_is_for_gemm_2(tmp_path: Path) -> None:
    folder = write_config_file(
        tmp_path / NAME, {"1": vllm_launch(16), "100": vllm_launch(64)}
    ).parent
    write_config_file(
        tmp_path / NAME.replace(".json", "_down.json"),
        {"1": vllm_launch(16, 32), "50": vllm_launch(16, 128, 64)},
    )
    steps = make_lookup(folder).find_source(MIXTRAL).steps
    configs = [steps.choose(tokens) for tokens in (1, 25, 26, 50, 51, 1000)]
    assert [config.gemm1.block_m for config in configs] == [16, 16, 16, 16, 64, 64]
    assert [config.gemm2.block_n for config in configs] == [32, 32, 128, 128, 128, 128]
    assert [config.gemm2.block_m for config in configs] == [16, 16, 16, 16, 64, 64]
    assert {config.gemm1.block_n for config in configs} == {32}


def test_down_file_in_our_format_is_refused(tmp_path: Path) -> None:
    folder = write_config_file(tmp_path / NAME, {"1": vllm_launch()}).parent
    write_config_file(
        tmp_path / NAME.replace(".json", "_down.json"),
        file_contents(tokens_1=(vllm_launch(), vllm_launch())),
    )
    with pytest.raises(ConfigurationError, match=r"_down\.json"):
        make_lookup(folder).find_source(MIXTRAL)


def test_our_files_round_trip() -> None:
    file_json = json.dumps(
        {
            **file_contents(
                tokens_8=(vllm_launch(16, 64), vllm_launch(16, 128, 64)),
                tokens_1=(vllm_launch(), vllm_launch()),
            ),
            "tuned_for": {"experts_part": "TritonExperts", "hidden": 4096, "top_k": 2},
        }
    )
    config_file = parse_config_file(file_json, "x")
    config = fit_to_problem(config_file, MIXTRAL, H200).steps.choose(8)
    assert config == MoEConfig(
        LaunchConfig(16, 64, 128, 1, 4, 3), LaunchConfig(16, 128, 64, 1, 4, 3), "aligned"
    )
    assert parse_config_file(dump_config_file(config_file), "x") == config_file
    assert [tokens for tokens, _ in config_file.gemm1] == [1, 8]


def test_times_are_stored_with_the_tiles() -> None:
    launches = {"gemm1": vllm_launch(), "gemm2": vllm_launch(), "us": 12.5, "untuned_us": 13}
    config_file = parse_config_file(json.dumps({"format": FORMAT, "64": launches}), "x")
    assert config_file.times[64].us == 12.5
    assert parse_config_file(dump_config_file(config_file), "x").times == config_file.times


@pytest.mark.parametrize(
    ("keys", "tokens", "expected"),
    [
        ((1, 16, 64), 1, 1),
        ((1, 16, 64), 8, 1),
        ((1, 16, 64), 9, 16),
        ((1, 16, 64), 40, 16),  # 16 and 64 are equally near, so the smaller number is used
        ((64, 16, 1), 40, 16),  # the order of entries does not matter
        ((1, 16, 64), 41, 64),
        ((1, 16, 64), 10**6, 64),
        ((5,), 0, 5),
    ],
)
def test_the_nearest_number_of_tokens_is_used(
    keys: tuple[int, ...], tokens: int, expected: int
) -> None:
    assert nearest_count(keys, tokens) == expected
    file_json = json.dumps({str(key): vllm_launch(k=64, GROUP_SIZE_M=key) for key in keys})
    fitted = fit_to_problem(parse_config_file(file_json, "x"), MIXTRAL, H200)
    assert fitted.steps.choose(tokens).gemm1.group_m == expected


@given(st.sets(st.integers(1, 2000), min_size=1, max_size=8), st.integers(0, 2500))
def test_steps_agree_with_the_nearest_number_of_tokens(keys: set[int], tokens: int) -> None:
    file_json = json.dumps({str(key): vllm_launch(GROUP_SIZE_M=key) for key in keys})
    fitted = fit_to_problem(parse_config_file(file_json, "x"), MIXTRAL, H200)
    assert fitted.steps.choose(tokens).gemm2.group_m == nearest_count(fitted.token_counts, tokens)


# ---------------------------------------------------------------------------------- malformed files
MALFORMED: dict[str, str] = {
    "empty": "",
    "not JSON": "{",
    "a list": "[]",
    "a number": "64",
    "no tokens": "{}",
    "only a version": '{"triton_version": "3.6.0"}',
    "deep": "[" * 200_000,
    "deep below a key": '{"64": ' + '{"a":' * 50_000,
    "NaN": json.dumps({"64": vllm_launch(n=float("nan"))}),
    "infinite": json.dumps({"64": vllm_launch(n=float("inf"))}),
    "a huge exponent": '{"64": {"BLOCK_SIZE_M": 1e400}}',
    "a huge number": json.dumps({"64": vllm_launch(n=2**70)}),
    "more digits than Python converts": '{"64": {"BLOCK_SIZE_M": ' + "1" * 9999 + "}}",
    "negative": json.dumps({"64": vllm_launch(n=-64)}),
    "zero": json.dumps({"64": vllm_launch(num_stages=0)}),
    "a fraction": json.dumps({"64": vllm_launch(n=64.5)}),
    "a whole float": json.dumps({"64": vllm_launch(n=64.0)}),
    "a bool": json.dumps({"64": vllm_launch(num_warps=True)}),
    "a string": json.dumps({"64": vllm_launch(n="64")}),
    "null": json.dumps({"64": vllm_launch(n=None)}),
    "a list for a launch": json.dumps({"64": [16, 64, 128]}),
    "a missing size": json.dumps({"64": {"BLOCK_SIZE_M": 16}}),
    "tokens in words": json.dumps({"many": vllm_launch()}),
    "tokens below one": json.dumps({"0": vllm_launch()}),
    "negative tokens": json.dumps({"-1": vllm_launch()}),
    "tokens with a sign": json.dumps({"+64": vllm_launch()}),
    "tokens with a zero in front": json.dumps({"064": vllm_launch()}),
    "tokens in other digits": json.dumps({"٦٤": vllm_launch()}),
    "too many tokens": json.dumps({"1" * 30: vllm_launch()}),
    "a number of 4000 digits": json.dumps({"64": vllm_launch(n=10**4000)}),
    "NaN in an ignored entry": json.dumps({"64": vllm_launch(note=float("nan"))}),
    "a key twice": f'{{"64": {json.dumps(vllm_launch())}, "64": {json.dumps(vllm_launch(32))}}}',
    "a version that is a number": json.dumps({"triton_version": 3.6, "64": vllm_launch()}),
    "another format": json.dumps(
        {**file_contents(tokens_1=(vllm_launch(), vllm_launch())), "format": "tiles/9"}
    ),
    "our format, their launch": json.dumps({"format": FORMAT, "64": vllm_launch()}),
    "our format, one GEMM": json.dumps({"format": FORMAT, "64": {"gemm1": vllm_launch()}}),
    "two block_m": json.dumps(file_contents(tokens_64=(vllm_launch(16), vllm_launch(32)))),
    "tuned_for is a string": json.dumps(
        {**file_contents(tokens_1=(vllm_launch(), vllm_launch())), "tuned_for": "x"}
    ),
    "tuned_for without fields": json.dumps(
        {**file_contents(tokens_1=(vllm_launch(), vllm_launch())), "tuned_for": {}}
    ),
}


@pytest.mark.parametrize("contents", MALFORMED.values(), ids=MALFORMED.keys())
def test_error_names_the_malformed_file(tmp_path: Path, contents: str) -> None:
    path = write_config_file(tmp_path / NAME, contents)
    with pytest.raises(ConfigurationError) as caught:
        make_lookup(path.parent).find_source(MIXTRAL)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 600 + len(str(path))


def test_non_json_and_oversized_files_are_refused(tmp_path: Path) -> None:
    path = write_config_file(tmp_path / NAME, "")
    valid_data = json.dumps({"64": vllm_launch(note="x")}).encode()
    for data in (valid_data.replace(b"x", b"\xff"), valid_data.ljust(MAX_FILE_BYTES + 1)):
        path.write_bytes(data)
        with pytest.raises(ConfigurationError, match="device_name=NVIDIA_H200"):
            make_lookup(path.parent).find_source(MIXTRAL)
    path.write_text(json.dumps({"64": vllm_launch()}).ljust(MAX_FILE_BYTES), encoding="utf-8")
    assert make_lookup(path.parent).find_source(MIXTRAL).token_counts == (64,)


def test_unreadable_file_is_refused(tmp_path: Path) -> None:
    makers: tuple[Callable[[Path], object], ...] = (
        Path.mkdir,
        os.mkfifo,
        lambda path: path.symlink_to(tmp_path / "nowhere"),
    )
    for number, make_path in enumerate(makers):
        folder = tmp_path / str(number)
        folder.mkdir()
        make_path(folder / NAME)
        with pytest.raises(ConfigurationError, match="not a regular file"):
            make_lookup(folder).find_source(MIXTRAL)


# --------------------------------------------------------------------------------------- validation

INVALID_CHANGES = (
    ({"BLOCK_SIZE_M": 48}, "block_m", "a power of two"),
    ({"BLOCK_SIZE_M": 8}, "block_m", "a power of two from 16"),
    ({"BLOCK_SIZE_N": 2048}, "block_n", "to 1024"),
    ({"BLOCK_SIZE_K": 8}, "block_k", "a power of two from 16"),
    ({"GROUP_SIZE_M": 100_000}, "group_m", "1 to 4096"),
    ({"num_warps": 3}, "num_warps", "one of"),
    ({"num_warps": 64}, "num_warps", "one of"),
    ({"num_stages": 99}, "num_stages", "1 to 16"),
)
OVERSIZED_CHANGE = ({"BLOCK_SIZE_N": 512, "num_stages": 9}, "bytes of shared memory", "<= 232448")


@pytest.mark.parametrize(("changes", "what", "need"), [*INVALID_CHANGES, OVERSIZED_CHANGE])
def test_our_files_and_overrides_must_fit(
    tmp_path: Path, changes: dict[str, int], what: str, need: str
) -> None:
    gemm1 = vllm_launch(32) | changes
    invalid_launches = {"gemm1": gemm1, "gemm2": vllm_launch(gemm1["BLOCK_SIZE_M"])}
    path = write_config_file(tmp_path / NAME, {"format": FORMAT, "64": invalid_launches})
    with pytest.raises(ConfigurationError) as caught:
        make_lookup(path.parent).find_source(MIXTRAL)
    assert str(path) in str(caught.value)
    assert f"tokens 64: GEMM 1 {what}: got" in str(caught.value)
    assert need in str(caught.value)
    with (
        override_config(invalid_launches),
        pytest.raises(ConfigurationError, match=rf"override_config.* GEMM 1 {what}: got"),
    ):
        choose_config(MIXTRAL, 64)


@pytest.mark.parametrize(("changes", "what", "need"), INVALID_CHANGES)
def test_vllm_and_sglang_files_must_have_valid_tiles(
    tmp_path: Path, changes: dict[str, int], what: str, need: str
) -> None:
    path = write_config_file(tmp_path / NAME, {"64": vllm_launch(32) | changes})
    with pytest.raises(ConfigurationError, match=f"{what}: got .*{need}") as caught:
        make_lookup(path.parent).find_source(replace(MIXTRAL, activation="relu2"))
    assert str(path) in str(caught.value)


def test_block_k_is_at_most_the_scale_block(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A step along K is multiplied by a single scale, so it must not span several scale blocks."""
    launch = vllm_launch(64, 128, 256, num_stages=2)
    with override_config({"gemm1": launch, "gemm2": launch}):
        with pytest.raises(ConfigurationError, match="got 256, need a divisor of 128"):
            choose_config(BLOCK_FP8, 64)
        assert choose_config(replace(MIXTRAL, quant="fp8_w8a8_channel"), 64).gemm1.block_k == 256
    name = NAME.replace(".json", ",dtype=fp8_w8a8,block_shape=[128, 128].json")
    path = write_config_file(tmp_path / name, {"64": launch, "512": launch})
    for _ in range(3):
        with caplog.at_level(logging.WARNING):
            source = make_lookup(path.parent).find_source(BLOCK_FP8)
    assert {config.gemm1.block_k for config in source.steps.configs} == {128}
    (record,) = caplog.records
    assert str(path) in record.message
    assert "clamped" in record.message
    assert "3 more like it" in record.message
    assert "\n" not in record.message


def test_one_scale_for_all_of_k_does_not_bound_block_k() -> None:
    problem = replace(MIXTRAL, quant="int4_w4a16_group:group=96", intermediate=96)
    first, second = gemms(problem)
    assert (first.group_k, second.group_k) == (96, 0)
    launch = LaunchConfig(16, 64, 64, 1, 4, 2)
    assert [v.what for v in violations(launch, first, H200)] == ["block_k within a group"]
    assert not list(violations(launch, second, H200))


def test_vllm_and_sglang_tiles_are_reduced_to_fit_shared_memory(tmp_path: Path) -> None:
    """The tile fits an H200, but not a GPU with 99 KiB of shared memory. The number of stages is
    reduced first.
    """
    config_file = parse_config_file(
        json.dumps({"1": vllm_launch(128, 256, 64, num_warps=8, num_stages=4)}), "x"
    )
    l40s = Device("NVIDIA L40S", 101_376, warpgroups=False)
    assert fit_to_problem(config_file, MIXTRAL, H200).notes == ()
    fitted = fit_to_problem(config_file, MIXTRAL, l40s)
    gemm2 = fitted.steps.choose(1).gemm2
    assert (gemm2.num_stages, gemm2.block_n) == (3, 256)
    assert "clamped" in fitted.notes[0]
    for config in fitted.steps.configs:
        for launch, gemm in zip((config.gemm1, config.gemm2), gemms(MIXTRAL), strict=True):
            assert not list(violations(launch, gemm, l40s))


def test_groups_that_allow_no_tile_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="block_k within a group: got 32"):
        choose_config(replace(MIXTRAL, quant="int4_w4a16_group:group=24"), 64)
