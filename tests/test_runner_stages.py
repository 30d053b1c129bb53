"""Stages by registry, the parts assembled of them, and fused operations beside their twins."""

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import toy_backend
from test_third_party import install, mk
from toy_backend import FusedToyExperts, ToyExperts, ToyInput, ToyOutput

from experts import StagedTritonExperts, TorchExperts, TritonExperts
from experts.assembled import experts_of, fused_experts_of
from modular_kernel import runner
from modular_kernel.catalog import broken_halves, check, make_kernel, this_machine
from modular_kernel.composer import random_inputs
from modular_kernel.errors import ConfigurationError, DuplicatePartError, UnknownPartError
from modular_kernel.runner import (
    FusedOpPool,
    MoeRunnerCore,
    PermuteMethodPool,
    RunnerCall,
    register_core,
    register_fused_func,
    register_post_permute,
    register_pre_permute,
)
from modular_kernel.testing import Case
from modular_kernel.testing.verify.checks import staged_twin
from modular_kernel.testing.verify.one_process import prove
from modular_kernel.testing.verify.trial import Trial
from modular_kernel.types import ActivationFormat, Combine, Problem, Reduce, Rows

NO_EP = "MoEPrepareAndFinalizeNoEP"
PROBLEM = Problem(tokens=9, hidden=64, intermediate=32, experts=4, top_k=2, dtype=torch.float32)
SOURCE = Path(toy_backend.__file__).read_text(encoding="utf-8")


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is registered, and what a test registers is forgotten."""
    monkeypatch.setattr(runner, "FUSED", FusedOpPool())
    monkeypatch.setattr(runner, "PERMUTES", PermuteMethodPool())
    return


class Named:
    """Of the backend "x"."""

    @property
    def runner_backend(self) -> str:
        return "x"


class XInput(Named, ToyInput):
    pass


class XOutput(Named, ToyOutput):
    pass


def pre(call: RunnerCall[Any]) -> ToyInput:
    return XInput(**vars(toy_backend.standard_to_toy(call)))


def post(result: ToyOutput, call: RunnerCall[Any]) -> None:
    toy_backend.toy_to_standard(result, call)


class Core(MoeRunnerCore[Any]):
    state = toy_backend.ToyState

    def run(self, runner_input: ToyInput, call: RunnerCall[Any]) -> ToyOutput:
        return XOutput(**vars(toy_backend.ToyCore(self.problem).run(runner_input, call)))


def fused(call: RunnerCall[Any]) -> None:
    toy_backend.fused_none_to_toy(call)


def other_pre(call: RunnerCall[Any]) -> ToyInput:
    return pre(call)


def other_post(result: ToyOutput, call: RunnerCall[Any]) -> None:
    post(result, call)


class OtherCore(Core):
    def run(self, runner_input: ToyInput, call: RunnerCall[Any]) -> ToyOutput:
        return super().run(runner_input, call)


def other_fused(call: RunnerCall[Any]) -> None:
    fused(call)


REGISTER = {
    "pre-permute": (register_pre_permute("standard", "x"), pre, other_pre),
    "post-permute": (register_post_permute("x", "standard"), post, other_post),
    "core": (register_core("x"), Core, OtherCore),
    "fused operation": (register_fused_func("none", "x", twin=ToyExperts), fused, other_fused),
}


@pytest.mark.usefixtures("pools")
@pytest.mark.parametrize("kind", REGISTER)
def test_a_key_registered_twice_raises_with_both_origins(kind: str) -> None:
    register, first, second = REGISTER[kind]
    assert register(first) is first  # type: ignore[arg-type]
    register(first)  # type: ignore[arg-type]  # the same: nothing changes
    with pytest.raises(DuplicatePartError) as caught:
        register(second)  # type: ignore[arg-type]
    assert kind in caught.value.what
    for source in (first, second):
        assert f"test_runner_stages:{source.__name__}:" in caught.value.got


def imported(name: str, source: str, folder: Path) -> ModuleType:
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
def test_a_module_that_is_imported_again_replaces_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "again_toy", sys)  # taken away again afterwards
    first = imported("again_toy", SOURCE, tmp_path)
    second = imported("again_toy", "# a line more\n" + SOURCE, tmp_path)
    assert runner.stages_of("toy", "standard").core is second.ToyCore is not first.ToyCore
    with pytest.raises(DuplicatePartError, match=r"again_toy:ToyCore:\d+ and test_runner_stages"):
        register_core("toy")(Core)


@pytest.mark.usefixtures("pools")
def test_two_of_one_name_in_one_module_are_two(tmp_path: Path) -> None:
    twice = SOURCE + (
        '\n\n@register_pre_permute("standard", "toy")\n'
        "def standard_to_toy(call):\n    return None\n"
    )
    with pytest.raises(DuplicatePartError, match=r"standard_to_toy:.* and .*standard_to_toy:"):
        imported("twice_toy", twice, tmp_path)
    del sys.modules["twice_toy"]


@pytest.mark.usefixtures("pools")
def test_what_is_not_registered_is_told_with_what_is() -> None:
    with pytest.raises(UnknownPartError) as caught:
        runner.stages_of("x", "standard")
    assert str(caught.value) == (
        "pre-permute: got ('standard', 'x'), need a registered one: there is none"
    )
    register_pre_permute("standard", "x")(pre)
    register_pre_permute("deepep_ll", "y")(pre)
    with pytest.raises(UnknownPartError, match=r"core: got \('x', 'core'\)"):
        runner.stages_of("x", "standard")
    with pytest.raises(UnknownPartError) as caught:
        runner.stages_of("y", "standard")
    assert caught.value.need == "one of ('deepep_ll', 'y'), ('standard', 'x')"
    with pytest.raises(UnknownPartError, match="fused operation"):
        runner.fused_op("none", "x")
    assert runner.FUSED.get_fused_func("none", "x") is None


@pytest.mark.usefixtures("pools")
def test_nonsense_is_refused_where_it_is_registered() -> None:
    for register in (
        lambda: register_pre_permute("flat", "x"),
        lambda: register_post_permute("x", "flat"),
    ):
        with pytest.raises(ConfigurationError, match="format: got 'flat', need one of standard"):
            register()
    with pytest.raises(ConfigurationError, match="core 'x': got the class TorchExperts"):
        register_core("x")(TorchExperts)  # type: ignore[type-var]
    with pytest.raises(ConfigurationError, match="twin: got the class Core"):
        register_fused_func("none", "x", twin=Core)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="pre-permute name: got ''"):
        register_pre_permute("standard", "")(pre)
    with pytest.raises(ConfigurationError) as caught:
        register_fused_func("none", "x", twin=ToyExperts)(TorchExperts)
    assert caught.value.what == "TorchExperts.requires"
    assert "keep_topk" in str(caught.value.got)


HALVES = {
    "pre": ((("pre-permute"),), "a pre-permute without post-permute"),
    "post": ((("post-permute"),), "a post-permute without pre-permute"),
    "core": ((("core"),), "a core without permutes of 'x'"),
    "no core": (("pre-permute", "post-permute"), "a permute without core 'x'"),
}


@pytest.mark.usefixtures("pools")
@pytest.mark.parametrize("given", HALVES)
def test_half_a_pair_is_reported(given: str) -> None:
    kinds, lacks = HALVES[given]
    for kind in kinds:
        register, source, _ = REGISTER[kind]
        register(source)  # type: ignore[arg-type]
    found = [broken for broken in broken_halves() if lacks in broken.error]
    assert len(found) == 1
    assert found[0].name.startswith("x")
    assert found[0].origin.startswith("test_runner_stages:")
    for kind in ("pre-permute", "post-permute", "core"):
        register, source, _ = REGISTER[kind]
        register(source)  # type: ignore[arg-type]
    assert broken_halves() == ()


def test_ours_are_whole() -> None:
    assert [half for half in runner.missing_halves() if not half.name.startswith("x")] == []


# ------------------------------------------------------------------------------ the parts of them


@pytest.fixture
def stages(pools: None) -> None:
    """The toy's stages under another name."""
    for kind in ("pre-permute", "post-permute", "core"):
        register, source, _ = REGISTER[kind]
        register(source)  # type: ignore[arg-type]


WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"combine": 1}, "requires of X: got combine"),
    ({"activation_format": ActivationFormat.STANDARD}, "requires of X: got activation_format"),
    ({"top_k": 3}, "X.requires.top_k: got 3"),
    ({"reduce": Reduce.NAIVE_BATCHED}, "X.requires.reduce over standard: got naive_batched"),
)


@pytest.mark.usefixtures("stages")
def test_requirements_are_checked_where_the_part_is_made() -> None:
    for requires, words in WRONG:
        with pytest.raises(ConfigurationError, match=words):
            experts_of("X", "x", "standard", **requires)
    for name in ("a b", ""):
        with pytest.raises(ConfigurationError, match="name of a part"):
            experts_of(name, "x", "standard")
    with pytest.raises(UnknownPartError, match="pre-permute"):
        experts_of("X", "x", "deepep_ll")


@pytest.mark.usefixtures("stages")
def test_a_part_of_stages_is_a_part() -> None:
    part = experts_of("X", "x", "standard", bias=False, weight_on_input=False)
    assert (part.__name__, part.__module__) == ("X", __name__)
    assert part.requires.reduce is Reduce.NOOP
    assert prove(Case(NO_EP, part, PROBLEM)).failures == ()  # type: ignore[arg-type]
    verdict = check(NO_EP, part, replace(PROBLEM, bias=True))
    assert [rejection.rule for rejection in verdict.rejections] == ["bias"]
    rows = experts_of(
        "Rows", "x", "standard", reduce=Reduce.CONTIGUOUS, keep_topk=True, invalid_rows=Rows.ZERO
    )
    for combine in (Combine.SUM, Combine.TOPK_UNWEIGHTED):
        kernel = make_kernel(NO_EP, rows, replace(PROBLEM, combine=combine))
        shape = kernel.experts.workspace_shapes(kernel.prepare_finalize.dispatch_shape(9))
        assert shape.output.shape == (9, 2, 64)


