"""The cache of checked weights does not mistake new weights for freed weights.

New weights can have the id or the address of freed weights.
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
    cache = recording.CheckedWeightsCache()
    weights = replace(make_inputs(BASE, "uniform", CPU).weights)
    cache.add(weights)
    assert cache.lookup(weights, CPU) is not None
    del weights
    gc.collect()
    assert not cache._entries


def test_weights_with_the_id_of_freed_weights_are_not_found() -> None:
    """The cache compares objects, because an entry can outlive its weights."""
    cache, old_weights = recording.CheckedWeightsCache(), make_inputs(BASE, "uniform", CPU).weights
    new_weights = replace(make_inputs(BASE, "uniform", CPU, seed=1).weights)
    cache._entries[id(new_weights)] = cache.add(old_weights)
    assert cache.lookup(old_weights, CPU) is not None
    assert cache.lookup(new_weights, CPU) is None
    del old_weights
    gc.collect()
    assert cache.lookup(new_weights, CPU) is None


def test_smaller_storage_at_the_same_address_is_not_found() -> None:
    """Two tensors have the same address, but half of the memory of the second tensor was freed."""
    cache, weights = recording.CheckedWeightsCache(), make_inputs(BASE, "uniform", CPU).weights
    shrunk_w1, nbytes = weights.w1.clone(), weights.w1.nbytes
    shrunk_w1.untyped_storage().resize_(nbytes // 2)
    storage = torch._C._construct_storage_from_data_pointer(shrunk_w1.data_ptr(), CPU, nbytes)
    full_w1 = torch.empty(0, dtype=shrunk_w1.dtype)
    full_w1.set_(storage, 0, shrunk_w1.shape, shrunk_w1.stride())
    full_weights = replace(weights, w1=full_w1)
    cache.add(full_weights)
    assert cache.lookup(replace(full_weights), CPU) is not None
    assert cache.lookup(replace(weights, w1=shrunk_w1), CPU) is None


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
