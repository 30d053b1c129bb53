"""Run a layer with a router on two expert-parallel ranks, and balance the load of the ranks.

    python examples/layer_over_ranks.py

Both ranks are simulated in this process. Each has half of the experts and returns a partial output.
The sum of the partial outputs is the output of the layer.
"""

import torch

import modular_kernel as mk
from modular_kernel.layers.balance import count, rank_loads, rebalance
from modular_kernel.layers.fused_moe import FusedMoE
from modular_kernel.layers.parallel import LayerParallel
from modular_kernel.layers.router import RouterSpec, select_experts
from modular_kernel.spec.placement import Placement

TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, RANKS = 64, 64, 96, 8, 2
ROUTER = RouterSpec(2, "sigmoid", renormalize=True)


def main() -> None:
    """Compare the output of two ranks with that of one rank, before and after balancing."""
    torch.manual_seed(0)
    torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
    w1 = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN) / HIDDEN**0.5
    w2 = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE) / INTERMEDIATE**0.5
    x_TH = torch.randn(TOKENS, HIDDEN)
    logits = torch.randn(TOKENS, EXPERTS) - 2 * torch.arange(EXPERTS)  # favors the first experts

    def make_layer(rank: int, ranks: int, placement: Placement) -> FusedMoE:
        layer = FusedMoE(
            EXPERTS,
            HIDDEN,
            INTERMEDIATE,
            params_dtype=torch.float32,
            router=ROUTER,
            parallel=LayerParallel(ep=(rank, ranks)),
            placement=placement,
        )
        local_experts = list(placement.slots[rank])
        layer.set_weights(mk.ExpertWeights(w1[local_experts], w2[local_experts]))
        return layer

    expected_TH = make_layer(0, 1, Placement.linear(EXPERTS, 1))(x_TH, logits)
    linear = Placement.linear(EXPERTS, RANKS)
    # The number of (token, expert) pairs of each expert.
    expert_loads = count(select_experts(logits, ROUTER).topk_ids, EXPERTS).tolist()
    balanced = rebalance(expert_loads, [4, 4], linear)  # four experts on each rank
    for name, placement in (("linear", linear), ("balanced", balanced)):
        partial_outputs = [
            make_layer(rank, RANKS, placement)(x_TH, logits) for rank in range(RANKS)
        ]
        torch.testing.assert_close(sum(partial_outputs), expected_TH, rtol=1e-4, atol=1e-4)
        loads = rank_loads(expert_loads, placement)
        print(f"{name}: experts {placement.slots}, load of ranks {loads}")
    print("outputs: the same as on one rank, within 1e-4")


if __name__ == "__main__":
    main()
