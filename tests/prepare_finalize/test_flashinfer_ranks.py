"""FlashInferCutlassMoEPrepareAndFinalize on gloo ranks, with a strict stand-in for the library."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import flashinfer_stand_in as stand_in
import pytest
import torch
from vendor_stand_in import FlashInfer

from modular_kernel.catalog import check, make_kernel, this_machine
from modular_kernel.errors import CommunicationError, ConfigurationError, UnsupportedError
from modular_kernel.spec.problem import Machine, Parallel, Problem
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.testing.cases.inputs import FencedMemory, make_inputs
from modular_kernel.testing.cases.rank_inputs import inputs_of_rank
from modular_kernel.testing.cases.ranks import RankCase, rank_cases_for
from modular_kernel.testing.input_mutations.over_ranks import sensitivity_ranks
from modular_kernel.testing.input_mutations.rank_operators import RANK_MUTANTS
from modular_kernel.testing.ranks.pool import RankError, RankPool
from modular_kernel.testing.verify.over_ranks import prove_ranks
from prepare_finalize import FlashInferGroup
from prepare_finalize.flashinfer import library

PART = stand_in.FlashInferOverGloo
MACHINE = this_machine(device="cpu")
GPU = Machine("cuda", (9, 0), frozenset({"triton", "flashinfer.comm"}))
PROBLEM = Problem(4, 64, 32, 6, 2, parallel=Parallel(2))
Pool = Callable[[int], RankPool]


def cases(experts: Any, world_size: int) -> list[RankCase]:
    return list(rank_cases_for(PART, experts, MACHINE, world_size).cases)


def name(case: RankCase) -> str:
    """Return a name of the case without the class's repr."""
    return str(case).partition("+")[2]


QUANTIZED = [case for case in cases("TritonExperts", 2) if case.problem.scheme.quantized]
UNEVEN = [case for case in cases("TorchExperts", 4) if case.routing in ("duplicates", "skips")]


BOTH = cases(FlashInfer, 2)[:3]  # all of it FlashInfer's


@pytest.mark.parametrize("case", cases("TorchExperts", 2) + QUANTIZED + UNEVEN + BOTH, ids=name)
def test_cases_are_proven(case: RankCase, rank_pool: Pool) -> None:
    proof = prove_ranks(case, rank_pool(case.world_size), MACHINE)
    assert proof.passed, str(proof)


# What a part of this format can do to rows, and to what lies where nobody sent a row.
DEFECTS = ("rows_reordered", "stale_rows", "last_expert_lost")


@pytest.mark.parametrize("mutant", [m for m in RANK_MUTANTS if m.name in DEFECTS])
def test_defects_are_found(mutant: Any, rank_pool: Pool) -> None:
    kills = sensitivity_ranks(PART, "TorchExperts", rank_pool(2), mutants=[mutant])
    assert [str(kill) for kill in kills if not kill.ok or kill.no_effect_reason] == []
    assert kills


# ----------------------------------------------------------------------------- of calls and ranks


def layer(rank: int, group: object, problem: Problem = PROBLEM):
    mine = replace(problem, parallel=replace(problem.parallel, rank=rank))
    return make_kernel(PART, "TorchExperts", mine, group=group, machine=MACHINE)


def inputs(rank: int, problem: Problem = PROBLEM) -> tuple[torch.Tensor, ExpertWeights, Routing]:
    device = torch.device("cpu")
    whole = make_inputs(replace(problem, parallel=Parallel()), "uniform", device, seed=rank)
    mine = replace(problem, parallel=replace(problem.parallel, rank=rank))
    got = inputs_of_rank(whole, slice(0, problem.tokens), mine, FencedMemory(device), strided=False)
    return got.x_TH, got.weights, got.routing


