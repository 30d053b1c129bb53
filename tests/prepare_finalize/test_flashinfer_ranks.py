"""FlashInferCutlassMoEPrepareAndFinalize on gloo ranks, with a stand-in that checks arguments."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
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
from modular_kernel.utils.package_probes import find_package
from prepare_finalize import FlashInferGroup
from prepare_finalize.flashinfer import library
from prepare_finalize.flashinfer.exchange import (
    MoeAlltoAllExchange,
    NVLinkOneSidedExchange,
    Payloads,
)

PART, MOE_EP_PART = stand_in.FlashInferOverGloo, stand_in.FlashInferMoeEpOverGloo
MACHINE = this_machine(device="cpu")
GPU = Machine("cuda", (9, 0), frozenset({"triton", "flashinfer.comm"}))
PROBLEM = Problem(4, 64, 32, 6, 2, parallel=Parallel(2))
Pool = Callable[[int], RankPool]


def list_cases(experts: Any, world_size: int, part: Any = PART) -> list[RankCase]:
    return list(rank_cases_for(part, experts, MACHINE, world_size).cases)


def format_case_id(case: RankCase) -> str:
    """Return the text of a case with the class of the library instead of the part."""
    name = "NVLinkOneSided" if case.prepare_finalize is MOE_EP_PART else "MoeAlltoAll"
    return f"{name}+{str(case).partition('+')[2]}"


def collect_cases(part: Any) -> list[RankCase]:
    quantized = [c for c in list_cases("TritonExperts", 2, part) if c.problem.scheme.quantized]
    uneven = [
        case
        for case in list_cases("TorchExperts", 4, part)
        if case.routing in ("duplicates", "skips")
    ]
    flashinfer_experts = list_cases(FlashInfer, 2, part)[:3]
    assert quantized
    assert uneven
    return [*list_cases("TorchExperts", 2, part), *quantized, *uneven, *flashinfer_experts]


@pytest.mark.parametrize(
    "case", collect_cases(PART) + collect_cases(MOE_EP_PART), ids=format_case_id
)
def test_cases_are_proven(case: RankCase, rank_pool: Pool) -> None:
    proof = prove_ranks(case, rank_pool(case.world_size), MACHINE)
    assert proof.passed, str(proof)


DEFECTS = ("rows_reordered", "stale_rows", "last_expert_lost")


@pytest.mark.parametrize("part", [PART, MOE_EP_PART])
@pytest.mark.parametrize("mutant", [m for m in RANK_MUTANTS if m.name in DEFECTS])
def test_defects_are_found(mutant: Any, part: Any, rank_pool: Pool) -> None:
    kills = sensitivity_ranks(part, "TorchExperts", rank_pool(2), mutants=[mutant])
    assert [str(kill) for kill in kills if not kill.ok or kill.no_effect_reason] == []
    assert kills


# -------------------------------------------------------------------------------- calls and ranks


GROUPS = {"MoeAlltoAll": stand_in.GlooGroup, "NVLinkOneSidedAlltoAll": stand_in.GlooGroupMoeEp}


def get_all_to_all_class(name: str) -> Any:
    """Return the class of a stand-in."""
    return getattr(GROUPS[name].stand_in, name)


def make_layer(rank: int, group: object, problem: Problem = PROBLEM):
    rank_problem = replace(problem, parallel=replace(problem.parallel, rank=rank))
    part = MOE_EP_PART if isinstance(group, stand_in.GlooGroupMoeEp) else PART
    return make_kernel(part, "TorchExperts", rank_problem, group=group, machine=MACHINE)


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


def share_and_close(rank: int, world: int, group: object, name: str) -> int:
    """Use two layers of one shape with one manager. Return how many workspaces were made."""
    all_to_all_class = get_all_to_all_class(name)
    num_made = all_to_all_class.made
    manager = GROUPS[name](group)
    first, second = make_layer(rank, manager), make_layer(rank, manager)
    arguments = make_rank_inputs(rank)
    expected = first(*arguments)
    assert torch.equal(expected, second(*arguments))
    assert all_to_all_class.made == num_made + 1
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
    num_made = all_to_all_class.made - num_made
    manager.destroy()
    manager.destroy()
    assert not all_to_all_class.workspaces
    with pytest.raises(UnsupportedError, match="a destroyed manager"):
        second(*arguments)
    return num_made


@pytest.mark.parametrize("name", GROUPS)
def test_layers_of_one_manager_share_workspaces(rank_pool: Pool, name: str) -> None:
    # The second workspace is for a second call in flight.
    assert rank_pool(2).run(share_and_close, name) == [2, 2]


def compare_managers(rank: int, world: int, group: object, name: str) -> bool:
    """Return whether layers of two managers have equal results with both calls in flight."""
    managers = [GROUPS[name](group) for _ in range(2)]
    first, second = (make_layer(rank, manager) for manager in managers)
    arguments = make_rank_inputs(rank)
    calls = [kernel.start(*arguments) for kernel in (first, second)]
    are_equal = torch.equal(calls[0].finish(), calls[1].finish())
    for manager in managers:
        manager.destroy()
    return are_equal


@pytest.mark.parametrize("name", GROUPS)
def test_managers_do_not_share_workspaces(rank_pool: Pool, name: str) -> None:
    assert rank_pool(2).run(compare_managers, name) == [True, True]


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


def find_undetected_with_moe_ep(rank: int, world: int, group: object) -> list[str]:
    """Return the violations that the stand-in for 0.7.4 does not detect."""
    library_stand_in = stand_in.library_moe_ep
    backend_class = type(
        "UnsplitBackend",
        (library_stand_in.TorchDistBackend,),
        {"Split": lambda self, color, key: self},
    )

    def make_all_to_all(top_k: int = 2, slots: int = 4, ranks: int = 2, **options: object):
        bootstrap = library_stand_in.BootstrapConfig(world_size=ranks, rank=rank)
        params = library_stand_in.MoEEpCommParams(slots, top_k, 4, 16, torch.bfloat16)
        defaults = {"cft": False, "lamport": False, "comm_backend": backend_class(group)}
        config = library_stand_in.NVLinkOneSidedConfig(**{**defaults, **options})
        return library_stand_in.NVLinkOneSidedAlltoAll(bootstrap, params, config)

    x, ids = torch.randn(3, 16).bfloat16(), torch.tensor([[0, 3], [1, -1], [2, 0]]).int()
    valid, rows = (x, ids, torch.rand(3, 2)), torch.randn(2, 4, 16).bfloat16()

    def dispatch(position: int, value: object):
        return lambda all_to_all: all_to_all.dispatch(
            *(value if i == position else r for i, r in enumerate(valid))
        )

    def combine(sums: object, **options: object):
        return lambda all_to_all: (all_to_all.dispatch(*valid), all_to_all.combine(sums, **options))

    violations = {
        "a top_k without kernels": lambda: make_all_to_all(top_k=5),
        "unequal numbers of experts": lambda: make_all_to_all(slots=5),
        "another group's size": lambda: make_all_to_all(ranks=4),
        "another transport": lambda: make_all_to_all(lamport=None),
        "counted writes": lambda: make_all_to_all(cft=None),
        "ids of 64 bits": dispatch(1, ids.long()),
        "ids of another top-k": dispatch(1, ids[:, :1].contiguous()),
        "a payload of fewer tokens": dispatch(0, x[:2]),
        "a payload by columns": dispatch(0, x.T.contiguous().T),
        "a payload of three dimensions": dispatch(0, x[None]),
        "too small a workspace": dispatch(2, torch.rand(3, 400)),
        "a combine before": lambda all_to_all: all_to_all.combine(rows),
        "a dispatch twice": lambda all_to_all: (
            all_to_all.dispatch(*valid),
            all_to_all.dispatch(*valid),
        ),
        "sums by columns": combine(rows.transpose(1, 2).contiguous().mT),
        "an output of another dtype": combine(rows, output=torch.empty(3, 16)),
        "an output of other tokens": combine(rows, output=rows[0]),
        "freed before the combine": lambda all_to_all: (
            all_to_all.dispatch(*valid),
            all_to_all.destroy(),
        ),
    }
    undetected = []
    for serial, (violation, violate) in enumerate(violations.items(), 1):
        try:
            if violate.__code__.co_argcount:
                violate(make_all_to_all(extra_payload_bytes_per_token=32 * serial))
            else:
                violate()
        except RuntimeError as error:
            if "Check failed" in str(error):
                continue
        undetected.append(violation)
    first, second = make_all_to_all(), make_all_to_all()
    first.dispatch(*valid)
    with pytest.raises(RuntimeError, match="on this workspace awaits its combine"):
        second.dispatch(*valid)
    library_stand_in.NVLinkOneSidedAlltoAll.workspaces.clear()
    return undetected


def test_the_stand_in_for_the_replacement_detects_violations(rank_pool: Pool) -> None:
    assert rank_pool(2).run(find_undetected_with_moe_ep) == [[], []]


# ------------------------------------------------------------------------------------ the library

MNNVL_SOURCE = """
# CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
from flashinfer_comm import MnnvlConfig, TorchDistBackend
"""
MOE_ALLTOALL_SOURCE = """
import flashinfer_comm
from flashinfer_comm import moe_a2a_get_workspace_size_per_rank
# expert_id_payload_index
class MoeAlltoAll(flashinfer_comm.MoeAlltoAll): ...
"""
NVLINK = "moe_ep/backends/split/comm/nvlink_one_sided"
KERNELS = "data/csrc/nv_internal/tensorrt_llm/kernels/moe/communication/moeAlltoAllKernels.cu"
MOE_ALLTOALL_RELEASE = {
    "__init__.py": "",
    "_build_meta.py": "__version__ = '0.7.2'\n",
    "comm/__init__.py": "from flashinfer_comm import Mapping\n",
    "comm/mnnvl.py": MNNVL_SOURCE,
    "comm/trtllm_moe_alltoall.py": MOE_ALLTOALL_SOURCE,
}
MOE_EP_RELEASE = {
    "__init__.py": "",
    "_build_meta.py": "__version__ = '0.7.4'\n",
    "comm/__init__.py": "",
    "comm/mnnvl.py": MNNVL_SOURCE,
    "moe_ep/__init__.py": (
        "from flashinfer_moe_ep import (\n"
        "    BootstrapConfig, MoEEpCommParams, NVLinkOneSidedAlltoAll, NVLinkOneSidedConfig\n)\n"
    ),
    f"{NVLINK}/communication.py": "class NVLinkOneSidedAlltoAll: ...\n",
    f"{NVLINK}/config.py": "extra_payload_bytes_per_token: int = 0\n",
    KERNELS: "bool const valid_expert = expert_id >= 0;\n",
}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder on sys.path for a package flashinfer, which is not loaded."""
    monkeypatch.syspath_prepend(str(tmp_path))
    library.load.cache_clear()
    yield tmp_path
    library.load.cache_clear()
    for name in [n for n in sys.modules if n.split(".")[0] == "flashinfer"]:
        del sys.modules[name]


