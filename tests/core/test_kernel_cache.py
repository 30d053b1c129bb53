"""The cache of kernels that layers and operators share."""

import gc

import torch

from modular_kernel.operators.kernel_cache import NO_EP, KernelCache
from modular_kernel.spec.problem import Problem
from modular_kernel.testing.random_inputs import random_inputs

CPU = torch.device("cpu")
PAIR = (NO_EP, "TorchExperts")


def test_the_least_recently_used_kernel_is_evicted() -> None:
    cache = KernelCache(max_kernels=2)
    problems = [
        Problem(16, hidden, intermediate=16, experts=4, top_k=2, dtype=torch.float32)
        for hidden in (16, 32, 48)
    ]
    first, second, third = (cache.kernels_by_size(PAIR, problem, CPU) for problem in problems)
    inputs = [random_inputs(problem, CPU) for problem in problems]
    for sized_kernels, index in ((first, 0), (second, 1), (first, 0), (first, 0), (third, 2)):
        sized_kernels.run(*inputs[index])
    assert [key[1].hidden for key in cache.kernels] == [16, 48]
    cached_kernel = next(iter(cache.kernels.values()))
    first.run(*inputs[0])
    assert next(iter(cache.kernels.values())) is cached_kernel


def test_an_evicted_kernel_is_made_again() -> None:
    cache = KernelCache(max_kernels=1)
    problem = Problem(16, 16, intermediate=16, experts=4, top_k=2, dtype=torch.float32)
    sized_kernels, inputs = cache.kernels_by_size(PAIR, problem, CPU), random_inputs(problem, CPU)
    expected = sized_kernels.run(*inputs)
    cache.kernels.clear()
    gc.collect()  # a kernel and its plans refer to each other
    assert torch.equal(sized_kernels.run(*inputs), expected)
    assert len(cache.kernels) == 1
