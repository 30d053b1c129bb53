"""FlashInferCutlassMoEPrepareAndFinalize on gloo ranks, with a stand-in that checks arguments."""

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
from modular_kernel.testing.cases.inputs import FencedCopier, make_inputs
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


def list_cases(experts: Any, world_size: int) -> list[RankCase]:
    return list(rank_cases_for(PART, experts, MACHINE, world_size).cases)


def format_case_id(case: RankCase) -> str:
    """Return the text of a case without the part."""
    return str(case).partition("+")[2]


QUANTIZED = [case for case in list_cases("TritonExperts", 2) if case.problem.scheme.quantized]
UNEVEN = [case for case in list_cases("TorchExperts", 4) if case.routing in ("duplicates", "skips")]


FLASHINFER_EXPERTS = list_cases(FlashInfer, 2)[:3]  # the experts and the exchange of FlashInfer


@pytest.mark.parametrize(
    "case",
    list_cases("TorchExperts", 2) + QUANTIZED + UNEVEN + FLASHINFER_EXPERTS,
    ids=format_case_id,
)
def test_cases_are_proven(case: RankCase, rank_pool: Pool) -> None:
    proof = prove_ranks(case, rank_pool(case.world_size), MACHINE)
    assert proof.passed, str(proof)


DEFECTS = ("rows_reordered", "stale_rows", "last_expert_lost")


@pytest.mark.parametrize("mutant", [m for m in RANK_MUTANTS if m.name in DEFECTS])
def test_defects_are_found(mutant: Any, rank_pool: Pool) -> None:
    kills = sensitivity_ranks(PART, "TorchExperts", rank_pool(2), mutants=[mutant])
    assert [str(kill) for kill in kills if not kill.ok or kill.no_effect_reason] == []
    assert kills


# -------------------------------------------------------------------------------- calls and ranks


def make_layer(rank: int, group: object, problem: Problem = PROBLEM):
    rank_problem = replace(problem, parallel=replace(problem.parallel, rank=rank))
    return make_kernel(PART, "TorchExperts", rank_problem, group=group, machine=MACHINE)


def make_rank_inputs(
    rank: int, problem: Problem = PROBLEM
) -> tuple[torch.Tensor, ExpertWeights, Routing]:
    device = torch.device("cpu")
    all_inputs = make_inputs(replace(problem, parallel=Parallel()), "uniform", device, seed=rank)
    rank_problem = replace(problem, parallel=replace(problem.parallel, rank=rank))
    rank_inputs = inputs_of_rank(
        all_inputs, slice(0, problem.tokens), rank_problem, FencedCopier(device), strided=False
    )
    return rank_inputs.x_TH, rank_inputs.weights, rank_inputs.routing


def share_and_close(rank: int, world: int, group: object) -> int:
    """Use two layers of one shape with one manager. Return how many workspaces were made."""
    num_made = stand_in.library.MoeAlltoAll.made
    manager = stand_in.GlooGroup(group)
    first, second = make_layer(rank, manager), make_layer(rank, manager)
    arguments = make_rank_inputs(rank)
    expected = first(*arguments)
    assert torch.equal(expected, second(*arguments))
    assert stand_in.library.MoeAlltoAll.made == num_made + 1
    calls = [kernel.start(*arguments) for kernel in (first, second)]
    with pytest.raises(UnsupportedError, match="calls in flight: got 3, need at most 2"):
        first.start(*arguments)
    assert all(torch.equal(call.finish(), expected) for call in calls)
    part = first.prepare_finalize
    pending = first.start(*arguments)
    tokens, handle = pending.receive()
    output = torch.zeros(len(tokens.x_TH), 2, 64, dtype=tokens.x_TH.dtype)
    finalize_arguments = {
        "handle": handle,
        "reduce": first.reduce,
        "out": torch.empty_like(expected),
    }
    with pytest.raises(UnsupportedError, match="one of this"):
        second.prepare_finalize.finalize(output, **finalize_arguments)
    part.finalize(output, **finalize_arguments)
    assert not finalize_arguments["out"].any()
    with pytest.raises(UnsupportedError, match="one that was combined"):
        part.finalize(output, **finalize_arguments)
    num_made = stand_in.library.MoeAlltoAll.made - num_made
    manager.destroy()
    manager.destroy()
    assert not stand_in.library.MoeAlltoAll.workspaces
    with pytest.raises(UnsupportedError, match="a destroyed manager"):
        second(*arguments)
    return num_made


def test_layers_of_one_manager_share_workspaces(rank_pool: Pool) -> None:
    # The second workspace is for a second call in flight.
    assert rank_pool(2).run(share_and_close) == [2, 2]


def compare_managers(rank: int, world: int, group: object) -> bool:
    """Return whether layers of two managers have equal results with both calls in flight."""
    managers = [stand_in.GlooGroup(group) for _ in range(2)]
    first, second = (make_layer(rank, manager) for manager in managers)
    arguments = make_rank_inputs(rank)
    calls = [kernel.start(*arguments) for kernel in (first, second)]
    are_equal = torch.equal(calls[0].finish(), calls[1].finish())
    for manager in managers:
        manager.destroy()
    return are_equal


def test_managers_do_not_share_workspaces(rank_pool: Pool) -> None:
    assert rank_pool(2).run(compare_managers) == [True, True]


def make_different_layers(rank: int, world: int, group: object) -> str:
    manager = stand_in.GlooGroup(group)
    with pytest.raises(CommunicationError) as exc_info:
        make_layer(rank, manager, replace(PROBLEM, tokens=5 if rank else 4))
    kernel = make_layer(rank, manager)
    kernel(*make_rank_inputs(rank))
    manager.destroy()
    return str(exc_info.value)


