"""A layer without a tuned file uses the tiles of the nearest layers that have one."""

from dataclasses import replace
from pathlib import Path

import pytest
from tuned_config_files import (
    H200,
    MIXTRAL,
    TRITON,
    file_contents,
    make_lookup,
    vllm_launch,
    write_config_file,
)

from experts.triton.configs import nearest
from experts.triton.configs.files import (
    ConfigKey,
    TunedConfigs,
    parse_config_file,
    read_config_file,
)
from experts.triton.configs.heuristics import make_heuristic_steps
from experts.triton.configs.lookup import fit_to_problem
from experts.triton.configs.nearest import (
    BorrowedConfig,
    Point,
    TunedLayer,
    borrow_configs,
    steps_from_borrowed,
)
from experts.triton.configs.select import _describe_source, current_lookup, explain, on_device
from experts.triton.gemv import gemv_config
from experts.triton.gemv_w4 import gemv_w4_config
from experts.triton.launch_config import Device, LaunchConfig, MoEConfig
from experts.triton.paths import ALL_PATHS
from modular_kernel.errors import ConfigurationError
from modular_kernel.spec.problem import Problem

QWEN = Problem(tokens=1, hidden=2048, intermediate=768, experts=128, top_k=8)
HEURISTICS = make_heuristic_steps(MIXTRAL, H200, ("aligned",))
FOLDER = "triton_3_6_0"


def write_packaged_file(
    folder: Path, problem: Problem, *, tuned: bool = True, **entries: int
) -> Path:
    """Write a packaged file.

    tuned: whether the file states the layer for which it was tuned.
    entries: block_m by number of tokens, such as t64=32.
    """
    launches = {
        f"tokens_{name[1:]}": (vllm_launch(m), vllm_launch(m)) for name, m in entries.items()
    }
    contents = file_contents(**launches)
    if tuned:
        sizes = {"hidden": problem.hidden, "top_k": problem.top_k}
        contents["tuned_for"] = {"experts_part": "TritonExperts", **sizes}
    name = ConfigKey.from_problem(problem, H200.name).file_name
    return write_config_file(folder / FOLDER / name, contents)


def make_tuned_layer(folder: Path, problem: Problem, **entries: int) -> TunedLayer:
    path = write_packaged_file(folder, problem, **entries)
    return TunedLayer.from_config_file(ConfigKey.parse(path.name), read_config_file(path))


def list_block_ms(borrowed: list[BorrowedConfig]) -> list[int]:
    return [borrowed_config.config.gemm1.block_m for borrowed_config in borrowed]


