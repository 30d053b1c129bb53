"""`override_config` sets the tiles of the calls in a scope, regardless of files and heuristics."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tuned_config_files import (
    LARGE_TILES,
    MIXTRAL,
    NAME,
    SMALL_TILES,
    file_contents,
    make_h200_fixture,
    vllm_launch,
    write_config_file,
)

from experts.triton.configs.select import (
    buffer_kinds_up_to,
    choose_config,
    current_lookup,
    override_config,
)
from experts.triton.launch_config import MoEConfig
from experts.triton.paths import BY_NAME
from experts.triton.standard import supported_paths
from modular_kernel.catalog import make_kernel, this_machine
from modular_kernel.errors import ConfigurationError
from modular_kernel.reference import float64_reference, rounded_reference
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.testing.random_inputs import random_inputs

user_folder = make_h200_fixture()


def test_overrides_nest_and_restore_the_previous_one() -> None:
    before = choose_config(MIXTRAL, 64)
    with override_config(SMALL_TILES):
        assert choose_config(MIXTRAL, 64) == choose_config(MIXTRAL, 4096) == SMALL_TILES
        assert buffer_kinds_up_to(MIXTRAL, 4096) == [(4096, "aligned", 16)]
        with override_config(LARGE_TILES):
            assert choose_config(MIXTRAL, 64) == LARGE_TILES
            with override_config(None):
                assert choose_config(MIXTRAL, 64) == before
            assert choose_config(MIXTRAL, 64) == LARGE_TILES
        assert choose_config(MIXTRAL, 64) == SMALL_TILES
    assert choose_config(MIXTRAL, 64) == before


def test_an_override_ends_if_an_error_is_raised() -> None:
    before = choose_config(MIXTRAL, 64)
    for error in (ValueError, KeyboardInterrupt, SystemExit):
        with pytest.raises(error), override_config(SMALL_TILES):  # noqa: PT012
            with pytest.raises(error), override_config(LARGE_TILES):
                raise error
            assert choose_config(MIXTRAL, 64) == SMALL_TILES
            raise error
        assert choose_config(MIXTRAL, 64) == before


@pytest.mark.parametrize(
    ("path", "quant"),
    [
        ("aligned_w4", "none"),
        ("aligned_w4", "int8_w8a16_group"),
        ("aligned_w4", "int4_w4a16_act_order"),
        ("gemv_w4", "fp8_w8a8_block"),
        ("grouped_w4", "none"),
        ("grouped_w4", "int8_w8a16_group"),
        ("grouped_w4", "int4_w4a16_act_order"),
        ("dequantized", "none"),
    ],
)
def test_an_override_with_an_unsupported_path_is_replaced_by_heuristics(
    path: str, quant: str, user_folder: Path
) -> None:
    device = current_lookup().device
    int4_problem, problem = (
        replace(MIXTRAL, quant=name, dtype=torch.bfloat16) for name in ("int4_w4a16_group", quant)
    )
    config = BY_NAME[path].default_config(int4_problem, 64, device)
    paths = supported_paths(problem)
    assert path not in paths
    for tokens in (1, 64, 4096):
        expected = choose_config(problem, tokens, paths)
        for prepared in (False, True):
            with override_config(config):
                assert choose_config(problem, tokens, paths, prepared=prepared) == expected


def test_an_override_does_not_affect_other_threads() -> None:
    before = choose_config(MIXTRAL, 64)
    thread_configs: list[MoEConfig] = []
    entered, may_exit = threading.Event(), threading.Event()

    def override_in_thread() -> None:
        thread_configs.append(choose_config(MIXTRAL, 64))
        with override_config(LARGE_TILES):
            entered.set()
            may_exit.wait(10)
            thread_configs.append(choose_config(MIXTRAL, 64))

    with override_config(SMALL_TILES):
        thread = threading.Thread(target=override_in_thread)
        thread.start()
        assert entered.wait(10)
        assert choose_config(MIXTRAL, 64) == SMALL_TILES
        may_exit.set()
        thread.join()
    assert thread_configs == [before, LARGE_TILES]


def test_an_override_precedes_every_file(user_folder: Path) -> None:
    write_config_file(
        user_folder.parent / f"user/{NAME}",
        file_contents(tokens_1=(vllm_launch(64), vllm_launch(64))),
    )
    assert choose_config(MIXTRAL, 64).gemm1.block_m == 64
    with override_config(SMALL_TILES):
        assert choose_config(MIXTRAL, 64) == SMALL_TILES


def test_an_override_accepts_the_format_of_files() -> None:
    # vLLM's BLOCK_SIZE_N counts the columns of both gate and up.
    with override_config(vllm_launch(32, 128, 64)):
        assert choose_config(MIXTRAL, 64).gemm1.block_n == 64
    with override_config({"gemm1": vllm_launch(32, 128, 64), "gemm2": vllm_launch(32, 32)}):
        assert choose_config(MIXTRAL, 64).gemm1.block_n == 128
    with override_config({8: vllm_launch(16), 800: vllm_launch(64)}):
        assert choose_config(MIXTRAL, 64).gemm1.block_m == 16
        assert choose_config(MIXTRAL, 700).gemm1.block_m == 64


@pytest.mark.parametrize(
    "config",
    [{}, [], 3, {"64": 3}, {"BLOCK_SIZE_M": 16}, vllm_launch(n=10**400), {2.5: vllm_launch()}, "x"],
)
def test_a_malformed_override_is_refused_at_once(config: Any) -> None:
    before = choose_config(MIXTRAL, 64)
    with (
        pytest.raises(ConfigurationError, match="override_config"),
        override_config(config),
    ):
        pytest.fail("entered")
    assert choose_config(MIXTRAL, 64) == before


@pytest.mark.parametrize("pair", [SMALL_TILES, LARGE_TILES], ids=str)
def test_outputs_do_not_depend_on_an_override(pair: MoEConfig) -> None:
    machine = this_machine()
    if machine.device == "cpu" and not machine.interpreter:
        pytest.skip("no Triton here")
    problem = Problem(tokens=37, hidden=64, intermediate=48, experts=5, top_k=2)
    inputs = random_inputs(problem, torch.device(machine.device))
    exact, rounded = float64_reference(*inputs, problem), rounded_reference(*inputs, problem)
    with override_config(pair):
        kernel = make_kernel(
            "MoEPrepareAndFinalizeNoEP", "TritonExperts", problem, machine=machine, poison=True
        )
        out = kernel(*inputs)
    assert float((out - exact).norm()) <= 1.25 * float((rounded - exact).norm())


def test_a_plan_is_not_called_under_another_override(machine: Machine) -> None:
    """The plan's buffers are for smaller blocks, so its call raises before a kernel is launched.

    On a GPU, the plan replays the launches of its first call instead.
    """
    problem = Problem(4, 64, 48, experts=3, top_k=2)
    inputs = random_inputs(problem, torch.device(machine.device))
    with override_config(SMALL_TILES):
        plan = make_kernel("MoEPrepareAndFinalizeNoEP", "TritonExperts", problem).plan()
        first = plan(*inputs).clone()
    if plan.kernel.replayable and machine.device == "cuda":
        with override_config(LARGE_TILES):
            assert torch.equal(plan(*inputs), first)
        return
    with (
        override_config(LARGE_TILES),
        pytest.raises(ConfigurationError, match="same tile override"),
    ):
        plan(*inputs)
