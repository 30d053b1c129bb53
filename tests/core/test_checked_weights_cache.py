"""Plans cache which weights were checked.

New weights with the id or address of freed ones must not be found in the cache.
"""

import gc
from dataclasses import replace

import pytest
import torch

from modular_kernel import reference
from modular_kernel.catalog import make_kernel
from modular_kernel.replay import recording
from modular_kernel.testing.cases.inputs import make_inputs
from modular_kernel.testing.cases.lists import BASE
from modular_kernel.testing.verify.compare import compare

CPU = torch.device("cpu")


def test_freed_weights_are_removed_from_the_cache() -> None:
    known, weights = (
        recording.CheckedWeightsCache(),
        replace(make_inputs(BASE, "uniform", CPU).weights),
    )
    known.add(weights)
    assert known.lookup(weights, CPU) is not None
    del weights
    gc.collect()
    assert not known._entries


def test_weights_with_the_id_of_freed_weights_are_not_found() -> None:
    """The cache compares the objects, because an entry may outlive its weights."""
    known, first = recording.CheckedWeightsCache(), make_inputs(BASE, "uniform", CPU).weights
    second = replace(make_inputs(BASE, "uniform", CPU, seed=1).weights)
    known._entries[id(second)] = known.add(first)
    assert known.lookup(first, CPU) is not None
    assert known.lookup(second, CPU) is None
    del first
    gc.collect()
    assert known.lookup(second, CPU) is None


def test_smaller_storage_at_the_same_address_is_not_found() -> None:
    """Two tensors have the same address, but half of the second one's memory was freed."""
    known, weights = recording.CheckedWeightsCache(), make_inputs(BASE, "uniform", CPU).weights
    short, nbytes = weights.w1.clone(), weights.w1.nbytes
    short.untyped_storage().resize_(nbytes // 2)
    storage = torch._C._construct_storage_from_data_pointer(short.data_ptr(), CPU, nbytes)
    whole = torch.empty(0, dtype=short.dtype).set_(storage, 0, short.shape, short.stride())
    first, second = replace(weights, w1=whole), replace(weights, w1=short)
    known.add(first)
    assert known.lookup(replace(first), CPU) is not None
    assert known.lookup(second, CPU) is None


def test_plan_uses_the_weights_of_each_call() -> None:
    """Weights are freed after each call, until Python reuses an id."""
    kernel = make_kernel("MoEPrepareAndFinalizeNoEP", "TorchExperts", BASE)
    if kernel.machine.device != "cpu":
        return
    plan, ids = kernel.plan(), list[int]()
    for seed in range(300):
        inputs = make_inputs(BASE, "uniform", CPU, seed=seed)
        weights = replace(inputs.weights)
        ids.append(id(weights))
        out = plan(inputs.x_TH, weights, inputs.routing)
        reference_arguments = inputs.x_TH, weights, inputs.routing, BASE
        assert compare(
            out,
            reference.float64_reference(*reference_arguments),
            reference.rounded_reference(*reference_arguments),
            BASE,
        ).ok
        del weights, reference_arguments
        if seed >= 11 and len(set(ids)) < len(ids):
            break
    else:
        pytest.fail("no weights had the id of earlier ones, so nothing was tested")