def test_ranks_that_call_different_layers_all_raise(rank_pool: Pool) -> None:
    assert all("tokens " in message for message in rank_pool(2).run(make_different_layers))


def make_manager_without_library(rank: int, world: int, group: object) -> None:
    FlashInferGroup(group)


def test_a_missing_library_is_reported(rank_pool: Pool) -> None:
    with pytest.raises(RankError, match=r"ConfigurationError: flashinfer\.comm: got nothing, need"):
        rank_pool(2).run(make_manager_without_library)
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


def find_undetected(rank: int, world: int, group: object) -> list[str]:
    """Return the violations that the stand-in does not detect."""
    library_stand_in = stand_in.library
    backend_class = type(
        "UnsplitBackend",
        (library_stand_in.TorchDistBackend,),
        {"Split": lambda self, color, key: self},
    )

    def make_all_to_all(nbytes: int = 1 << 16, top_k: int = 2, slots: int = 4, ranks: int = 2):
        mapping = library_stand_in.Mapping(
            world, rank, 2, tp_size=world, moe_ep_size=ranks, moe_tp_size=1
        )
        config = library_stand_in.MnnvlConfig(backend_class(group))
        return library_stand_in.MoeAlltoAll(mapping, 4, top_k, slots, nbytes, mnnvl_config=config)

    x, ids = torch.randn(3, 16).bfloat16(), torch.tensor([[0, 3], [1, 1], [2, 0]]).int()
    valid = (ids, [x, ids, torch.rand(3, 2)], 4, -1, 1)
    rows = torch.randn(2, 4, 16).bfloat16()

    def dispatch(position: int, value: object):
        return lambda all_to_all: all_to_all.dispatch(
            *(value if i == position else r for i, r in enumerate(valid))
        )

    def combine(*arguments: object, **options: object):
        def dispatch_and_combine(all_to_all) -> None:
            all_to_all.dispatch(*valid)
            all_to_all.combine(*arguments, **options)

        return dispatch_and_combine

    violations = {
        "a top_k without kernels": lambda: make_all_to_all(top_k=3),
        "fewer experts than ranks": lambda: make_all_to_all(slots=1),
        "another group's size": lambda: make_all_to_all(ranks=1),
        "ids of 64 bits": dispatch(0, ids.long()),
        "a skipped pair": dispatch(0, ids - 1),
        "an expert too many": dispatch(0, ids + 1),
        "ids of another top-k": dispatch(0, ids[:, :1].contiguous()),
        "a payload of fewer tokens": dispatch(1, [x[:2], ids]),
        "a payload by columns": dispatch(1, [x.T.contiguous().T, ids]),
        "a payload of three dimensions": dispatch(1, [x[None], ids]),
        "seven payloads": dispatch(1, [ids] * 7),
        "fewer tokens than rows": dispatch(2, 2),
        "more tokens than the limit": dispatch(2, 5),
        "no token": dispatch(2, 0),
        "too small a workspace": lambda: make_all_to_all(nbytes=1100).dispatch(*valid),
        "a combine before": lambda all_to_all: all_to_all.combine(rows, 4),
        "a dispatch twice": lambda all_to_all: (
            all_to_all.dispatch(*valid),
            all_to_all.dispatch(*valid),
        ),
        "a combine of other rows": combine(rows[:, :3].contiguous(), 3),
        "a payload of sums by columns": combine(rows.transpose(1, 2).contiguous().mT, 4),
        "sums of two dimensions": combine(rows.flatten(0, 1), 4),
        "an output of another dtype": combine(rows, 4, output=torch.empty(3, 16)),
        "an output of other tokens": combine(rows, 4, output=rows[0]),
    }
    undetected = []
    for serial, (violation, violate) in enumerate(violations.items()):
        try:
            if violate.__code__.co_argcount:
                all_to_all = make_all_to_all((1 << 16) + 128 * serial)
                violate(all_to_all)
            else:
                violate()
        except RuntimeError as error:
            if "Check failed" in str(error):
                continue
        undetected.append(violation)
    _first = make_all_to_all(1 << 17)  # keeps its workspace in use
    with pytest.raises(RuntimeError, match="a workspace of another instance"):
        make_all_to_all(1 << 17)
    library_stand_in.MoeAlltoAll.workspaces.clear()
    return undetected


def test_the_stand_in_detects_violations(rank_pool: Pool) -> None:
    assert rank_pool(2).run(find_undetected) == [[], []]


# ------------------------------------------------------------------------------------ the library


def test_the_library_is_identified_by_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    library.load.cache_clear()
    folder = tmp_path / "flashinfer/comm"
    folder.mkdir(parents=True)
    (tmp_path / "flashinfer/__init__.py").write_text("")
    (folder / "__init__.py").write_text("Mapping = 1\n")
    moe_source = "class MoeAlltoAll: '''expert_id_payload_index'''\n"
    moe_source += "def moe_a2a_get_workspace_size_per_rank(): ...\n"
    (folder / "trtllm_moe_alltoall.py").write_text(moe_source)
    (folder / "mnnvl.py").write_text("MnnvlConfig = TorchDistBackend = 2\n")
    with pytest.raises(ConfigurationError, match=r"no CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR in"):
        library.load()
    source = "# CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR\nMnnvlConfig = TorchDistBackend = 2\n"
    (folder / "mnnvl.py").write_text(source)
    try:
        assert library.load().Mapping == 1
    finally:
        library.load.cache_clear()
        for name in [n for n in sys.modules if n.split(".")[0] == "flashinfer"]:
            del sys.modules[name]