def test_rows_per_expert_have_the_largest_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 64 tokens, Mixtral has 16 rows per expert, like Qwen3 with 256 tokens."""
    qwen = make_tuned_layer(tmp_path, QWEN, t1=16, t64=16, t256=32, t1024=64, t4096=128)
    monkeypatch.setattr(nearest, "MAX_DISTANCE", 9.0)
    borrowed = borrow_configs([qwen], MIXTRAL, H200, HEURISTICS, [1, 64, 256, 1024])
    assert list_block_ms(borrowed) == [16, 32, 64, 128]
    assert borrowed[1].origin == "E=128, K=8, H=2048, I=768, 256 tokens"


def test_layers_with_the_most_similar_sizes_are_used_for_equal_rows(tmp_path: Path) -> None:
    wide = make_tuned_layer(tmp_path, replace(MIXTRAL, intermediate=7168), t16=16)
    narrow = make_tuned_layer(tmp_path, replace(MIXTRAL, intermediate=1792), t16=32)
    small = replace(MIXTRAL, intermediate=2048)
    for lenders in ([wide, narrow], [narrow, wide]):
        assert list_block_ms(borrow_configs(lenders, MIXTRAL, H200, HEURISTICS, [16])) == [16]
        assert list_block_ms(borrow_configs(lenders, small, H200, HEURISTICS, [16])) == [32]


def test_heuristics_are_used_without_a_near_layer(tmp_path: Path) -> None:
    qwen = make_tuned_layer(tmp_path, QWEN, t1=16)
    for lenders in ([qwen], []):
        (borrowed,) = borrow_configs(lenders, MIXTRAL, H200, HEURISTICS, [4096])
        assert borrowed == BorrowedConfig(4096, HEURISTICS.choose(4096), "heuristics")
    (borrowed,) = borrow_configs([qwen], replace(QWEN, top_k=7), H200, HEURISTICS, [1])
    assert borrowed.origin == "E=128, K=8, H=2048, I=768, 1 token"


def test_a_point_is_nearest_to_itself() -> None:
    point = Point.from_call(8, 2, 4096, 14336, 64)
    assert point.distance_to(point) == 0
    assert Point.from_call(8, 2, 4096, 14336, 1).rows == 0, "one row in each of two experts"
    assert Point.from_call(1, 1, 64, 64, 4) == Point(2.0, 0.0, 6.0, 6.0)


def test_launches_that_do_not_fit_are_not_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = replace(QWEN, quant="int4_w4a16_group:group=32")
    template = '{"format": "modular_kernel.tiles/2", "1": {"gemm1": %s, "gemm2": %s}}'
    tile = '{"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": %d, "GROUP_SIZE_M": 1}'
    with_block_k_4096, with_block_k_32 = (
        parse_config_file(template % (tile % k, tile % k), "x") for k in (4096, 32)
    )
    lenders = [
        TunedLayer(128, 8, 2048, 768, with_block_k_4096),
        TunedLayer(8, 2, 4096, 14336, with_block_k_32),
    ]
    monkeypatch.setattr(nearest, "MAX_DISTANCE", 99.0)
    borrowed = borrow_configs(lenders, problem, H200, HEURISTICS)
    assert all(borrowed_config.config.gemm1.block_k == 32 for borrowed_config in borrowed)
    borrowed = borrow_configs(lenders[:1], problem, H200, HEURISTICS)
    assert all(borrowed_config.origin == "heuristics" for borrowed_config in borrowed)


def test_a_path_for_few_tokens_is_not_reused_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nearest, "MAX_DISTANCE", 99.0)
    gemv, aligned = gemv_config.default_config(MIXTRAL), HEURISTICS.choose(64)
    launches = ((1, gemv.gemm1), (64, aligned.gemm1)), ((1, gemv.gemm2), (64, aligned.gemm2))
    tuned_configs = TunedConfigs("x", *launches, False, False, paths=((1, "gemv"), (64, "aligned")))
    lender = TunedLayer(8, 2, 4096, 14336, tuned_configs)
    paths = {b.tokens: b.config.path for b in borrow_configs([lender], MIXTRAL, H200, HEURISTICS)}
    max_tokens_gemv = gemv_config.max_tokens(MIXTRAL)
    assert [t for t, path in paths.items() if path == "gemv"] == [
        t for t in paths if t <= max_tokens_gemv
    ]
    steps = fit_to_problem(tuned_configs, MIXTRAL, H200).steps
    assert steps.choose(max_tokens_gemv) == gemv
    assert steps.choose(max_tokens_gemv + 1) == steps.choose(64) == aligned, (
        "even if 1 is nearer than 64"
    )
    for experts in (8, 64, 256):
        problem = replace(MIXTRAL, experts=experts)
        last_gemv_tokens = fit_to_problem(tuned_configs, problem, H200).steps.last_tokens[0]
        assert last_gemv_tokens == min(32, max(1, gemv_config.max_tokens(problem)))


def test_packed_weights_reuse_the_path_but_not_its_launches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The path's launches depend on the number of programs, which is 360 for the tuned layer and
    512 for the problem.
    """
    monkeypatch.setattr(nearest, "MAX_DISTANCE", 99.0)
    tuned_problem = replace(QWEN, quant="mxfp4_w4a16", hidden=2880, intermediate=2880, top_k=4)
    problem = replace(tuned_problem, hidden=4096)
    tuned_config = gemv_w4_config.default_config(tuned_problem)
    tuned_configs = TunedConfigs(
        "x",
        ((1, tuned_config.gemm1),),
        ((1, tuned_config.gemm2),),
        False,
        False,
        paths=((1, "gemv_w4"),),
    )
    lender = TunedLayer(128, 4, 2880, 2880, tuned_configs)
    for tokens in (1, 2, gemv_w4_config.max_tokens(problem)):
        (borrowed,) = borrow_configs([lender], problem, H200, HEURISTICS, [tokens])
        assert borrowed.config == gemv_w4_config.default_config(problem, tokens) != tuned_config
        assert borrowed.origin.startswith("E=128, K=4, H=2880")


def test_a_call_uses_the_nearest_number_of_tokens() -> None:
    configs = [MoEConfig(*[LaunchConfig(m, 64, 64, 1, 4, 3)] * 2, "aligned") for m in (16, 32, 64)]
    steps = steps_from_borrowed(
        [BorrowedConfig(t, config, "x") for t, config in zip((1, 2, 8), configs, strict=True)]
    )
    expected_block_m = {0: 16, 1: 16, 2: 32, 5: 32, 6: 64, 8: 64, 1 << 40: 64}
    assert {t: steps.choose(t).gemm1.block_m for t in expected_block_m} == expected_block_m


