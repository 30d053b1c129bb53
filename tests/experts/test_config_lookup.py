"""The launch configuration of a call: precedence of tuned files and heuristics, and `explain`."""

import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tuned_config_files import (
    BLOCK_FP8,
    H200,
    MIXTRAL,
    NAME,
    SMALL_TILES,
    TRITON,
    file_contents,
    make_h200_fixture,
    make_lookup,
    vllm_launch,
    write_config_file,
)

from experts.triton.configs import select as tiles
from experts.triton.configs.files import ConfigKey, read_config_file
from experts.triton.configs.heuristics import config_violations
from experts.triton.configs.lookup import ConfigLookup, fit_to_problem
from experts.triton.configs.select import (
    buffer_kinds_up_to,
    choose_config,
    explain,
    on_device,
    override_config,
)
from experts.triton.launch_config import Device, LaunchConfig, MoEConfig
from experts.triton.paths import ALL_PATHS
from experts.triton.standard import TritonExperts
from modular_kernel.catalog import this_machine
from modular_kernel.errors import ConfigurationError
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.spec.quantization import QUANT_SCHEMES
from modular_kernel.tensors import StandardShape

user_folder = make_h200_fixture()


def test_precedence_is_user_file_then_packaged_file_then_heuristics(tmp_path: Path) -> None:
    user = write_config_file(
        tmp_path / f"user/{NAME}", file_contents(tokens_1=(vllm_launch(16), vllm_launch(16)))
    )
    packaged = write_config_file(
        tmp_path / f"packaged/{NAME}", file_contents(tokens_1=(vllm_launch(32), vllm_launch(32)))
    )
    lookup = make_lookup(user.parent, packaged.parent)
    assert lookup.find_source(MIXTRAL).origin == str(user)
    user.unlink()
    source = lookup.find_source(MIXTRAL)
    assert source.origin == str(packaged)
    assert source.searched_locations == (f"user {user.parent}: no file",)
    packaged.unlink()
    packaged.parent.rmdir()
    source = lookup.find_source(MIXTRAL)
    assert source.origin == "heuristics"
    assert source.searched_locations[1] == f"packaged {packaged.parent}: no such folder"


def test_precedence_is_this_triton_then_no_version_then_the_newest_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    contents = file_contents(tokens_1=(vllm_launch(), vllm_launch()))
    del contents["triton_version"]
    folders = ["triton_3_6_0/", "", "triton_3_10_0/", "triton_3_9_1/", "triton_2_0_0/"]
    paths = [write_config_file(tmp_path / f"{folder}{NAME}", contents) for folder in folders]
    write_config_file(tmp_path / f"triton_best/{NAME}", contents)
    for path in paths:
        with caplog.at_level(logging.WARNING):
            assert make_lookup(paths[1].parent).find_source(MIXTRAL).origin == str(path)
        path.unlink()
    warnings = [record.message for record in caplog.records]
    assert all(str(path) in warning for path, warning in zip(paths[2:], warnings, strict=True))
    assert "tuned with Triton 3.10.0, but the installed version is 3.6.0" in warnings[0]


def test_a_file_of_another_triton_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_config_file(
        tmp_path / NAME,
        {**file_contents(tokens_1=(vllm_launch(), vllm_launch())), "triton_version": "3.4.0"},
    )
    with caplog.at_level(logging.WARNING):
        for hidden in (4096, 2048, 1024):
            make_lookup(path.parent).find_source(replace(MIXTRAL, hidden=hidden))
    assert [record.name for record in caplog.records] == ["modular_kernel.tiles"]
    assert "\n" not in caplog.text.strip()


@pytest.mark.parametrize(("file_triton", "triton"), [("3.6.0", "3.6.0"), ("3.6.0+git1", "3.6.0"),
                                               ("3.5.0", None), ("what", "3.6.0")])  # fmt: skip
def test_a_file_of_the_same_or_an_unknown_triton_is_not_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, file_triton: str, triton: str | None
) -> None:
    path = write_config_file(
        tmp_path / NAME,
        {**file_contents(tokens_1=(vllm_launch(), vllm_launch())), "triton_version": file_triton},
    )
    with caplog.at_level(logging.WARNING):
        make_lookup(path.parent, triton=triton).find_source(MIXTRAL)
    assert not caplog.records


