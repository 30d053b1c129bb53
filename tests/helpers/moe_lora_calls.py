"""Calls of run_moe_lora, and float64 loops as their reference."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from modular_kernel.machine import prefer_torch_reference
from modular_kernel.ops.moe_lora import BUFFERS, MoELoRABatchInfo, run_moe_lora
from modular_kernel.ops.moe_lora_stages import PairBatch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
STRATEGIES = ("staged", "fused", "auto")


@dataclass(frozen=True)
class Sizes:
    """Sizes of a call: T, H, I, E, K, the number of adapter slots, and the largest LoRA rank."""

    tokens: int = 21
    hidden: int = 72
    intermediate: int = 40
    experts: int = 5
    top_k: int = 3
    slots: int = 4
    rank: int = 20


@dataclass
class Call:
    """The arguments of one call of `run_moe_lora`."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    info: MoELoRABatchInfo
    buffers: list[torch.Tensor]
    output: torch.Tensor

    def run(self, strategy: Any = "auto") -> torch.Tensor:
        out = self.output.clone()
        result = run_moe_lora(
            self.x, self.ids, self.weights, self.info, *self.buffers, out, strategy=strategy
        )
        assert result is out
        return out


def make_call(sizes: Sizes = Sizes(), dtype: torch.dtype = torch.float32, seed: int = 0) -> Call:
    """Draw a call with adapters of ranks 3, 7, R and 0. In slot 0, the rank differs by expert.

    Some pairs are skipped, and some tokens have no adapter. Values that must not be read are NaN:
    elements beyond an adapter's rank, and router weights of skipped pairs.
    """
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(sizes.tokens, sizes.hidden, generator=g)
    ids = torch.randint(
        -1, sizes.experts, (sizes.tokens, sizes.top_k), generator=g, dtype=torch.int32
    )
    weights = torch.rand(sizes.tokens, sizes.top_k, generator=g)
    slots = torch.randint(-1, sizes.slots, (sizes.tokens,), generator=g, dtype=torch.int32)
    ranks = torch.tensor([3, 7, sizes.rank, 0])[torch.arange(sizes.slots) % 4].clamp(max=sizes.rank)
    ranks_LE = ranks[:, None].repeat(1, sizes.experts)
    ranks_LE[0] = (torch.arange(sizes.experts) + 1).clamp(max=sizes.rank)
    scalings = torch.rand(sizes.slots, generator=g) + 0.5
    shapes = (
        (sizes.rank, sizes.hidden),
        (2 * sizes.intermediate, sizes.rank),
        (sizes.rank, sizes.intermediate),
        (sizes.hidden, sizes.rank),
    )
    buffers = []
    for name, (rows, columns) in zip(BUFFERS, shapes, strict=True):
        depth = (
            sizes.hidden if name == "gate_up_a" else sizes.intermediate if name == "down_a" else 4
        )
        matrices = torch.randn(sizes.slots, sizes.experts, rows, columns, generator=g) / depth**0.5
        is_beyond_rank = torch.arange(sizes.rank) >= ranks_LE[..., None]
        is_beyond_rank = (
            is_beyond_rank[..., None] if name.endswith("_a") else is_beyond_rank[:, :, None]
        )
        buffers.append(matrices.masked_fill(is_beyond_rank, torch.nan).to(dtype))
    weights = weights.masked_fill(ids < 0, torch.nan)
    info = MoELoRABatchInfo(slots, ranks_LE, scalings)
    output = torch.randn(sizes.tokens, sizes.hidden, generator=g)
    call = Call(x.to(dtype), ids, weights, info, buffers, output.to(dtype))
    return move_to_device(call)


def move_to_device(call: Call) -> Call:
    info = MoELoRABatchInfo(*(
        None if tensor is None else tensor.to(DEVICE) for tensor in vars(call.info).values()
    ))  # fmt: skip
    return Call(
        call.x.to(DEVICE), call.ids.to(DEVICE), call.weights.to(DEVICE), info,
        [tensor.to(DEVICE) for tensor in call.buffers], call.output.to(DEVICE),
    )  # fmt: skip


def expected_outputs(call: Call, *, rounded: bool = True) -> dict[str, torch.Tensor]:
    """Compute u, h, v and the output pair by pair in float64, each rounded to the call's dtype."""
    dtype = call.x.dtype if rounded else torch.float64
    tokens, top_k = call.ids.shape
    a13, b13, a2, b2 = (buffer.double() for buffer in call.buffers)
    rank, intermediate = a13.shape[2], a2.shape[3]
    out = call.output.double().clone()
    sizes = {"u": rank, "h": intermediate, "v": rank}
    results = {name: torch.zeros(tokens, top_k, n).double().to(DEVICE) for name, n in sizes.items()}
    slots = call.info.slots_of(tokens)
    for t in range(tokens):
        slot = int(slots[t])
        for k in range(top_k):
            e = int(call.ids[t, k])
            if not (0 <= slot < len(a13) and 0 <= e < a13.shape[1]):
                continue
            ranks = call.info.lora_ranks
            r = max(int(ranks[slot] if ranks.dim() == 1 else ranks[slot, e]), 0)
            u = (a13[slot, e, :r] @ call.x[t].double()).to(dtype).double()
            gate_up = b13[slot, e, :, :r] @ u
            gate, up = gate_up[:intermediate], gate_up[intermediate:]
            h = (torch.nn.functional.silu(gate) * up).to(dtype).double()
            v = (a2[slot, e, :r] @ h).to(dtype).double()
            results["u"][t, k, : len(u)], results["h"][t, k], results["v"][t, k, : len(v)] = u, h, v
            if r:
                factor = float(call.weights[t, k]) * float(call.info.scalings[slot])
                out[t] += factor * (b2[slot, e, :, :r] @ v)
    return results | {"out": out}


def assert_close(actual: torch.Tensor, expected: torch.Tensor, depth: int = 0) -> None:
    """Assert that the relative error in norm is within a bound for the dtype of `actual`.

    depth: length of the longest sum. The float32 error is about `eps * sqrt(depth)`.
    """
    float32_bound = max(2e-6, 6e-8 * depth**0.5)
    bounds = {torch.float32: float32_bound, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
    error = (actual.double() - expected).norm() / expected.norm().clamp(min=1e-30)
    assert float(error) <= bounds[actual.dtype]


def make_pair_batch(call: Call, *, grouped: bool) -> PairBatch:
    batch = PairBatch(call.ids, call.info.slots_of(len(call.x)), call.info.lora_ranks)
    return batch.group_by_key() if grouped else batch


def make_implementation_fixture() -> Any:
    """Return a fixture that runs tests marked WITH_KERNELS_AND_TORCH in both implementations."""

    @pytest.fixture(name="_implementation", params=["kernels", "torch"])
    def implementation(request: pytest.FixtureRequest) -> Any:
        with prefer_torch_reference(enabled=request.param == "torch"):
            yield

    return implementation


WITH_KERNELS_AND_TORCH = pytest.mark.usefixtures("_implementation")


def replace_ids(call: Call, ids: torch.Tensor) -> Call:
    return replace(call, ids=ids)


def replace_info(call: Call, **fields: Any) -> Call:
    """Replace fields of the batch info. Lists are converted to int32 tensors on the device."""
    tensors = {
        name: torch.tensor(value, dtype=torch.int32, device=DEVICE)
        if isinstance(value, list)
        else value
        for name, value in fields.items()
    }
    return replace(call, info=replace(call.info, **tensors))