def share_and_close(rank: int, world: int, group: object) -> int:
    """Run two layers of one shape on one manager, with calls in flight, and return what is
    refused."""
    made = stand_in.library.MoeAlltoAll.made
    manager = stand_in.GlooGroup(group)
    first, second = layer(rank, manager), layer(rank, manager)
    given = inputs(rank)
    alone = first(*given)
    assert torch.equal(alone, second(*given))
    assert stand_in.library.MoeAlltoAll.made == made + 1
    calls = [kernel.start(*given) for kernel in (first, second)]
    with pytest.raises(UnsupportedError, match="calls in flight: got 3, need at most 2"):
        first.start(*given)
    assert all(torch.equal(call.finish(), alone) for call in calls)
    part = first.prepare_finalize
    pending = first.start(*given)
    tokens, handle = pending.receive()
    output = torch.zeros(len(tokens.x_TH), 2, 64, dtype=tokens.x_TH.dtype)
    ours = {"handle": handle, "reduce": first.reduce, "out": torch.empty_like(alone)}
    with pytest.raises(UnsupportedError, match="one of this"):
        second.prepare_finalize.finalize(output, **ours)
    part.finalize(output, **ours)
    assert not ours["out"].any()
    with pytest.raises(UnsupportedError, match="one that was combined"):
        part.finalize(output, **ours)
    made = stand_in.library.MoeAlltoAll.made - made
    manager.destroy()
    manager.destroy()
    assert not stand_in.library.MoeAlltoAll.workspaces
    with pytest.raises(UnsupportedError, match="a destroyed manager"):
        second(*given)
    return made


def test_layers_share_workspaces_without_overwriting(rank_pool: Pool) -> None:
    assert rank_pool(2).run(share_and_close) == [2, 2]  # one, and another for a second call


def two_managers(rank: int, world: int, group: object) -> bool:
    """Run layers of one shape on two managers, both in flight."""
    managers = [stand_in.GlooGroup(group) for _ in range(2)]
    first, second = (layer(rank, manager) for manager in managers)
    given = inputs(rank)
    calls = [kernel.start(*given) for kernel in (first, second)]
    same = torch.equal(calls[0].finish(), calls[1].finish())
    for manager in managers:
        manager.destroy()
    return same


def test_managers_do_not_share_workspaces(rank_pool: Pool) -> None:
    assert rank_pool(2).run(two_managers) == [True, True]


def disagree(rank: int, world: int, group: object) -> str:
    manager = stand_in.GlooGroup(group)
    with pytest.raises(CommunicationError) as caught:
        layer(rank, manager, replace(PROBLEM, tokens=5 if rank else 4))
    kernel = layer(rank, manager)
    kernel(*inputs(rank))
    manager.destroy()
    return str(caught.value)


def test_ranks_that_call_different_layers_all_raise(rank_pool: Pool) -> None:
    assert all("tokens " in text for text in rank_pool(2).run(disagree))


def without_library(rank: int, world: int, group: object) -> None:
    FlashInferGroup(group)


def test_a_missing_library_is_reported(rank_pool: Pool) -> None:
    with pytest.raises(RankError, match=r"ConfigurationError: flashinfer\.comm: got nothing, need"):
        rank_pool(2).run(without_library)
    with pytest.raises(ConfigurationError, match="in_flight"):
        FlashInferGroup(in_flight=0)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"top_k": 3}, "top_k"),
        ({"quant": "fp8_w8a8_tensor"}, "dispatch_quant"),
        ({"hidden": 72}, "hidden"),
        ({"dtype": torch.float32}, "dtype"),
        ({}, ""),
    ],
)
def test_unsupported_problems_are_refused(change: dict[str, object], rule: str) -> None:
    problem = replace(PROBLEM, **change)  # type: ignore[arg-type]
    name = "FlashInferCutlassMoEPrepareAndFinalize"
    verdict = check(name, "TritonExperts", problem, GPU)
    assert " ".join(r.rule for r in verdict.rejections) == rule


# ----------------------------------------------------------------------------- the stand-in itself


