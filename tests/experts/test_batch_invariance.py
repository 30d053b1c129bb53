"""Batch invariance: the output bits of a token do not depend on the other tokens of its call.

The tests cover the parts that support batch invariance, and the checks that detect violations.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tuned_config_files import SMALL_TILES, file_contents, vllm_launch

from experts.triton import standard as triton_experts
from experts.triton.configs import lookup
from experts.triton.configs.heuristics import ConfigSteps, make_heuristic_steps
from experts.triton.configs.select import (
    buffer_kinds_up_to,
    choose_config,
    clear_caches,
    explain,
    override_config,
)
from experts.triton.launch_config import Device
from modular_kernel.catalog import check, load_catalog, this_machine
from modular_kernel.errors import ConfigurationError
from modular_kernel.replay.launch.runtime import HAS_TRITON
from modular_kernel.spec.problem import Machine, Parallel, Problem
from modular_kernel.testing import MUTANTS, Case, cases_for, prove
from modular_kernel.testing.cases.ranks import RankCase
from modular_kernel.testing.ranks.pool import RankPool
from modular_kernel.testing.verify.invariance import (
    check_batch_invariant,
    count_differing_rows,
    make_rechunked_kernel,
    split_doubling,
)
from modular_kernel.testing.verify.invariance_table import (
    InvarianceRow,
    count_call_dependent_rows,
    format_markdown,
)
from modular_kernel.testing.verify.over_ranks import prove_ranks
from modular_kernel.testing.verify.trial import Trial

LAYER = Problem(tokens=34, hidden=160, intermediate=96, experts=2, top_k=1, batch_invariant=True)
NO_EP, BATCHED = "MoEPrepareAndFinalizeNoEP", "BatchedPrepareAndFinalize"
PAIRS = (
    (NO_EP, "TritonExperts"),
    (NO_EP, "GroupedGemmExperts"),
    (BATCHED, "BatchedTritonExperts"),
)
SCHEMES = (
    "none",
    "fp8_w8a8_channel",
    "fp8_w8a8_block",
    "int8_w8a8_channel",
    "int4_w4a16_group",
    "mxfp4_w4a16",
)
GPU = Machine("cuda", (9, 0), frozenset({"triton"}), name="NVIDIA H200")


@pytest.mark.parametrize("quant", SCHEMES)
def test_both_formats_support_batch_invariance_in_every_scheme(quant: str) -> None:
    layer = replace(LAYER, quant=quant)
    assert check(*PAIRS[0], layer, GPU).ok
    assert check(*PAIRS[2], layer, GPU).ok


def test_a_scale_for_all_tokens_is_refused_with_the_reason() -> None:
    verdict = check(*PAIRS[0], replace(LAYER, quant="fp8_w8a8_tensor"), GPU)
    assert "which computes one activation scale from all tokens of a call" in str(verdict)
    assert check(*PAIRS[0], replace(LAYER, quant="fp8_w8a8_tensor:static=true"), GPU).ok


def test_parts_without_batch_invariance_are_refused() -> None:
    verdict = check(NO_EP, "TorchExperts", LAYER, GPU)
    assert [r.rule for r in verdict.rejections] == ["batch_invariant"]
    assert check(NO_EP, "TorchExperts", replace(LAYER, batch_invariant=False), GPU).ok


@pytest.mark.parametrize("quant", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", [(160, 96), (72, 40), (4096, 14336)])
def test_tiles_are_the_same_for_every_number_of_tokens(
    quant: str, dtype: torch.dtype, sizes: tuple[int, int]
) -> None:
    layer = replace(LAYER, quant=quant, dtype=dtype, hidden=sizes[0], intermediate=sizes[1])
    tokens = (0, 1, 7, 64, 500, 4096, 1 << 20)
    assert len({choose_config(layer.with_tokens(n), n) for n in tokens}) == 1
    assert [path for _, path, _ in buffer_kinds_up_to(layer, 4096)] == ["aligned"]
    assert "one configuration for every number of tokens" in explain(layer, 7)


def test_an_override_must_be_one_tile() -> None:
    with override_config(SMALL_TILES):
        assert choose_config(LAYER, 1) == SMALL_TILES
    two_tiles = file_contents(
        tokens_1=(vllm_launch(), vllm_launch()), tokens_64=(vllm_launch(m=32), vllm_launch(m=32))
    )
    need = "the same configuration of aligned for every number of tokens"
    with override_config(two_tiles), pytest.raises(ConfigurationError, match=need):
        choose_config(LAYER, 1)


@pytest.mark.parametrize("part", ["TritonExperts", "GroupedGemmExperts", "BatchedTritonExperts"])
def test_tuning_is_refused(part: str) -> None:
    assert load_catalog().experts(part).tunable(LAYER) is None


def test_split_doubling_returns_every_token_once() -> None:
    for tokens, max_tokens in ((0, 5), (1, 1), (34, 34), (3, 34)):
        chunks = split_doubling(tokens, max_tokens)
        assert torch.cat(chunks).tolist() == list(range(tokens))
        assert len(chunks) == max_tokens.bit_length()


def test_differing_rows_are_counted_by_their_bits() -> None:
    expected = torch.tensor([[1.0, 0.0], [torch.nan, 2.0], [3.0, 4.0]])
    actual = torch.tensor([[1.0, -0.0], [torch.nan, 2.0], [3.0, 4.5]])
    assert count_differing_rows(actual, expected) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nans_that_differ_in_sign_are_equal(dtype: torch.dtype) -> None:
    row = torch.tensor([torch.nan, 1.0], dtype=dtype)
    assert not torch.equal(row.view(torch.uint8), (-row).view(torch.uint8))
    expected, actual = torch.stack([row, row]), torch.stack([-row, row.flip(0)])
    actual[0, 1] = 1.0
    assert count_differing_rows(actual, expected) == 1


def list_violations(pair: tuple[str, str], problem: Problem, machine: Machine) -> list[str]:
    return list(check_batch_invariant(Trial(Case(*pair, problem), machine)))


@pytest.mark.share(3)
@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
@pytest.mark.skipif(torch.cuda.is_available(), reason="these tiles give the same bits on a GPU")
@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_tiles_that_depend_on_the_number_of_tokens_are_detected(
    pair: tuple[str, str], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check must fail if the launch depends on the number of tokens, as it does for problems
    without batch invariance.
    """
    if not check(*pair, LAYER, machine).ok:
        pytest.skip(str(check(*pair, LAYER, machine)))
    layer = replace(LAYER, hidden=640, intermediate=320, dtype=torch.float16)

    def make_variant_steps(problem: Problem, device: Device, _paths: object = None) -> ConfigSteps:
        return make_heuristic_steps(replace(problem, batch_invariant=False), device, ("aligned",))

    assert list_violations(pair, layer, machine) == []
    monkeypatch.setattr(lookup, "make_heuristic_steps", make_variant_steps)
    clear_caches()
    try:
        violations = list_violations(pair, layer, machine)
        assert any("the bits of" in violation for violation in violations)
    finally:
        monkeypatch.undo()
        clear_caches()


