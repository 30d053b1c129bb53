"""compose: timing, selection and reuse of times, and the results of a composed layer."""

import json
import logging
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from run_mk import CommandResult, run_mk

import modular_kernel as mk
from experts import DeepGemmExperts
from modular_kernel.catalog import BrokenEntry, Catalog, load_catalog, make_kernel
from modular_kernel.errors import (
    BrokenPartError,
    CapacityError,
    ConfigurationError,
    IncompatibleError,
    UnknownPartError,
)
from modular_kernel.operators.kernel_cache import NO_EP, detect_machine, select_default_experts
from modular_kernel.select import candidates, search, timing
from modular_kernel.select.autotune import MeasurementOptions, choose, compose
from modular_kernel.select.inputs import make_weights
from modular_kernel.select.selection import TimedOutcome
from modular_kernel.select.timing import PairingTimer
from modular_kernel.spec.problem import Machine, Parallel, Problem
from modular_kernel.testing.random_inputs import random_inputs

TORCH = ("MoEPrepareAndFinalizeNoEP", "TorchExperts")
NAIVE = ("BatchedPrepareAndFinalize", "NaiveBatchedExperts")
CPU = Machine("cpu")  # without the interpreter, so only parts in plain torch are valid
PROBLEM = Problem(8, 64, 32, 4, 2)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("MK_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # for machines that the tests describe
    detect_machine.cache_clear()
    yield tmp_path
    detect_machine.cache_clear()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Set the seconds of a call by experts part and number of tokens, without noise."""
    per_token = {"TorchExperts": 1e-6, "NaiveBatchedExperts": 3e-6}

    def time_once(self: PairingTimer, prepared) -> float:
        tokens = self.workload.problem.tokens
        name = type(prepared.kernel.experts).__name__
        return per_token[name] * tokens + (4e-6 if name == "TorchExperts" else 0)

    monkeypatch.setattr(PairingTimer, "_time_once", time_once)
    return per_token


def forbid_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_error(self: PairingTimer, _pairs: object) -> None:
        raise AssertionError("timed again")

    monkeypatch.setattr(PairingTimer, "time_bucket", raise_error)


@pytest.mark.parametrize("kind", ["prepare_finalize", "experts"])
def test_missing_parts_raise_the_error_of_their_entry_point(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Parts are missing, for example, if a file of the user shadows a package of parts."""
    parts = tuple(part for part in load_catalog().parts if part.kind != kind)
    broken_entry = BrokenEntry(kind, "modular-kernel", f"got /home/me/{kind}.py")
    monkeypatch.setattr(candidates, "load_catalog", lambda: Catalog(parts, (broken_entry,)))
    with pytest.raises(BrokenPartError, match=f"{kind} from modular-kernel: got /home/me/{kind}"):
        compose(PROBLEM, CPU)
    if kind == "experts":
        with pytest.raises(
            UnknownPartError, match="need a part, but none is usable on this machine"
        ):
            Catalog(parts, (broken_entry,)).experts("TorchExperts")


def test_the_fastest_is_chosen_at_every_number_of_tokens(folder: Path, clock: dict) -> None:
    choice = choose(PROBLEM, CPU)
    assert set(choice.candidates.order) == {TORCH, NAIVE}
    assert choice.num_timed == 4
    # TORCH takes 4 + t us and NAIVE 3 t us. At t = 2 they are equal, and the default is kept.
    assert choice.pair_by_tokens == {1: NAIVE, 2: TORCH, 4: TORCH, 8: TORCH}
    assert [(s.first, s.last, s.pair) for s in choice.segments] == [(0, 1, NAIVE), (2, 8, TORCH)]
    assert choice.notes == ()


def test_the_default_pairing_comes_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default pairing has the default experts, even if they do not support the problem."""
    gpu = Machine("cuda", (9, 0), frozenset({"triton"}), name="G", cuda=(13, 0))
    monkeypatch.setattr(
        "modular_kernel.operators.kernel_cache.detect_machine", {"cpu": CPU, "cuda": gpu}.get
    )
    for machine in (CPU, gpu):
        for quant in ("none", "fp8_w8a8_block", "nvfp4_w4a4"):
            problem = replace(PROBLEM, quant=quant, hidden=256, intermediate=256)
            order = candidates.find_candidates(problem, machine, (1, 8)).order
            default_experts = select_default_experts(NO_EP, problem, torch.device(machine.device))
            assert order[0] == (NO_EP, default_experts), (machine, quant)


@pytest.mark.parametrize("is_loadable", [True, False])
def test_default_of_block_scales_uses_deepgemm_if_it_can_be_loaded(
    is_loadable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = frozenset({"triton", "deep_gemm"})
    gpu = Machine("cuda", (9, 0), packages, name="G", cuda=(13, 0))
    described = replace(gpu, name="another")
    monkeypatch.setattr(
        "modular_kernel.operators.kernel_cache.detect_machine", {"cpu": CPU, "cuda": gpu}.get
    )
    monkeypatch.setattr("modular_kernel.select.candidates.this_machine", lambda *, device: gpu)
    if is_loadable:
        monkeypatch.setattr(DeepGemmExperts, "load_library", staticmethod(lambda: None))
    problem = replace(PROBLEM, hidden=256, intermediate=256)
    triton, mixed = "TritonExperts", "TritonOrDeepGemmExperts"

    def find_default(problem: Problem, machine: Machine) -> str:
        return candidates.find_candidates(problem, machine, (1, 8)).order[0][1]

    for quant, expected in (
        ("fp8_w8a8_block", mixed),
        ("none", triton),
        ("fp8_w8a8_channel", triton),
    ):
        problem = replace(problem, quant=quant)
        on_this_machine = expected if is_loadable else triton
        device = torch.device("cuda")
        assert select_default_experts(NO_EP, problem, device) == on_this_machine, quant
        assert select_default_experts(NO_EP, problem, device, required=True) == on_this_machine
        assert find_default(problem, gpu) == on_this_machine, quant
        assert find_default(problem, described) == expected, quant


def test_required_default_is_refused_instead_of_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of the kernel then says why TritonExperts does not support the problem."""
    gpu = Machine("cuda", (9, 0), frozenset(), name="G", cuda=(13, 0))  # without triton
    monkeypatch.setattr("modular_kernel.operators.kernel_cache.detect_machine", lambda _kind: gpu)
    device = torch.device("cuda")
    assert select_default_experts(NO_EP, PROBLEM, device) == "TorchExperts"
    assert select_default_experts(NO_EP, PROBLEM, device, required=True) == "TritonExperts"
    assert select_default_experts(NO_EP, PROBLEM, torch.device("cpu"), required=True) == (
        "TorchExperts"
    )


def test_default_over_ranks_has_the_first_exchange() -> None:
    gpu = Machine("cuda", (9, 0), frozenset({"triton"}), name="G", cuda=(13, 0))
    problem = replace(PROBLEM, parallel=Parallel(2))
    for machine, experts in ((CPU, "TorchExperts"), (gpu, "TritonExperts")):
        first, *_ = candidates.find_candidates(problem, machine, (8,)).order
        assert first[1] == experts
        assert first[0] != NO_EP


def test_default_over_ranks_has_the_default_experts() -> None:
    gpu = Machine("cuda", (9, 0), frozenset({"triton"}), name="G", cuda=(13, 0))
    problem = replace(PROBLEM, parallel=Parallel(2))
    order = [("X", "Other"), ("Y", "TritonExperts"), ("X", "TritonExperts"), ("X", "TorchExperts")]
    reordered = candidates._move_default_first(order, problem, gpu)
    assert reordered == [("X", "TritonExperts"), *(pair for pair in order if pair != reordered[0])]
    assert candidates._move_default_first(order, problem, CPU)[0] == ("X", "TorchExperts")
    assert candidates._move_default_first(order[:2], problem, gpu) == order[:2]
    assert candidates._move_default_first([], problem, gpu) == []


def test_compose_logs_one_line_about_timing(
    folder: Path, clock: dict, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "modular_kernel.select"):
        choice = compose(PROBLEM, CPU).choice
        compose(PROBLEM, CPU)
        compose(PROBLEM.with_tokens(16), CPU, options=MeasurementOptions(budget=0))
    # The process also logs once that the interpreter is enabled, in the first test that runs.
    assert [r.getMessage() for r in caplog.records if r.name == "modular_kernel.select"] == [
        f"4 token counts: 4 timed ({choice.seconds:.1f} s)",
        "4 token counts: 4 from the cache",
        "5 token counts: 4 from the cache, 1 default (budget of 0 s spent)",
    ]


def test_html_shows_pairings_by_tokens(folder: Path, clock: dict) -> None:
    assert compose(PROBLEM, CPU)._repr_html_() == (
        f"<p>composed, {PROBLEM} on cpu</p>"
        "<table><tr><th>tokens</th><th>prepare_finalize</th><th>experts</th></tr>"
        f"<tr><td>0 to 1</td><td>{NAIVE[0]}</td><td>{NAIVE[1]}</td></tr>"
        f"<tr><td>2 to 8</td><td>{TORCH[0]}</td><td>{TORCH[1]}</td></tr></table>"
    )


def test_second_call_times_nothing_and_selects_the_same_pairings(
    folder: Path, clock: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = choose(PROBLEM, CPU)
    forbid_timing(monkeypatch)
    start = time.perf_counter()
    second = compose(PROBLEM, CPU)
    assert time.perf_counter() - start < 1
    assert second.choice.num_timed == 0
    assert second.choice.segments == first.segments
    fewer = choose(PROBLEM.with_tokens(4), CPU)  # its buckets are a subset
    assert (fewer.num_timed, fewer.pair_by_tokens) == (0, {1: NAIVE, 2: TORCH, 4: TORCH})
    # With ignore_saved=True, `choose` times again.
    with pytest.raises(AssertionError, match="timed again"):
        choose(PROBLEM, CPU, options=MeasurementOptions(ignore_saved=True))


@pytest.mark.parametrize(
    "change", [{"hidden": 128}, {"quant": "int8_w8a8_channel"}, {"dtype": "float32"}]
)
def test_other_layers_have_their_own_choice(folder: Path, clock: dict, change: dict) -> None:
    choose(PROBLEM, CPU, options=MeasurementOptions(tokens=(8,)))
    assert (
        choose(replace(PROBLEM, **change), CPU, options=MeasurementOptions(tokens=(8,))).num_timed
        == 1
    )


def test_other_versions_are_measured_again_with_a_note(
    folder: Path, clock: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(PROBLEM, CPU, options=MeasurementOptions(tokens=(8,)))
    monkeypatch.setattr(torch, "__version__", "99.0")
    choice = choose(PROBLEM, CPU, options=MeasurementOptions(tokens=(8,)))
    assert choice.num_timed == 1
    assert choice.notes[0].startswith("ignoring cached timings: torch ")
    assert choice.notes[0].endswith(" -> 99.0")


def test_corrupt_cache_is_measured_again_with_a_note(folder: Path, clock: dict) -> None:
    choose(PROBLEM, CPU, options=MeasurementOptions(tokens=(8,)))
    (path,) = folder.rglob("*.json")
    path.write_text("{")
    choice = choose(PROBLEM, CPU, options=MeasurementOptions(tokens=(8,)))
    assert choice.num_timed == 1
    assert "will be replaced" in choice.notes[0]
    assert choose(PROBLEM, CPU, options=MeasurementOptions(tokens=(8,))).notes == ()


def test_a_forged_pairing_is_not_chosen(folder: Path, clock: dict) -> None:
    """Only valid pairings of a file are used. A bucket without some pairing is timed again."""
    options = MeasurementOptions(tokens=(8,))
    choose(PROBLEM, CPU, options=options)
    (path,) = folder.rglob("*.json")
    content = json.loads(path.read_text())
    outcomes = content["records"][0]["buckets"][0]["outcomes"]
    outcomes.append({**outcomes[0], "pair": ["os", "system"], "us": 0.001})
    path.write_text(json.dumps(content))
    choice = choose(PROBLEM, CPU, options=options)
    assert (choice.pair_by_tokens, choice.num_timed) == ({8: TORCH}, 0)
    outcomes[:] = [o for o in outcomes if o["pair"] == list(TORCH)]
    path.write_text(json.dumps(content))
    assert choose(PROBLEM, CPU, options=options).num_timed == 1


def test_ratios_to_another_default_are_not_used(folder: Path, clock: dict) -> None:
    options = MeasurementOptions(tokens=(8,))
    choose(PROBLEM, CPU, options=options)
    (path,) = folder.rglob("*.json")
    content = json.loads(path.read_text())
    content["records"][0]["buckets"][0]["default"] = list(NAIVE)
    path.write_text(json.dumps(content))
    assert choose(PROBLEM, CPU, options=replace(options, budget=0)).pair_by_tokens == {8: TORCH}
    assert choose(PROBLEM, CPU, options=options).num_timed == 1


def test_candidate_with_wrong_results_is_never_chosen(
    folder: Path, clock: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock["NaiveBatchedExperts"] = 1e-9
    part = mk.catalog.load_catalog().experts("NaiveBatchedExperts")
    apply = part.apply

    def apply_with_error(self, tokens, *, weights, workspace, output) -> None:
        apply(self, tokens, weights=weights, workspace=workspace, output=output)
        output.mul_(1.1)

    monkeypatch.setattr(part, "apply", apply_with_error)
    choice = choose(PROBLEM, CPU, options=MeasurementOptions(tokens=(8,)))
    outcome = next(o for o in choice.buckets[0].outcomes if o.pair == NAIVE)
    assert outcome.us is None
    assert outcome.why.startswith("wrong: relative error")
    assert choice.pair_by_tokens == {8: TORCH}


def test_exception_of_a_candidate_is_an_outcome(
    folder: Path, clock: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_error(*_args, **_kwargs):
        raise RuntimeError("failed\nsecond line")

    part = mk.catalog.load_catalog().experts("NaiveBatchedExperts")
    monkeypatch.setattr(part, "apply", raise_error)
    choice = choose(PROBLEM, CPU, options=MeasurementOptions(tokens=(8,)))
    assert TimedOutcome(NAIVE, why="RuntimeError: failed") in choice.buckets[0].outcomes


def test_weights_that_do_not_fit_in_memory_are_not_created(
    folder: Path, clock: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "free_bytes", lambda _device: 100)
    choice = choose(PROBLEM, CPU, options=MeasurementOptions(tokens=(8,)))
    assert not choice.has_times
    assert all("its plan takes" in o.why for o in choice.buckets[0].outcomes)
    assert choice.pair_by_tokens == {8: TORCH}
    monkeypatch.setattr(search, "free_bytes", lambda _device: 100)
    choice = choose(PROBLEM, CPU, options=MeasurementOptions(tokens=(8,), ignore_saved=True))
    assert choice.summary.startswith("1 token count: 1 default (weights take ")


def test_nothing_is_timed_in_the_interpreter(tmp_path: Path) -> None:
    packages = frozenset({"triton", "ml_dtypes"})
    machine = Machine("cpu", packages=packages, interpreter=True)
    choice = choose(PROBLEM, machine, options=MeasurementOptions(folder=tmp_path))
    assert choice.candidates.order[:2] == (TORCH, NAIVE)
    assert set(choice.candidates.untimeable) == set(choice.candidates.order) > {TORCH, NAIVE}
    assert (choice.num_timed, choice.has_times) == (0, False)
    assert [segment.pair for segment in choice.segments] == [TORCH]
    assert choice.summary.startswith("4 token counts: 4 default (Triton's interpreter is enabled")


def test_no_valid_pairing_raises_with_every_reason(folder: Path) -> None:
    with pytest.raises(IncompatibleError) as exc_info:
        compose(replace(PROBLEM, graph=True), CPU)
    assert {r.rule for r in exc_info.value.rejections} >= {"graph"}


def test_composed_layer_equals_its_pairings(folder: Path, clock: dict) -> None:
    kernel = mk.compose(PROBLEM, CPU)
    assert kernel.pairing == "{} x {}, {} x {}".format(*NAIVE, *TORCH)
    plan = kernel.plan()
    assert len({id(p) for p in plan.plans}) == 2
    assert plan.nbytes == sum(p.nbytes for p in plan.plans)
    x_TH, weights, routing = random_inputs(PROBLEM, torch.device("cpu"))
    for tokens in (0, 1, 2, 3, 8):
        pair = NAIVE if tokens <= 1 else TORCH
        routing_of_tokens = replace(
            routing,
            topk_weights_TK=routing.topk_weights_TK[:tokens],
            topk_ids_TK=routing.topk_ids_TK[:tokens],
        )
        kernel_output = make_kernel(*pair, PROBLEM, machine=CPU)(
            x_TH[:tokens], weights, routing_of_tokens
        )
        assert torch.equal(plan(x_TH[:tokens], weights, routing_of_tokens), kernel_output)
        assert torch.equal(kernel(x_TH[:tokens], weights, routing_of_tokens), kernel_output)
        assert type(kernel.kernel(tokens).experts).__name__ == pair[1]
        out = torch.empty_like(kernel_output)
        assert plan(x_TH[:tokens], weights, routing_of_tokens, out=out) is out
    with pytest.raises(CapacityError, match="tokens: got 9"):
        kernel.kernel(9)
    with pytest.raises(CapacityError):
        plan(torch.cat([x_TH, x_TH]), weights, routing)
    with pytest.raises(ConfigurationError, match="max_tokens: got 1, need >= 8"):
        plan(x_TH, weights, routing, max_tokens=1)


def test_a_plan_builds_and_times_nothing_when_called(
    folder: Path, clock: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = compose(PROBLEM, CPU).plan()
    weights = make_weights(PROBLEM, torch.device("cpu"))
    forbid_timing(monkeypatch)
    for name in ("make_kernel", "build_composed_kernel"):
        monkeypatch.setattr(f"modular_kernel.select.composed_kernel.{name}", None)
    assert plan.warm_up(weights) == 8
    assert plan.warm_up(weights, [3, 5]) == 2


def test_concurrent_processes_time_once(folder: Path, clock: dict) -> None:
    """Threads stand in for processes. One waits for the other, and uses its measurements."""
    timed_counts: list[int] = []

    def choose_and_count() -> None:
        timed_counts.append(choose(PROBLEM, CPU).num_timed)

    threads = [threading.Thread(target=choose_and_count) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(timed_counts) == [0, 4]


@pytest.mark.parametrize(
    "options",
    [
        {"budget": -1},
        {"budget": float("nan")},
        {"tokens": ()},
        {"tokens": (0,)},
        {"tokens": tuple(range(1, 60))},
        {"routing": "odd"},
    ],
    ids=str,
)
def test_invalid_options_are_refused(options: dict) -> None:
    with pytest.raises(ConfigurationError):
        MeasurementOptions(**options)


@pytest.mark.parametrize("budget", [0.0, 120.0])
def test_token_counts_without_a_timing_are_supported(
    folder: Path, clock: dict, budget: float
) -> None:
    """Calls may have more tokens than the measured token counts."""
    kernel = compose(PROBLEM, CPU, options=MeasurementOptions(tokens=(2, 3), budget=budget))
    for tokens in (1, 3, 4, 8):
        inputs = random_inputs(PROBLEM.with_tokens(tokens), torch.device("cpu"))
        expected = make_kernel(*TORCH, PROBLEM, machine=CPU)(*inputs)
        for layer in (kernel, kernel.plan()):
            assert torch.allclose(layer(*inputs), expected, atol=1e-2)
    with pytest.raises(CapacityError, match="got 9, need <= 8"):
        kernel.kernel(9)


def test_group_must_match_the_problem(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="None for one rank"):
        compose(PROBLEM, CPU, group=object())
    with pytest.raises(ConfigurationError, match="initialized"):
        compose(replace(PROBLEM, parallel=Parallel(2)), CPU)
    with pytest.raises(ConfigurationError, match="tokens to measure: got 9"):
        compose(PROBLEM, CPU, options=MeasurementOptions(tokens=(9,)))


# ---------------------------------------------------------------------------- the command line


def run_compose(capsys: pytest.CaptureFixture[str], *arguments: str) -> CommandResult:
    return run_mk(capsys, "compose", *arguments)


SMALL = ("--tokens-list", "1,8", "--hidden", "64", "--intermediate", "32", "--experts", "4")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_verb_selects_explains_and_reuses(
    capsys: pytest.CaptureFixture[str], folder: Path, clock: dict
) -> None:
    code, out, err = run_compose(capsys, *SMALL, "--explain")
    assert code == 0
    with_interpreter = replace(CPU, packages=frozenset({"triton", "ml_dtypes"}), interpreter=True)
    num_valid = len(
        choose(PROBLEM, with_interpreter, options=MeasurementOptions(budget=0)).candidates.order
    )
    assert f" pairings are valid without Triton's interpreter ({num_valid} with it, untimed)" in out
    assert "0 to 1 " in out
    assert "2 token counts: 2 timed (" in out
    assert re.search(r"not measured: \d+ pairings need a GPU", out)
    assert "  device: TritonExperts, GroupedGemmExperts\n" in out
    explanation = out
    assert "8 tokens: " in err
    code, out, _ = run_compose(capsys, *SMALL, "--json")
    record = json.loads(out)
    assert (code, record["timed_now"], record["missing"]) == (0, 0, [])
    assert [segment["pair"] for segment in record["segments"]] == [list(NAIVE), list(TORCH)]
    assert record["picks"]["8"] == {"pair": list(TORCH), "by": "timed"}
    assert [o["pair"] for o in record["buckets"][0]["outcomes"]] == [list(TORCH), list(NAIVE)]
    assert record["summary"] == "2 token counts: 2 from the cache"
    assert max(len(verdict["rejections"]) for verdict in record["refused"]) > 1
    # Refused pairings are grouped by the rules that they violate.
    for verdict in record["refused"]:
        assert verdict["prepare_finalize"] in explanation
        assert verdict["experts"] in explanation
        assert all(rejection["rule"] in explanation for rejection in verdict["rejections"])
    assert len(explanation.splitlines()) < len(record["refused"])


@pytest.mark.parametrize("quiet", [False, True])
def test_long_waits_are_logged_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, quiet: bool
) -> None:
    monkeypatch.setattr(search, "_WARN_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(PairingTimer, "_time_once", lambda *_: time.sleep(0.02) or 1e-3)
    compose(PROBLEM, CPU, options=MeasurementOptions(on_bucket=(lambda _: None) if quiet else None))
    message = "timing 2 pairings for up to 20 s; the times are cached"
    # The process also logs once that the interpreter is enabled, in the first test that runs.
    messages = [r.getMessage() for r in caplog.records if r.name == "modular_kernel.select"]
    assert messages == ([] if quiet else [message])


def test_exchanges_that_count_rows_are_not_captured() -> None:
    """Parts over torch.distributed can be captured only if the problem requests graphs."""
    gpu = Machine("cuda", arch=(9, 0), packages=frozenset({"triton"}))
    pair = ("TorchAll2AllPrepareAndFinalize", "TritonExperts")
    for graph in (False, True):
        problem = replace(PROBLEM, parallel=Parallel(2), graph=graph)
        result = candidates.find_candidates(problem, gpu, (8,))
        assert pair in result.order
        assert (pair in result.capturable) == graph