def test_neighbors_are_used_after_files_and_before_heuristics(tmp_path: Path) -> None:
    user, packaged = tmp_path / "user", tmp_path / "packaged"
    lookup = make_lookup(user, packaged)
    write_packaged_file(packaged, QWEN, t1=16, t4096=128)
    source = lookup.find_source(MIXTRAL)
    assert source.origin == "nearest"
    assert len(source.step_origins) == len(source.steps.last_tokens)
    assert set(source.step_origins) == {"heuristics"}, "the tuned layer is too far"
    write_packaged_file(packaged, replace(MIXTRAL, intermediate=7168), t1=16, t64=128)
    source = lookup.find_source(MIXTRAL)
    assert source.step_origins[0] == "E=8, K=2, H=4096, I=7168, 1 token"
    assert source.steps.choose(64).gemm1.block_m == 128
    assert len(source.searched_locations) == 2
    for problem in (
        replace(MIXTRAL, quant="fp8_w8a8_block"),  # no file has this number format
        replace(MIXTRAL, hidden=4100),  # rows have another alignment
    ):
        assert lookup.find_source(problem).origin == "heuristics"
    h100_lookup = replace(lookup, device=replace(H200, name="NVIDIA H100"))
    assert h100_lookup.find_source(MIXTRAL).origin == "heuristics"
    assert replace(lookup, triton="3.7.0").find_source(MIXTRAL).origin == "heuristics"
    user_lookup = make_lookup(packaged)
    assert user_lookup.find_source(MIXTRAL).origin == "heuristics", (
        "files in the user's folder are not used for other layers"
    )
    write_packaged_file(user, MIXTRAL, t1=64)
    source = lookup.find_source(MIXTRAL)
    assert source.origin.startswith(str(user))
    assert source.steps.choose(1) != make_heuristic_steps(MIXTRAL, H200).choose(1)


def test_rows_per_expert_determine_the_path_and_block_of_a_neighbor(tmp_path: Path) -> None:
    """Tiles that were tuned for 16 rows per expert are used up to 24 rows, and heuristics for more
    rows.
    """
    sizes = {"experts": 64, "top_k": 8, "intermediate": 2048}
    layer = replace(MIXTRAL, quant="fp8_w8a8_channel", **sizes)
    write_packaged_file(tmp_path, replace(layer, intermediate=2560), t128=32, t256=32, t512=64)
    source = make_lookup(tmp_path / "u", tmp_path).find_source(layer)
    assert [source.steps.choose(t).gemm1.block_m for t in (128, 256, 512)] == [32, 32, 64]
    device = Device("NVIDIA H200", tma=True)
    paths = tuple(path.name for path in ALL_PATHS if path.supports(layer, device))
    steps = source.launch_steps(layer, device, paths)
    heuristic_steps = make_heuristic_steps(layer, device, paths)
    assert steps.choose(128) == source.steps.choose(128) != heuristic_steps.choose(128)
    assert steps.choose(192) == source.steps.choose(192), "up to 24 rows"
    assert steps.choose(193) == heuristic_steps.choose(193) != source.steps.choose(193)
    assert steps.choose(512).path == "grouped_tma"
    aligned_steps = source.launch_steps(layer, device, ("aligned",))
    assert {config.path for config in aligned_steps.configs} == {"aligned"}
    assert aligned_steps.choose(768).gemm1.block_m == 128
    with on_device(device):
        description = _describe_source(source, layer, 512, heuristic_steps.choose(512))
        assert "heuristics: 64 rows per expert" in description


def test_launches_that_depend_on_skew_are_not_borrowed(tmp_path: Path) -> None:
    """With 3 to 56 rows per expert, launches tuned with uniform routing are slow with others."""
    layer = replace(MIXTRAL, experts=64, top_k=8, intermediate=2048)
    device = Device("NVIDIA H200", tma=True)
    paths = tuple(path.name for path in ALL_PATHS if path.supports(layer, device))
    write_packaged_file(tmp_path, replace(layer, intermediate=2560), t24=16, t32=32, t256=16)
    source = make_lookup(tmp_path / "u", tmp_path).find_source(layer)
    steps = source.launch_steps(layer, device, paths)
    heuristic_steps = make_heuristic_steps(layer, device, paths)
    assert steps.choose(24) == source.steps.choose(24) != heuristic_steps.choose(24)
    for tokens in (25, 32, 256, 448):
        assert steps.choose(tokens) == heuristic_steps.choose(tokens), tokens
    config = heuristic_steps.choose(256)
    assert config != source.steps.choose(256)
    description = _describe_source(source, layer, 256, config)
    assert "heuristics: 32 rows per expert, and the launches of E=64, K=8" in description
    assert description.endswith("were tuned with uniform routing only")


def test_a_packaged_file_states_its_layer(tmp_path: Path) -> None:
    write_packaged_file(tmp_path, QWEN, tuned=False, t1=16)
    with pytest.raises(ConfigurationError, match="tuned_for"):
        make_lookup(tmp_path / "none", tmp_path).find_source(MIXTRAL)


def test_explain_names_the_neighbor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_packaged_file(tmp_path, replace(MIXTRAL, hidden=6144, intermediate=16384), t1=16, t8=64)
    monkeypatch.setattr(
        "experts.triton.configs.select._make_machine_lookup",
        lambda: make_lookup(tmp_path / "u", tmp_path),
    )
    with on_device(H200):
        assert current_lookup().triton == TRITON
        explanation = explain(MIXTRAL, 8)
        explanation_8192 = explain(MIXTRAL, 8192)
    assert "the nearest layer with a file: E=8, K=2, H=6144, I=16384, 8 tokens" in explanation
    assert "from heuristics: no tuned layer is close enough" in explanation_8192
    assert "`mk tune` writes one: E=8,N=14336" in explanation
