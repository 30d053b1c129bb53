"""Factories for small valid problems, inputs, kernels, layers and adapters, for fuzz targets.

They are for targets that vary something other than the problem, for example memory or threads.
`random_problems` draws random problems.
"""

from typing import Any

import torch

from modular_kernel.catalog import make_kernel
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights
from modular_kernel.testing.stress.fuzz.independent_reference import IndependentReference
from modular_kernel.testing.stress.fuzz.random_problems import (
    CallInputs,
    InputChoices,
    make_inputs,
)
from modular_kernel.testing.stress.fuzz.target import import_object

E, H, I, K, T = 4, 32, 24, 2, 5  # noqa: E741 (the shape legend's names)
PROBLEM = Problem(T, H, I, E, K, dtype=torch.float32)
STANDARD_PAIR = ("MoEPrepareAndFinalizeNoEP", "TorchExperts")
BATCHED_PAIR = ("BatchedPrepareAndFinalize", "NaiveBatchedExperts")
LORA_OPTIONS = "adapters=3,rank=4"


def draw_floats(*shape: int, seed: int = 0) -> torch.Tensor:
    """Draw random float32 values with a standard deviation of 1/4."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / 4


def make_call_inputs(seed: int = 0, problem: Problem = PROBLEM) -> CallInputs:
    """Make the inputs of a call."""
    return make_inputs(problem, InputChoices(seed=seed))


def make_torch_kernel(
    problem: Problem = PROBLEM, pair: tuple[str, str] = STANDARD_PAIR
) -> FusedMoEModularKernel:
    """Make a kernel from pure PyTorch parts."""
    return make_kernel(*pair, problem)


def find_output_mismatch(result: Any, arguments: CallInputs, problem: Problem = PROBLEM) -> str:
    """Describe how a result differs from the expected output of a call; "" if it does not."""
    if not isinstance(result, torch.Tensor):
        return f"a {type(result).__name__}"
    reference = IndependentReference(problem, arguments.x_TH, arguments.weights, arguments.routing)
    return reference.find_mismatch(result)


def make_router_spec(top_k: int = K, **options: Any) -> Any:
    """Make a RouterSpec with the given options."""
    return import_object("modular_kernel.spec.router:RouterSpec")(top_k, **options)


def make_fused_moe(**options: Any) -> Any:
    """Make a FusedMoE without weights and, by default, without a router."""
    defaults: dict[str, Any] = {"top_k": K, "params_dtype": torch.float32}
    make = import_object("modular_kernel.layers.fused_moe:FusedMoE")
    return make(E, H, I, 3, **(defaults | options))


def make_loaded_layer(weights: ExpertWeights | None = None, **options: Any) -> Any:
    """Make a FusedMoE with weights; None means the weights of `make_call_inputs`."""
    layer = make_fused_moe(**options)
    layer.set_weights(make_call_inputs().weights if weights is None else weights)
    return layer


def make_adapter(rank: int, seed: int) -> Any:
    """Make a LoRA adapter with separate A matrices for the gate and up projections."""
    shapes = (E, 2 * rank, H), (E, 2 * I, rank), (E, rank, I), (E, H, rank)
    make = import_object("modular_kernel.spec.lora:Adapter")
    return make(*(draw_floats(*shape, seed=seed + n) for n, shape in enumerate(shapes)))
