"""Registration of stages: keys are unique, pairs of permutes are complete, and values are valid.

Other packages register stages by entry point.
"""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import toy_backend
from runner_stage_fixtures import NO_EP, PROBLEM, make_pools_fixture, make_stages_fixture
from third_party import install, mk
from toy_backend import ToyExperts, ToyInput, ToyOutput

from experts import TorchExperts
from experts.staged import make_experts
from modular_kernel import runner
from modular_kernel.catalog import check, list_broken_stages, make_kernel
from modular_kernel.errors import ConfigurationError, DuplicatePartError, UnknownPartError
from modular_kernel.runner import (
    MoeRunnerCore,
    RunnerCall,
    register_core,
    register_fused_func,
    register_post_permute,
    register_pre_permute,
)
from modular_kernel.spec.problem import Combine, Reduce, RowContents
from modular_kernel.testing import Case
from modular_kernel.testing.verify.one_process import prove

SOURCE = Path(toy_backend.__file__).read_text(encoding="utf-8")
pools = make_pools_fixture()


class XBackend:
    """Stages of the backend "x"."""

    @property
    def runner_backend(self) -> str:
        return "x"


class XInput(XBackend, ToyInput):
    pass


class XOutput(XBackend, ToyOutput):
    pass


def pre_permute(call: RunnerCall[Any]) -> ToyInput:
    return XInput(**vars(toy_backend.standard_to_toy(call)))


def post_permute(result: ToyOutput, call: RunnerCall[Any]) -> None:
    toy_backend.toy_to_standard(result, call)


class Core(MoeRunnerCore[Any]):
    state = toy_backend.ToyState

    def run(self, runner_input: ToyInput, call: RunnerCall[Any]) -> ToyOutput:
        return XOutput(**vars(toy_backend.ToyCore(self.problem).run(runner_input, call)))


def fused(call: RunnerCall[Any]) -> None:
    toy_backend.fused_toy(call)


def other_pre_permute(call: RunnerCall[Any]) -> ToyInput:
    return pre_permute(call)


def other_post_permute(result: ToyOutput, call: RunnerCall[Any]) -> None:
    post_permute(result, call)


class OtherCore(Core):
    def run(self, runner_input: ToyInput, call: RunnerCall[Any]) -> ToyOutput:
        return super().run(runner_input, call)


def other_fused(call: RunnerCall[Any]) -> None:
    fused(call)


REGISTER = {
    "pre-permute": (register_pre_permute("standard", "x"), pre_permute, other_pre_permute),
    "post-permute": (register_post_permute("x", "standard"), post_permute, other_post_permute),
    "core": (register_core("x"), Core, OtherCore),
    "fused operation": (register_fused_func("none", "x", unfused=ToyExperts), fused, other_fused),
}
stages = make_stages_fixture(REGISTER)


@pytest.mark.usefixtures("pools")
@pytest.mark.parametrize("kind", REGISTER)
def test_registering_another_object_for_a_key_is_refused(kind: str) -> None:
    register, first, second = REGISTER[kind]
    assert register(first) is first  # type: ignore[arg-type]
    register(first)  # registering the same object again changes nothing
    with pytest.raises(DuplicatePartError) as caught:
        register(second)  # type: ignore[arg-type]
    assert kind in caught.value.what
    for source in (first, second):
        assert f"test_runner_stages:{source.__name__}:" in caught.value.got


def import_source(name: str, source: str, folder: Path) -> ModuleType:
    path = folder / f"{name}.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.usefixtures("pools")
def test_registrations_of_a_reimported_module_replace_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "again_toy", sys)  # is removed after the test
    first = import_source("again_toy", SOURCE, tmp_path)
    second = import_source("again_toy", "# another line\n" + SOURCE, tmp_path)
    assert runner.get_stages("toy", "standard").core is second.ToyCore is not first.ToyCore
    with pytest.raises(DuplicatePartError, match=r"again_toy:ToyCore:\d+ and test_runner_stages"):
        register_core("toy")(Core)


@pytest.mark.usefixtures("pools")
def test_functions_of_the_same_name_in_a_module_are_distinguished(tmp_path: Path) -> None:
    source_with_duplicate = SOURCE + (
        '\n\n@register_pre_permute("standard", "toy")\n'
        "def standard_to_toy(call):\n    return None\n"
    )
    with pytest.raises(DuplicatePartError, match=r"standard_to_toy:.* and .*standard_to_toy:"):
        import_source("twice_toy", source_with_duplicate, tmp_path)
    del sys.modules["twice_toy"]