def test_vllm_names_are_found_after_ours(tmp_path: Path) -> None:
    stem = NAME.removesuffix(".json") + ",dtype=fp8_w8a8,block_shape="
    vllm_file = write_config_file(tmp_path / f"{stem}[128,128].json", {"1": vllm_launch()})
    assert make_lookup(vllm_file.parent).find_source(BLOCK_FP8).origin == str(vllm_file)
    our_file = write_config_file(
        tmp_path / f"triton_3_1_0/{stem}[128, 128].json", {"1": vllm_launch()}
    )
    assert make_lookup(vllm_file.parent).find_source(BLOCK_FP8).origin == str(our_file)


def test_rows_that_load_slowly_do_not_get_large_tiles(tmp_path: Path) -> None:
    """Tiles that were tuned for other layers spill if rows are not multiples of 16 elements."""
    problem = replace(MIXTRAL, hidden=4100)
    path = write_config_file(tmp_path / NAME, {"1": vllm_launch(64, 256)})
    source = make_lookup(path.parent).find_source(problem)
    assert source.origin == "heuristics"
    assert "16 elements" in source.searched_locations[0]
    tuned_for = {"experts_part": "TritonExperts", "hidden": 4100, "top_k": 2}
    write_config_file(
        tmp_path / NAME,
        {**file_contents(tokens_1=(vllm_launch(), vllm_launch())), "tuned_for": tuned_for},
    )
    assert make_lookup(path.parent).find_source(problem).origin == str(path)


def test_without_a_gpu_no_file_is_used(tmp_path: Path) -> None:
    folder = write_config_file(tmp_path / "E=8,N=14336,device_name=_.json", "broken").parent
    source = ConfigLookup((("user", folder),), Device(), TRITON).find_source(MIXTRAL)
    assert (source.origin, source.searched_locations) == ("heuristics", ())


def test_packaged_files_are_valid() -> None:
    folder = Path(tiles.__file__).parent / "data"
    for path in folder.rglob("*.json"):
        key, tuned_configs = ConfigKey.parse(path.name), read_config_file(path)
        assert not tuned_configs.is_foreign, f"{path} is not in our format"
        assert tuned_configs.tuned_for is not None
        assert path.parent.name.replace("triton_", "").replace("_", ".") == tuned_configs.triton
        hidden, top_k = tuned_configs.tuned_for.hidden, tuned_configs.tuned_for.top_k
        problem = Problem(1, hidden, key.intermediate, key.experts, top_k)
        if not key.dtype:
            fit_to_problem(tuned_configs, problem, H200)


@pytest.mark.parametrize("top_k", [17, 22, 32])
@pytest.mark.parametrize("quant", ["none", "fp8_w8a8_channel", "fp8_w8a8_block", "mxfp4_w4a16"])
def test_packaged_files_of_another_top_k_give_launches_that_fit(quant: str, top_k: int) -> None:
    """The files were tuned with a small top-k, and some of their paths do not support a larger
    top-k.
    """
    folder = Path(tiles.__file__).parent / "data"
    keys = {ConfigKey.parse(path.name) for path in folder.rglob("*.json")}
    sizes = {(key.experts, key.intermediate) for key in keys if key.experts >= top_k}
    assert len(sizes) > 3
    device = Device.from_name("NVIDIA H200")
    for experts, intermediate in sizes:
        problem = Problem(1, 2048, intermediate, experts, top_k, quant=quant)
        paths = tuple(path.name for path in ALL_PATHS if path.supports(problem, device))
        with on_device(device):
            for tokens in (1, 2, 4, 64, 4096):
                config = choose_config(problem, tokens, paths)
                assert config.path in paths
                assert not list(config_violations(config, problem, device))


# -------------------------------------------------------------------------- fallback and heuristics

# The launches of calls without files. Each row has the maximum number of rows per expert, block_m,
# (block_n, block_k, num_warps, num_stages) of GEMM 1 and of GEMM 2, and group_m.
HEURISTICS: dict[str, list[tuple[int | None, int, tuple[int, ...], tuple[int, ...], int]]] = {
    "half": [
        (10, 16, (64, 128, 4, 3), (64, 128, 4, 4), 32),
        (20, 32, (64, 64, 4, 6), (64, 128, 4, 4), 32),
        (56, 64, (64, 64, 4, 4), (128, 64, 4, 4), 8),
        (None, 128, (128, 64, 8, 3), (256, 64, 8, 4), 16),
    ],
    "float32": [
        (24, 16, (32, 32, 4, 3), (64, 32, 4, 3), 1),
        (None, 64, (32, 32, 4, 2), (64, 32, 4, 2), 8),
    ],
    "unaligned": [
        (24, 16, (32, 32, 4, 3), (64, 32, 4, 3), 1),
        (None, 64, (64, 32, 8, 3), (128, 32, 8, 3), 8),
    ],
}