@pytest.mark.usefixtures("stages")
def test_state_is_made_for_each_call() -> None:
    states = []

    def watching(result: ToyOutput, call: RunnerCall[Any]) -> None:
        states.append(call.state)
        post(result, call)

    register_pre_permute("deepep_normal", "x")(pre)
    register_post_permute("x", "deepep_normal")(watching)
    part = experts_of("X", "x", "deepep_normal")
    kernel = make_kernel(NO_EP, part, PROBLEM)
    (x, weights, routing), expected = random_inputs(PROBLEM, torch.device("cpu")), []
    calls = (x, x.flip(0))
    expected = [kernel(each, weights, routing) for each in calls]
    one, two = (kernel.start(each, weights, routing) for each in calls)
    assert torch.equal(two.finish(), expected[1])
    assert torch.equal(one.finish(), expected[0])
    assert len({id(state) for state in states}) == 4
    assert all(isinstance(state, toy_backend.ToyState) for state in states)


class Foreign(ToyInput):
    @property
    def runner_backend(self) -> str:
        return "toys"


@pytest.mark.usefixtures("pools")
@pytest.mark.parametrize("made", ["toys", "none"])
def test_what_another_backend_takes_is_refused_with_both_names(made: str) -> None:
    def wrong(call: RunnerCall[Any]) -> Any:
        good = pre(call)
        return Foreign(**vars(good)) if made == "toys" else good.rows

    register_pre_permute("standard", "x")(wrong)
    register_post_permute("x", "standard")(post)
    register_core("x")(Core)
    kernel = make_kernel(NO_EP, experts_of("X", "x", "standard"), PROBLEM)
    words = {
        "toys": "pre-permute of 'x': got one of 'toys', need one of 'x'",
        "none": "pre-permute of 'x': got Tensor, need RunnerInput",
    }
    with pytest.raises(ConfigurationError, match=words[made]):
        kernel(*random_inputs(PROBLEM, torch.device("cpu")))


# ------------------------------------------------------------------------------ fused and staged


def test_a_fused_part_inherits_what_its_twin_declares() -> None:
    assert FusedToyExperts.twin is ToyExperts
    assert FusedToyExperts.requires == ToyExperts.requires
    gelu = replace(PROBLEM, bias=True)
    rules = [
        [rejection.rule for rejection in check(NO_EP, part, gelu).rejections]
        for part in (ToyExperts, FusedToyExperts)
    ]
    assert rules == [["bias"], ["bias"]]
    with pytest.raises(UnknownPartError, match="fused operation"):
        fused_experts_of("X", "none", "nobody")
    with pytest.raises(ConfigurationError, match="got the part TritonExperts, need a function"):
        fused_experts_of("X", "none", "triton")