@pytest.mark.usefixtures("pools")
def test_errors_about_unregistered_keys_list_the_registered_keys() -> None:
    with pytest.raises(UnknownPartError) as caught:
        runner.get_stages("x", "standard")
    assert str(caught.value) == (
        "pre-permute: got ('standard', 'x'), need a registered pre-permute"
    )
    register_pre_permute("standard", "x")(pre_permute)
    register_pre_permute("deepep_ll", "y")(pre_permute)
    with pytest.raises(UnknownPartError, match=r"core: got \('x', 'core'\)"):
        runner.get_stages("x", "standard")
    with pytest.raises(UnknownPartError) as caught:
        runner.get_stages("y", "standard")
    assert caught.value.need == "one of ('deepep_ll', 'y'), ('standard', 'x')"
    with pytest.raises(UnknownPartError, match="fused operation"):
        runner.get_fused_op("none", "x")
    assert runner.FUSED.find_fused_op("none", "x") is None


@pytest.mark.usefixtures("pools")
def test_invalid_values_are_refused_at_registration() -> None:
    for register in (
        lambda: register_pre_permute("flat", "x"),
        lambda: register_post_permute("x", "flat"),
    ):
        with pytest.raises(ConfigurationError, match="format: got 'flat', need one of standard"):
            register()
    with pytest.raises(ConfigurationError, match="core 'x': got the class TorchExperts"):
        register_core("x")(TorchExperts)  # type: ignore[type-var]
    with pytest.raises(ConfigurationError, match="unfused: got the class Core"):
        register_fused_func("none", "x", unfused=Core)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="pre-permute name: got ''"):
        register_pre_permute("standard", "")(pre_permute)
    with pytest.raises(ConfigurationError) as caught:
        register_fused_func("none", "x", unfused=ToyExperts)(TorchExperts)
    assert caught.value.what == "TorchExperts.requires"
    assert "keep_topk" in str(caught.value.got)


INCOMPLETE = {
    "pre": ((("pre-permute"),), "a pre-permute without post-permute"),
    "post": ((("post-permute"),), "a post-permute without pre-permute"),
    "core": ((("core"),), "a core without permutes of 'x'"),
    "no core": (("pre-permute", "post-permute"), "a permute without core 'x'"),
}


@pytest.mark.usefixtures("pools")
@pytest.mark.parametrize("missing", INCOMPLETE)
def test_incomplete_pairs_are_reported(missing: str) -> None:
    kinds, message = INCOMPLETE[missing]
    for kind in kinds:
        register, source, _ = REGISTER[kind]
        register(source)  # type: ignore[arg-type]
    broken_stages = [broken for broken in list_broken_stages() if message in broken.error]
    assert len(broken_stages) == 1
    assert broken_stages[0].name.startswith("x")
    assert broken_stages[0].origin.startswith("test_runner_stages:")
    for kind in ("pre-permute", "post-permute", "core"):
        register, source, _ = REGISTER[kind]
        register(source)  # type: ignore[arg-type]
    assert list_broken_stages() == ()


def test_our_pairs_are_complete() -> None:
    assert [
        registration
        for registration in runner.find_unused_registrations()
        if not registration.name.startswith("x")
    ] == []


@pytest.mark.usefixtures("stages")
def test_stages_make_a_part() -> None:
    part = make_experts("X", "x", "standard", bias=False, weight_on_input=False)
    assert (part.__name__, part.__module__) == ("X", __name__)
    assert part.requires.reduce is Reduce.NOOP
    assert prove(Case(NO_EP, part, PROBLEM)).failures == ()  # type: ignore[arg-type]
    verdict = check(NO_EP, part, replace(PROBLEM, bias=True))
    assert [rejection.rule for rejection in verdict.rejections] == ["bias"]
    part_without_reduce = make_experts(
        "Rows",
        "x",
        "standard",
        reduce=Reduce.CONTIGUOUS,
        keep_topk=True,
        invalid_rows=RowContents.ZERO,
    )
    for combine in (Combine.SUM, Combine.TOPK_UNWEIGHTED):
        kernel = make_kernel(NO_EP, part_without_reduce, replace(PROBLEM, combine=combine))
        shape = kernel.experts.workspace_shapes(kernel.prepare_finalize.dispatch_shape(9))
        assert shape.output.shape == (9, 2, 64)


@pytest.mark.share(3)
def test_a_backend_of_another_package_is_verified_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "toy_moe", SOURCE)
    incomplete = "from modular_kernel.runner import register_pre_permute\nPARTS = ()\n\n\n"
    incomplete += '@register_pre_permute("standard", "half")\ndef pre(call):\n    return None\n'
    install(tmp_path, "half_moe", incomplete)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    _, listing = mk("list")
    assert {"ToyExperts", "FusedToyExperts"} <= {part["name"] for part in listing["parts"]}
    assert [broken["error"] for broken in listing["broken"]] == [
        "a pre-permute without post-permute ('half', 'standard')",
        "a permute without core 'half'",
    ]
    pair = ("--pf-type", NO_EP, "--experts-type", "FusedToyExperts")
    code, proof_report = mk("test", *pair, "--level", "full")
    assert (code, proof_report["pairs"][0]["failures"]) == (0, [])
    assert proof_report["pairs"][0]["cases"] >= 60
    code, report = mk("test", "--mutate", "FusedToyExperts", "--mutants", "0", *pair)
    assert (code, report["ok"]) == (0, True)
    assert len(report["calls"]) >= 60