def write_release(site: Path, sources: dict[str, str]) -> None:
    for name, source in sources.items():
        path = site / "flashinfer" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)


@pytest.mark.parametrize(
    ("sources", "version", "name"),
    [
        (MOE_ALLTOALL_RELEASE, "0.7.2", "MoeAlltoAll"),
        (MOE_EP_RELEASE, "0.7.4", "NVLinkOneSidedAlltoAll"),
        ({**MOE_EP_RELEASE, **MOE_ALLTOALL_RELEASE}, "0.7.2", "MoeAlltoAll"),
    ],
    ids=["MoeAlltoAll", "NVLinkOneSidedAlltoAll", "both"],
)
def test_the_library_is_identified_by_its_files(
    site: Path, sources: dict[str, str], version: str, name: str
) -> None:
    write_release(site, sources)
    assert find_package(library.FLASHINFER_ALL2ALL).version == version
    loaded = library.load()
    assert {"MoeAlltoAll", "NVLinkOneSidedAlltoAll"} & vars(loaded).keys() == {name}


@pytest.mark.parametrize(
    ("release", "file", "source", "message"),
    [
        (MOE_ALLTOALL_RELEASE, "comm/mnnvl.py", "", "no CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"),
        (MOE_EP_RELEASE, KERNELS, "", "no comm/trtllm_moe_alltoall.py and no valid_expert in"),
        (
            MOE_EP_RELEASE,
            f"{NVLINK}/communication.py",
            "",
            "no comm/trtllm_moe_alltoall.py and no class NVLinkOneSidedAlltoAll in",
        ),
        (
            MOE_EP_RELEASE,
            f"{NVLINK}/config.py",
            "",
            "no comm/trtllm_moe_alltoall.py and no extra_payload_bytes_per_token in",
        ),
        (MOE_EP_RELEASE, "comm/mnnvl.py", "", "no CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR in"),
        (MOE_EP_RELEASE, "moe_ep/__init__.py", "", "no attribute 'NVLinkOneSidedAlltoAll'"),
        (
            MOE_EP_RELEASE,
            "moe_ep/__init__.py",
            MOE_EP_RELEASE["moe_ep/__init__.py"] + "class NVLinkOneSidedAlltoAll: ...\n",
            "NVLinkOneSidedAlltoAll.dispatch: no such method",
        ),
        (MOE_EP_RELEASE, "moe_ep/__init__.py", "import no_such_tile\n", "No module named"),
        (MOE_EP_RELEASE, "moe_ep/__init__.py", "import math\nmath.sqrt()\n", "TypeError"),
        (MOE_EP_RELEASE, "moe_ep/__init__.py", "int('on')\n", "ValueError"),
    ],
)
def test_a_half_installed_release_is_refused(
    site: Path, release: dict[str, str], file: str, source: str, message: str
) -> None:
    write_release(site, {**release, file: source})
    with pytest.raises(ConfigurationError) as exc_info:
        library.load()
    assert message in str(exc_info.value)