def compute_heuristic_config(problem: Problem, tokens: int) -> MoEConfig:
    """Return the expected configuration of a call without a tuned file."""
    is_unaligned = problem.hidden % 16 or problem.intermediate % 16
    name = "unaligned" if is_unaligned else "half"
    table = HEURISTICS["float32" if problem.dtype is torch.float32 else name]
    rows_per_expert = tokens * problem.top_k / problem.experts
    _, block_m, gemm1, gemm2, group_m = next(
        row for row in table if row[0] is None or rows_per_expert <= row[0]
    )
    launches = []
    for depth, launch in ((problem.hidden, gemm1), (problem.intermediate, gemm2)):
        block_n, block_k, num_warps, num_stages = launch
        if depth % block_k and block_k == 256 and depth % 128 == 0:  # only 256 is halved
            block_k = 128
        steps = -(-depth // block_k)
        if 2 * steps < 3 * num_stages:  # at most two thirds of the depth are in flight
            num_stages = min(num_stages, max(3, 2 * steps // 3))
        launches.append(LaunchConfig(block_m, block_n, block_k, group_m, num_warps, num_stages))
    return MoEConfig(*launches, "aligned")


SHAPES = ((4096, 14336), (2880, 2880), (48, 80), (100, 72), (7168, 2048), (96, 4096))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (256, 8), (1, 16), (128, 1)])
def test_heuristics_are_used_without_a_file(dtype: str, experts: int, top_k: int) -> None:
    token_counts = [0, *range(1, 40), 79, 80, 81, 96, 192, 193, 320, 384, 768, 769, 1536, 1537]
    token_counts.append(65536)
    for hidden, intermediate in SHAPES:
        for activation in ("silu", "relu2"):
            problem = Problem(1, hidden, intermediate, experts, top_k, dtype, activation=activation)
            with on_device(Device()):  # there are no files for this device
                configs = {tokens: choose_config(problem, tokens) for tokens in token_counts}
            assert configs == {t: compute_heuristic_config(problem, t) for t in token_counts}


@pytest.mark.parametrize("quant", sorted(set(QUANT_SCHEMES) - {"nvfp4_w4a4"}))
@pytest.mark.parametrize("arch", [(8, 0), (8, 9), (9, 0), (12, 0)])
def test_heuristics_fit_every_scheme_and_device(quant: str, arch: tuple[int, int]) -> None:
    device = Device.from_machine(Machine("cuda", arch, name="X"))
    problem = replace(MIXTRAL, quant=quant)
    for config in ConfigLookup((), device, TRITON).find_source(problem).steps.configs:
        assert not list(config_violations(config, problem, device))


def test_every_block_m_is_listed_with_its_largest_number_of_tokens() -> None:
    with on_device(Device()):  # there are no files for this device
        assert buffer_kinds_up_to(MIXTRAL, 512) == [
            (40, "aligned", 16),
            (80, "aligned", 32),
            (224, "aligned", 64),
            (512, "aligned", 128),
        ]
        assert buffer_kinds_up_to(MIXTRAL, 60) == [(40, "aligned", 16), (60, "aligned", 32)]
        assert buffer_kinds_up_to(MIXTRAL, 0) == [(0, "aligned", 16)]
    launches = {
        "1": vllm_launch(64),
        "9": vllm_launch(16),
        "21": vllm_launch(64),
        "61": vllm_launch(128, 64, 64),
    }
    with override_config(launches):
        assert {m: t for t, _, m in buffer_kinds_up_to(MIXTRAL, 100)} == {64: 41, 16: 15, 128: 100}
        assert {m: t for t, _, m in buffer_kinds_up_to(MIXTRAL, 10)} == {64: 5, 16: 10}


@given(
    st.dictionaries(st.integers(1, 700), st.sampled_from([16, 32, 64, 128]), min_size=1, max_size=9)
)
def test_workspaces_of_a_tuned_file_grow_with_tokens(block_m_by_tokens: dict[int, int]) -> None:
    """The workspace for the maximum number of tokens is large enough for all smaller calls."""
    problem = Problem(tokens=600, hidden=64, intermediate=64, experts=16, top_k=4)
    launches = {str(tokens): vllm_launch(m, 32, 64) for tokens, m in block_m_by_tokens.items()}
    with override_config(launches):
        part = TritonExperts(problem)
        max_specs = part.workspace_shapes(StandardShape(600, 4)).buffers()
        for tokens in (1, 2, 5, 17, 100, 255, 256, 301, 599, 600):
            block_m = choose_config(problem, tokens).gemm1.block_m
            assert block_m in [m for _, _, m in buffer_kinds_up_to(problem, tokens)]
            for name, spec in part.workspace_shapes(StandardShape(tokens, 4)).buffers().items():
                assert spec.numel <= max_specs[name].numel, (name, tokens)


# ------------------------------------------------------------------------------------------ explain


def test_explain_names_the_file_and_the_reason(user_folder: Path) -> None:
    tuned_for = {"experts_part": "TritonExperts", "hidden": 2048, "top_k": 2}
    contents = file_contents(
        tokens_16=(vllm_launch(16), vllm_launch(16)),
        tokens_64=(vllm_launch(64), vllm_launch(64, 32)),
    )
    path = write_config_file(
        user_folder.parent / f"user/triton_3_1_0/{NAME}", {**contents, "tuned_for": tuned_for}
    )
    explanation = explain(MIXTRAL, 40)
    assert f"{path}: tokens 16 is the nearest of 16, 64" in explanation
    assert "on NVIDIA H200" in explanation
    gemm1 = "GEMM 1: block_m=16 block_n=64 block_k=128 group_m=1 warps=4 stages=3 (gate"
    assert gemm1 in explanation
    assert "triton_version" not in explanation
    assert "note: tuned for hidden=2048, but this problem has hidden=4096" in explanation
    assert "GEMM 2: block_m=64 block_n=32" in explain(MIXTRAL, 41)
    with override_config(SMALL_TILES):
        assert "from override_config: tokens 1 is the nearest of 1" in explain(MIXTRAL, 41)


def test_explain_states_why_there_is_no_file(user_folder: Path) -> None:
    explanation = explain(MIXTRAL, 100)
    assert re.search(r"heuristic \d of \d: 25 rows per expert", explanation)
    assert ": 1 row per expert" in explain(MIXTRAL, 4)
    assert ": 0.25 rows per expert" in explain(MIXTRAL, 1)
    assert ": 16,384 rows per expert" in explain(MIXTRAL, 65536)
    assert f"looked in user {user_folder}: no such folder" in explanation
    assert f"`mk tune` writes one: {NAME}" in explanation
    assert "device_name=NVIDIA_B200" in explain(MIXTRAL, 1, "NVIDIA B200")


def test_explain_states_that_there_is_no_gpu() -> None:
    if this_machine().device == "cpu":
        explanation = explain(MIXTRAL, 1)
        assert "tuned files are for a GPU" in explanation
        assert explanation.startswith("T1-")
        assert ", 1 token, on no GPU" in explanation
        assert ", 100 tokens, on" in explain(MIXTRAL, 100)


# ------------------------------------------------------------------------------------------ caching


def test_files_are_read_once_until_caches_are_cleared(user_folder: Path) -> None:
    path = write_config_file(
        user_folder.parent / f"user/{NAME}",
        file_contents(tokens_1=(vllm_launch(64), vllm_launch(64))),
    )
    assert choose_config(MIXTRAL, 3).gemm1.block_m == 64
    path.write_text("broken", encoding="utf-8")
    assert choose_config(MIXTRAL, 3).gemm1.block_m == 64
    assert choose_config(MIXTRAL.with_tokens(2), 700).gemm1.block_m == 64
    tiles.clear_caches()
    with pytest.raises(ConfigurationError, match="device_name"):
        choose_config(MIXTRAL, 3)


def test_the_folder_of_the_user_is_searched_first(user_folder: Path) -> None:
    for folder_name, block_m in (("packaged", 32), ("user", 64)):
        write_config_file(
            user_folder.parent / folder_name / NAME,
            file_contents(tokens_1=(vllm_launch(block_m), vllm_launch(block_m))),
        )
        tiles.clear_caches()
        assert choose_config(MIXTRAL, 3).gemm1.block_m == block_m


def test_a_bad_file_of_another_layer_has_no_effect(user_folder: Path) -> None:
    write_config_file(user_folder.parent / f"user/{NAME.replace('E=8', 'E=9')}", "broken")
    assert choose_config(MIXTRAL, 3) == compute_heuristic_config(MIXTRAL, 3)


def test_the_environment_sets_the_folder_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    from modular_kernel.settings import read_settings

    monkeypatch.setenv("MK_CONFIG_DIR", "/some/where")
    assert read_settings().config_dir == Path("/some/where")
    monkeypatch.delenv("MK_CONFIG_DIR")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/home/x/.config")
    assert read_settings().config_dir == Path("/home/x/.config/modular_kernel")