def trial_of(part: type, **changes: Any) -> Trial:
    case = Case(NO_EP, part, replace(PROBLEM, **changes), "skips")  # type: ignore[arg-type]
    return Trial(case, this_machine())


@pytest.mark.usefixtures("stages")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_harness_compares_a_fused_part_with_its_twin(dtype: torch.dtype) -> None:
    staged = experts_of("X", "x", "standard")

    def scaled(call: RunnerCall[Any]) -> None:
        fused(call)
        call.output.mul_(1.02)

    def uncounted(call: RunnerCall[Any]) -> None:
        fused(call)
        call.tokens.routing.invalid_ids.zero_()

    register_fused_func("right", "x", twin=staged)(fused)
    register_fused_func("scaled", "x", twin=staged)(scaled)
    register_fused_func("uncounted", "x", twin=staged)(uncounted)
    right, wrong, silent = (
        fused_experts_of("F", name, "x") for name in ("right", "scaled", "uncounted")
    )
    assert list(staged_twin(trial_of(staged, dtype=dtype))) == []  # it has none
    assert list(staged_twin(trial_of(right, dtype=dtype))) == []
    assert [
        "relative difference" in found for found in staged_twin(trial_of(wrong, dtype=dtype))
    ] == [True]
    trial = Trial(
        Case(NO_EP, silent, replace(PROBLEM, dtype=dtype), "out_of_range"), this_machine()
    )  # type: ignore[arg-type]
    assert ["counted 0 invalid ids" in found for found in staged_twin(trial)] == [True]


class Fused(TritonExperts):
    twin = StagedTritonExperts


def test_our_staged_twin_declares_what_triton_experts_does() -> None:
    op = runner.FUSED.get_fused_func("none", "triton")
    assert op is not None
    assert (op.run, op.twin) == (TritonExperts, StagedTritonExperts)
    assert StagedTritonExperts.requires == TritonExperts.requires


CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"tokens": 1, "top_k": 1},
    {"tokens": 33, "top_k": 3, "routed_scaling_factor": 2.5},
    {"combine": Combine.TOPK_WEIGHTED, "bias": True},
    {"apply_router_weight_on_input": True},
    {"dtype": torch.bfloat16, "activation": "swiglu_oai:alpha=1.7,limit=7.0,interleaved=true"},
    {"quant": "fp8_w8a8_tensor"},
    {"quant": "fp8_w8a8_channel", "tokens": 1},
    {"quant": "fp8_w8a8_block:block=32x32", "dtype": torch.bfloat16},
    {"quant": "int8_w8a8_channel", "lora": "adapters=3,rank=16"},
    {"quant": "int8_w8a16_group:group=32,zero_points=true"},
    {"quant": "int4_w4a16_group:group=32", "dtype": torch.bfloat16},
)


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_triton_by_stages_is_triton_fused(change: dict[str, Any]) -> None:
    """Every check of the harness on the stages; the fused part beside them."""
    problem = replace(PROBLEM, **change)
    assert prove(Case(NO_EP, StagedTritonExperts, problem, "skips")).failures == ()  # type: ignore[arg-type]
    assert list(staged_twin(Trial(Case(NO_EP, Fused, problem, "skips"), this_machine()))) == []  # type: ignore[arg-type]


# ------------------------------------------------------------------------------ by entry point


@pytest.mark.share(3)
def test_a_third_party_s_backend_is_proven_by_entry_point_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "toy_moe", SOURCE)
    half = "from modular_kernel.runner import register_pre_permute\nPARTS = ()\n\n\n"
    half += '@register_pre_permute("standard", "half")\ndef pre(call):\n    return None\n'
    install(tmp_path, "half_moe", half)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    _, listed = mk("list")
    assert {"ToyExperts", "FusedToyExperts"} <= {part["name"] for part in listed["parts"]}
    assert [broken["error"] for broken in listed["broken"]] == [
        "a pre-permute without post-permute ('half', 'standard')",
        "a permute without core 'half'",
    ]
    pair = ("--pf-type", NO_EP, "--experts-type", "FusedToyExperts")
    code, proven = mk("test", *pair, "--level", "full")
    assert (code, proven["pairs"][0]["failures"]) == (0, [])
    assert proven["pairs"][0]["cases"] >= 60
    code, told = mk("test", "--mutate", "FusedToyExperts", "--mutants", "0", *pair)
    assert (code, told["ok"]) == (0, True)
    assert len(told["calls"]) >= 60