def change(cls: type, **methods: object) -> type:
    """Return a subclass with other methods; None removes one."""
    return type(cls.__name__, (cls,), methods)


def dispatch_to_stream(
    self: object, x: object, ids: object, weights: object, stream: object, **options: object
) -> None:
    """A dispatch with an additional required argument."""


def dispatch_of_others(
    self: object, x: object, ids: object, weights: object, max_tokens: object = None
) -> None:
    """A dispatch with other keywords."""


OLD, NEW = stand_in.library, stand_in.library_moe_ep
OLD_CLASS, NEW_CLASS = "MoeAlltoAll", "NVLinkOneSidedAlltoAll"
INTERFACES: tuple[tuple[Any, dict[str, object], str], ...] = (
    (OLD, {OLD_CLASS: change(OLD.MoeAlltoAll, combine=None)}, "MoeAlltoAll.combine: no such"),
    (
        OLD,
        {OLD_CLASS: change(OLD.MoeAlltoAll, _reset_workspace=None)},
        "MoeAlltoAll._reset_workspace: no such method",
    ),
    (
        OLD,
        {OLD_CLASS: change(OLD.MoeAlltoAll, dispatch=dispatch_to_stream)},
        "MoeAlltoAll.dispatch: missing a required argument: 'stream'",
    ),
    (OLD, {"Mapping": None}, "Mapping: no such method"),
    (OLD, {"moe_a2a_get_workspace_size_per_rank": len}, "moe_a2a_get_workspace_size_per_rank: "),
    (
        NEW,
        {NEW_CLASS: change(NEW.NVLinkOneSidedAlltoAll, destroy=None)},
        "NVLinkOneSidedAlltoAll.destroy: no such method",
    ),
    (
        NEW,
        {NEW_CLASS: change(NEW.NVLinkOneSidedAlltoAll, dispatch=dispatch_of_others)},
        "NVLinkOneSidedAlltoAll.dispatch: got an unexpected keyword argument 'hidden_states_scale'",
    ),
    (NEW, {NEW_CLASS: None}, "NVLinkOneSidedAlltoAll"),
    (NEW, {"BootstrapConfig": None}, "BootstrapConfig: no such method"),
    (NEW, {"MoEEpCommParams": OLD.Mapping}, "MoEEpCommParams: missing a required argument"),
    (
        NEW,
        {"NVLinkOneSidedConfig": lambda extra_payload_bytes_per_token, comm_backend: None},
        "NVLinkOneSidedConfig without fields",
    ),
)


