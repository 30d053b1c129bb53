"""Tiles that a program overrides: scope, precedence, and what is refused."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tile_samples import MIXTRAL, NAME, ONE, TWO, here_an_h200, launch, ours, write

from experts.triton.configs.select import buffer_kinds_up_to, choose_config, override_config
from experts.triton.launch_config import MoEConfig
from modular_kernel.catalog import make_kernel, this_machine
from modular_kernel.errors import ConfigurationError
from modular_kernel.reference import float64_reference, rounded_reference
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.testing.random_inputs import random_inputs

here = here_an_h200()


def test_overrides_nest_and_restore_the_previous_one() -> None:
    before = choose_config(MIXTRAL, 64)
    with override_config(ONE):
        assert choose_config(MIXTRAL, 64) == choose_config(MIXTRAL, 4096) == ONE
        assert buffer_kinds_up_to(MIXTRAL, 4096) == [(4096, "aligned", 16)]
        with override_config(TWO):
            assert choose_config(MIXTRAL, 64) == TWO
            with override_config(None):
                assert choose_config(MIXTRAL, 64) == before
            assert choose_config(MIXTRAL, 64) == TWO
        assert choose_config(MIXTRAL, 64) == ONE
    assert choose_config(MIXTRAL, 64) == before


def test_an_override_ends_if_an_error_is_raised() -> None:
    before = choose_config(MIXTRAL, 64)
    for error in (ValueError, KeyboardInterrupt, SystemExit):
        with pytest.raises(error), override_config(ONE):  # noqa: PT012
            with pytest.raises(error), override_config(TWO):
                raise error
            assert choose_config(MIXTRAL, 64) == ONE
            raise error
        assert choose_config(MIXTRAL, 64) == before


def test_an_override_does_not_affect_other_threads() -> None:
    before, seen, inside, done = (
        choose_config(MIXTRAL, 64),
        [],
        threading.Event(),
        threading.Event(),
    )

    def other() -> None:
        seen.append(choose_config(MIXTRAL, 64))
        with override_config(TWO):
            inside.set()
            done.wait(10)
            seen.append(choose_config(MIXTRAL, 64))

    with override_config(ONE):
        thread = threading.Thread(target=other)
        thread.start()
        assert inside.wait(10)
        assert choose_config(MIXTRAL, 64) == ONE
        done.set()
        thread.join()
    assert seen == [before, TWO]


def test_an_override_precedes_every_file(here: Path) -> None:
    write(here.parent / f"user/{NAME}", ours(tokens_1=(launch(64), launch(64))))
    assert choose_config(MIXTRAL, 64).gemm1.block_m == 64
    with override_config(ONE):
        assert choose_config(MIXTRAL, 64) == ONE


def test_an_override_accepts_the_format_of_files() -> None:
    with override_config(launch(32, 128, 64)):  # vLLM's: fused columns
        assert choose_config(MIXTRAL, 64).gemm1.block_n == 64
    with override_config({"gemm1": launch(32, 128, 64), "gemm2": launch(32, 32)}):
        assert choose_config(MIXTRAL, 64).gemm1.block_n == 128
    with override_config({8: launch(16), 800: launch(64)}):
        assert choose_config(MIXTRAL, 64).gemm1.block_m == 16
        assert choose_config(MIXTRAL, 700).gemm1.block_m == 64


@pytest.mark.parametrize(
    "config",
    [{}, [], 3, {"64": 3}, {"BLOCK_SIZE_M": 16}, launch(n=10**400), {2.5: launch()}, "x"],
)
def test_a_malformed_override_is_refused_at_once(config: Any) -> None:
    before = choose_config(MIXTRAL, 64)
    with (
        pytest.raises(ConfigurationError, match="override_config"),
        override_config(config),
    ):
        pytest.fail("entered")
    assert choose_config(MIXTRAL, 64) == before


@pytest.mark.parametrize("pair", [ONE, TWO], ids=str)
def test_outputs_do_not_depend_on_an_override(pair: MoEConfig) -> None:
    machine = this_machine()
    if machine.device == "cpu" and not machine.interpreter:
        pytest.skip("no Triton here")
    problem = Problem(tokens=37, hidden=64, intermediate=48, experts=5, top_k=2)
    inputs = random_inputs(problem, torch.device(machine.device))
    exact, fair = float64_reference(*inputs, problem), rounded_reference(*inputs, problem)
    with override_config(pair):
        kernel = make_kernel(
            "MoEPrepareAndFinalizeNoEP", "TritonExperts", problem, machine=machine, poison=True
        )
        out = kernel(*inputs)
    assert float((out - exact).norm()) <= 1.25 * float((fair - exact).norm())


def test_a_plan_called_under_another_override(machine: Machine) -> None:
    """Its buffers are for smaller blocks, so it raises before anything is launched.

    On a GPU it replays the launches of its first call instead of choosing again.
    """
    problem = Problem(4, 64, 48, experts=3, top_k=2)
    inputs = random_inputs(problem, torch.device(machine.device))
    with override_config(ONE):
        plan = make_kernel("MoEPrepareAndFinalizeNoEP", "TritonExperts", problem).plan()
        first = plan(*inputs).clone()
    if plan.kernel.replayable and machine.device == "cuda":
        with override_config(TWO):
            assert torch.equal(plan(*inputs), first)
        return
    with override_config(TWO), pytest.raises(ConfigurationError, match="same tile override"):
        plan(*inputs)