def test_a_path_that_depends_on_the_number_of_tokens_is_detected(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not check(*PAIRS[0], LAYER, machine).ok:
        pytest.skip(str(check(*PAIRS[0], LAYER, machine)))
    supported_paths = triton_experts.supported_paths
    monkeypatch.setattr(
        triton_experts,
        "supported_paths",
        lambda problem: supported_paths(replace(problem, batch_invariant=False)),
    )

    def make_variant_steps(
        problem: Problem, device: Device, _paths: object = None, *, prepared: bool = False
    ) -> ConfigSteps:
        return make_heuristic_steps(
            replace(problem, batch_invariant=False), device, prepared=prepared
        )

    monkeypatch.setattr(lookup, "make_heuristic_steps", make_variant_steps)
    clear_caches()
    try:
        violations = list_violations(PAIRS[0], LAYER, machine)
        expected = "in calls of 1, 2, 4, ... tokens"
        assert any(violation.startswith(expected) for violation in violations)
    finally:
        monkeypatch.undo()
        clear_caches()


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_split_calls_are_compared_with_whole_ones(pair: tuple[str, str], machine: Machine) -> None:
    trial = Trial(Case(*pair, replace(LAYER, chunk_tokens=8)), machine)
    supports_chunks = load_catalog().experts(pair[1]).requires.chunking
    if supports_chunks and check(*pair, LAYER, machine).ok:
        unsplit_kernel = make_rechunked_kernel(trial)
        assert unsplit_kernel is not None
        assert unsplit_kernel.problem.chunk_tokens is None
        assert prove(trial.case, machine).passed


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_full_case_lists_include_batch_invariance(pair: tuple[str, str]) -> None:
    interpreted = Machine("cpu", packages=frozenset({"triton", "ml_dtypes"}), interpreter=True)
    problems = [case.problem for case in cases_for(*pair, interpreted).cases]
    invariant_schemes = {problem.scheme.name for problem in problems if problem.batch_invariant}
    supported_schemes = load_catalog().experts(pair[1]).requires.schemes
    assert invariant_schemes >= {quant for quant in SCHEMES if quant in supported_schemes}


RANK_PAIRS = (
    ("AllGatherReduceScatterPrepareAndFinalize", "TritonExperts"),
    ("TorchAll2AllPrepareAndFinalize", "TritonExperts"),
    ("TorchAll2AllBatchedPrepareAndFinalize", "BatchedTritonExperts"),
    ("SymmMemPrepareAndFinalize", "TritonExperts"),
    ("HostThenRankPrepareAndFinalize", "TritonExperts"),
)


@pytest.mark.share(3)
@pytest.mark.parametrize("pair", RANK_PAIRS, ids="+".join)
def test_calls_over_ranks_are_batch_invariant(
    pair: tuple[str, str], rank_pool: Callable[[int], RankPool]
) -> None:
    layer = replace(LAYER, experts=4, top_k=2, parallel=Parallel(2))
    case = RankCase(*pair, layer, tokens=(34, 21))
    verdict = case.verdict(this_machine(device="cpu"))
    if not verdict.ok:
        pytest.skip(str(verdict))
    proof = prove_ranks(case, rank_pool(2), checks=(check_batch_invariant,))
    assert proof.passed, str(proof)


@pytest.mark.parametrize("part", ["ReplicatedEPPrepareAndFinalize", "DeepEPHTPrepareAndFinalize"])
def test_sums_over_ranks_without_a_fixed_order_are_refused(part: str) -> None:
    layer = replace(LAYER, experts=4, top_k=2, parallel=Parallel(2))
    rules = [r.rule for r in check(part, "TritonExperts", layer, GPU).rejections]
    assert "batch_invariant" in rules


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_the_check_detects_a_changed_bit(pair: tuple[str, str], machine: Machine) -> None:
    if not check(*pair, LAYER, machine).ok:
        pytest.skip(str(check(*pair, LAYER, machine)))
    (mutant,) = (mutant for mutant in MUTANTS if mutant.name == "depends_on_batch")
    trial = Trial(Case(*pair, LAYER), machine, mutant.build)
    # The mutant changes a bit in the first and the last row of a call.
    assert list(check_batch_invariant(trial))[:2] == [
        "in reverse order: the bits of 2 of 34 rows differ",
        "in calls of 1, 2, 4, ... tokens: the bits of 5 of 34 rows differ",
    ]


def test_the_table_counts_rows_and_names_refusals(machine: Machine) -> None:
    """Without batch invariance, a call of one token takes another path than a call of eight."""
    if not check(*PAIRS[0], LAYER, machine).ok:
        pytest.skip(str(check(*PAIRS[0], LAYER, machine)))
    layer = replace(LAYER, tokens=8, dtype=torch.float32)
    rows = {
        invariant: count_call_dependent_rows(
            Case(*PAIRS[0], replace(layer, batch_invariant=invariant)), machine
        )
        for invariant in (False, True)
    }
    assert rows[True] == 0 < rows[False]
    table_rows = [
        InvarianceRow(
            *PAIRS[0], "float32", batch_invariant=False, num_changed=rows[False], num_tokens=8
        ),
        InvarianceRow(*PAIRS[0], "float32", batch_invariant=True, num_changed=0, num_tokens=8),
        InvarianceRow(
            NO_EP, "TorchExperts", "float32", batch_invariant=True, num_changed=None, num_tokens=8
        ),
    ]
    assert format_markdown(table_rows).splitlines() == [
        "| experts | `batch_invariant` | float32 |",
        "|---|---|---|",
        f"| `TritonExperts` | no | {rows[False]} of 8 |",
        "| `TritonExperts` | yes | 0 of 8 |",
        "| `TorchExperts` | yes | refused |",
    ]