def planted(rank: int, world: int, group: object) -> list[str]:
    """Return the error of the stand-in for each violation, which all ranks make."""
    lib = stand_in.library
    whole = type("Whole", (lib.TorchDistBackend,), {"Split": lambda self, color, key: self})

    def make(nbytes: int = 1 << 16, top_k: int = 2, numbers: int = 4, ranks: int = 2):
        mapping = lib.Mapping(world, rank, 2, tp_size=world, moe_ep_size=ranks, moe_tp_size=1)
        config = lib.MnnvlConfig(whole(group))
        return lib.MoeAlltoAll(mapping, 4, top_k, numbers, nbytes, mnnvl_config=config)

    x, ids = torch.randn(3, 16).bfloat16(), torch.tensor([[0, 3], [1, 1], [2, 0]]).int()
    right = (ids, [x, ids, torch.rand(3, 2)], 4, -1, 1)
    rows = torch.randn(2, 4, 16).bfloat16()

    def dispatch(place: int, value: object):
        return lambda one: one.dispatch(*(value if i == place else r for i, r in enumerate(right)))

    def combine(*given: object, **options: object):
        def both(one) -> None:
            one.dispatch(*right)
            one.combine(*given, **options)

        return both

    wrong = {
        "a top_k without kernels": lambda: make(top_k=3),
        "fewer experts than ranks": lambda: make(numbers=1),
        "another group's size": lambda: make(ranks=1),
        "ids of 64 bits": dispatch(0, ids.long()),
        "a skipped pair": dispatch(0, ids - 1),
        "an expert too many": dispatch(0, ids + 1),
        "ids of another top-k": dispatch(0, ids[:, :1].contiguous()),
        "a payload of fewer tokens": dispatch(1, [x[:2], ids]),
        "a payload by columns": dispatch(1, [x.T.contiguous().T, ids]),
        "a payload of three dimensions": dispatch(1, [x[None], ids]),
        "seven payloads": dispatch(1, [ids] * 7),
        "fewer tokens than there are": dispatch(2, 2),
        "more tokens than it is made for": dispatch(2, 5),
        "no token": dispatch(2, 0),
        "too small a workspace": lambda: make(nbytes=1100).dispatch(*right),
        "a combine before": lambda one: one.combine(rows, 4),
        "a dispatch twice": lambda one: (one.dispatch(*right), one.dispatch(*right)),
        "a combine of other rows": combine(rows[:, :3].contiguous(), 3),
        "a payload of sums by columns": combine(rows.transpose(1, 2).contiguous().mT, 4),
        "sums of two dimensions": combine(rows.flatten(0, 1), 4),
        "an output of another dtype": combine(rows, 4, output=torch.empty(3, 16)),
        "an output of other tokens": combine(rows, 4, output=rows[0]),
    }
    found = []
    for serial, (what, violate) in enumerate(wrong.items()):
        try:
            if violate.__code__.co_argcount:
                one = make((1 << 16) + 128 * serial)
                violate(one)
            else:
                violate()
        except RuntimeError as error:
            if "Check failed" in str(error):
                continue
        found.append(what)
    two = [make(1 << 17), lambda: make(1 << 17)]
    with pytest.raises(RuntimeError, match="a workspace of another instance"):
        two[1]()
    lib.MoeAlltoAll.workspaces.clear()
    return found


def test_the_stand_in_detects_violations(rank_pool: Pool) -> None:
    assert rank_pool(2).run(planted) == [[], []]


# ------------------------------------------------------------------------------------ where it is


def test_the_library_is_identified_by_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    library.load.cache_clear()
    folder = tmp_path / "flashinfer/comm"
    folder.mkdir(parents=True)
    (tmp_path / "flashinfer/__init__.py").write_text("")
    (folder / "__init__.py").write_text("Mapping = 1\n")
    moe = "class MoeAlltoAll: '''expert_id_payload_index'''\n"
    moe += "def moe_a2a_get_workspace_size_per_rank(): ...\n"
    (folder / "trtllm_moe_alltoall.py").write_text(moe)
    (folder / "mnnvl.py").write_text("MnnvlConfig = TorchDistBackend = 2\n")
    with pytest.raises(ConfigurationError, match=r"no CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR in"):
        library.load()
    shares = "# CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR\nMnnvlConfig = TorchDistBackend = 2\n"
    (folder / "mnnvl.py").write_text(shares)
    try:
        assert library.load().Mapping == 1
    finally:
        library.load.cache_clear()
        for name in [n for n in sys.modules if n.split(".")[0] == "flashinfer"]:
            del sys.modules[name]
