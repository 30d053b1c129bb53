"""A small base layer, two adapters for the layer, and a batch of sequences."""

from typing import Any

import torch

from modular_kernel.layers.fused_moe import FusedMoE
from modular_kernel.layers.lora import ForwardBatch, FusedMoEWithLoRA, LoRAManager, MoELoRALayer
from modular_kernel.spec.lora import Adapter
from modular_kernel.spec.router import RouterSpec

E, K, H, I, MAX_RANK = 6, 2, 32, 24, 5  # noqa: E741
STARTS = torch.tensor([0, 4, 9, 12])
NAMES = ("a13", "b13", "a2", "b2")
FLOATS: dict[str, Any] = {"params_dtype": torch.float32}


def make_base_layer(**options: Any) -> FusedMoE:
    """Return a layer of three of the E experts per token, with random weights."""
    layer = FusedMoE(E, H, I, 3, router=RouterSpec(K, renormalize=True), **{**FLOATS, **options})
    return fill_parameters(layer)


def fill_parameters(layer: FusedMoE, seed: int = 0) -> FusedMoE:
    """Set all parameters to random values."""
    g = torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=g) / 6)
    return layer


def make_adapter(
    rank: int, seed: int, *, num_a13: int = 1, experts: int = E, inner: int = I
) -> Adapter:
    """Return a random adapter.

    num_a13: number of matrices A for w13, 1 if gate and up share one.
    """
    g = torch.Generator().manual_seed(seed)
    shapes = (num_a13 * rank, H), (2 * inner, rank), (rank, inner), (H, rank)
    matrices = (torch.randn(experts, *shape, generator=g) / shape[1] ** 0.5 for shape in shapes)
    return Adapter(*matrices)


def make_call() -> tuple[torch.Tensor, torch.Tensor]:
    """Return x and router logits of 12 tokens."""
    g = torch.Generator().manual_seed(9)
    return torch.randn(12, H, generator=g), torch.randn(12, E, generator=g)


def add_adapters(layer: FusedMoE, mode: Any, num_a13: int) -> tuple[FusedMoEWithLoRA, LoRAManager]:
    """Add adapter "a" of rank 3 and scaling 2, and adapter "b" of rank 5 and scaling 0.5."""
    lora = f"adapters=3,rank={MAX_RANK}" + ",a13=shared" * (num_a13 == 1)
    manager = LoRAManager(layer.problem, lora, [3], mode=mode)
    for name, rank, scaling in (("a", 3, 2.0), ("b", 5, 0.5)):
        lora_layer = MoELoRALayer(make_adapter(rank, rank, num_a13=num_a13), scaling)
        manager.load(name, {3: lora_layer})
    return FusedMoEWithLoRA(layer, manager), manager


BATCH = ForwardBatch(("b", None, "a"), STARTS)