@pytest.mark.parametrize(
    ("release", "changes", "message"), INTERFACES, ids=[interface[2] for interface in INTERFACES]
)
def test_other_interfaces_are_refused_before_a_call(
    release: Any, changes: dict[str, object], message: str
) -> None:
    library.check_interface(release)
    classes = SimpleNamespace(**{**vars(release), **changes})
    with pytest.raises(ConfigurationError, match=r"need FlashInfer with comm\.MoeAlltoAll") as info:
        library.check_interface(classes)
    assert message in str(info.value)


def test_other_results_of_a_dispatch_are_refused() -> None:
    tensor = torch.zeros(1, 1)
    sent = Payloads(tensor, None, tensor, tensor)
    old = MoeAlltoAllExchange.__new__(MoeAlltoAllExchange)
    old._max_tokens = 1
    old._all_to_all = SimpleNamespace(dispatch=lambda *arguments, **options: [tensor])
    with pytest.raises(ConfigurationError, match="dispatch: got 1 results, need 3 results"):
        old.dispatch(sent, tensor)
    new = NVLinkOneSidedExchange.__new__(NVLinkOneSidedExchange)
    result = SimpleNamespace(hidden_states=tensor, topk_ids=tensor)
    new._all_to_all = SimpleNamespace(dispatch=lambda *arguments, **options: result)
    with pytest.raises(ConfigurationError, match="got no hidden_states_scale, topk_weights, need"):
        new.dispatch(sent, None)
