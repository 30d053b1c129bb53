"""Calls are checked against the id dtypes and numbers of tokens that a part declares."""

from dataclasses import replace

import pytest
import torch

from experts.torch_experts import TorchExperts
from modular_kernel.catalog import load_catalog, this_machine
from modular_kernel.errors import DtypeError
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.spec.problem import Parallel, Problem
from modular_kernel.testing.cases.inputs import make_inputs
from prepare_finalize import MoEPrepareAndFinalizeNoEP

PROBLEM = Problem(tokens=6, hidden=32, intermediate=16, experts=4, top_k=2, dtype=torch.float32)


class Int64IdsPrepare(MoEPrepareAndFinalizeNoEP):
    """Accepts int64 ids only."""

    requires = replace(MoEPrepareAndFinalizeNoEP.requires, topk_indices_dtype=torch.int64)


@pytest.mark.parametrize("caller", ["kernel", "plan"])
def test_a_part_gets_ids_in_the_dtype_that_it_declares(caller: str) -> None:
    parts = Int64IdsPrepare(PROBLEM), TorchExperts(PROBLEM)
    kernel = FusedMoEModularKernel(*parts, machine=this_machine(device="cpu"))
    call = kernel.plan() if caller == "plan" else kernel
    inputs = make_inputs(PROBLEM, "uniform", torch.device("cpu"))
    ids_TK = inputs.routing.topk_ids_TK
    with pytest.raises(DtypeError, match="topk_ids: got int32, need int64"):
        call(inputs.x_TH, inputs.weights, replace(inputs.routing, topk_ids_TK=ids_TK.int()))
    out = call(inputs.x_TH, inputs.weights, replace(inputs.routing, topk_ids_TK=ids_TK.long()))
    assert out.isfinite().all()


def list_parts_over_ranks() -> list[str]:
    catalog = load_catalog()
    classes = {name: catalog.prepare_finalize(name) for name in catalog.names("prepare_finalize")}
    return [name for name, part_class in classes.items() if part_class.requires.world_sizes[0] > 1]


def test_parts_over_ranks_are_known() -> None:
    assert {"PplxPrepareAndFinalize", "DeepEPLLPrepareAndFinalize"} <= set(list_parts_over_ranks())


@pytest.mark.parametrize("name", list_parts_over_ranks())
def test_a_part_over_ranks_is_bounded_by_its_buffers(name: str) -> None:
    part_class = load_catalog().prepare_finalize(name)
    part = object.__new__(part_class)  # the constructor would load the part's library
    part.problem = replace(PROBLEM, parallel=Parallel(2))
    assert part.max_num_tokens_per_rank() == PROBLEM.tokens
    assert part.topk_indices_dtype() is None  # the part converts ids for its library
