"""Options of `mk list --engine` and `mk test --engine`, and an engine that is not installed."""

from importlib.util import find_spec

import pytest
from run_mk import Mk, make_mk_fixture

mk = make_mk_fixture()


# Engine -> error if the engine is not installed.
MESSAGES = {
    "vllm": "vLLM: got not installed, need vLLM 0.26 or 0.33",
    "sglang": "SGLang: got not installed, need SGLang 0.5.23",
}


@pytest.mark.parametrize("engine", MESSAGES)
@pytest.mark.parametrize("verb", ["list", "test"])
def test_engine_that_is_not_installed_is_refused(mk: Mk, verb: str, engine: str) -> None:
    if find_spec(engine) is not None:
        pytest.skip(f"{engine} is installed")
    result = mk(verb, "--engine", engine)
    assert result.code == 2
    assert result.err.splitlines()[-1] == f"error: {MESSAGES[engine]}"


@pytest.mark.parametrize(
    "options",
    [
        ("--pf-type", "MoEPrepareAndFinalizeNoEP"),
        ("--tokens", "3"),
        ("--one",),
        ("--mutate", "TorchExperts"),
        ("--torch-only",),
        ("--world-size", "2"),
    ],
    ids=" ".join,
)
def test_options_of_our_parts_are_refused(mk: Mk, options: tuple[str, ...]) -> None:
    result = mk("test", "--engine", "vllm", *options)
    assert result.code == 2
    assert f"{options[0]} together with --engine" in result.err


def test_machine_options_are_refused(mk: Mk) -> None:
    result = mk("list", "--engine", "vllm", "--machine", "h200")
    assert result.code == 2
    assert "--machine together with --engine" in result.err


def test_unknown_engines_and_limits_are_refused(mk: Mk) -> None:
    assert mk("test", "--engine", "trtllm").code == 2
    assert mk("test", "--engine", "vllm", "--call-limit", "0").code == 2


def test_unknown_model_is_refused(mk: Mk) -> None:
    result = mk("test", "--engine", "vllm", "--model", "no-such-model")
    assert result.code == 2
    assert "model: got 'no-such-model'" in result.err
