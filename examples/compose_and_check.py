"""Compose a layer from two parts, call it, and compare its output with another pairing.

    python examples/compose_and_check.py

Runs on a GPU if there is one, and otherwise on the CPU.
"""

import torch

import modular_kernel as mk

TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 16, 64, 96, 8, 2


def main() -> None:
    torch.manual_seed(0)
    torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
    problem = mk.Problem(
        tokens=TOKENS,  # maximum number of tokens per call
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
        experts=EXPERTS,
        top_k=TOP_K,
        dtype=torch.float32,
    )
    weights = mk.ExpertWeights(
        # (E, 2I, H): the rows of the gate projection, then the rows of the up projection
        w1=torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN) / HIDDEN**0.5,
        w2=torch.randn(EXPERTS, HIDDEN, INTERMEDIATE) / INTERMEDIATE**0.5,
    )
    x_TH = torch.randn(TOKENS, HIDDEN)
    topk_logits_TK, topk_ids_TK = torch.randn(TOKENS, EXPERTS).topk(TOP_K)
    routing = mk.Routing(topk_logits_TK.softmax(-1), topk_ids_TK)

    kernel = mk.make_kernel("MoEPrepareAndFinalizeNoEP", "TorchExperts", problem)
    y_TH = kernel(x_TH, weights, routing)
    print(f"{kernel.pairing}: {tuple(y_TH.shape)}")

    other_kernel = mk.make_kernel("BatchedPrepareAndFinalize", "NaiveBatchedExperts", problem)
    other_y_TH = other_kernel(x_TH, weights, routing)
    torch.testing.assert_close(other_y_TH, y_TH, rtol=1e-4, atol=1e-4)
    print(f"{other_kernel.pairing}: the same output within 1e-4")

    plan = kernel.plan()  # allocates all buffers once
    assert torch.equal(plan(x_TH, weights, routing), y_TH)
    print(f"plan: bitwise the same output, {plan.nbytes} bytes of buffers")


if __name__ == "__main__":
    main()
