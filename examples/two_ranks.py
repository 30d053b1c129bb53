"""Run a layer on two expert-parallel ranks, and compare its output with the output on one rank.

    python examples/two_ranks.py

Uses NCCL if there are two GPUs, and otherwise gloo on the CPU.
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing

import modular_kernel as mk
from modular_kernel.catalog import this_machine

RANKS, TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 2, 6, 32, 48, 8, 2


def make_inputs(device: torch.device) -> tuple[mk.ExpertWeights, torch.Tensor, mk.Routing]:
    """Return random weights of all experts, and the tokens and routing of both ranks.

    Both ranks get the same values.
    """
    generator = torch.Generator().manual_seed(0)
    randn = lambda *shape: torch.randn(*shape, generator=generator).to(device)  # noqa: E731
    # (E, 2I, H): the rows of the gate projection, then the rows of the up projection
    w1 = randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN) / HIDDEN**0.5
    w2 = randn(EXPERTS, HIDDEN, INTERMEDIATE) / INTERMEDIATE**0.5
    x_TH = randn(RANKS * TOKENS, HIDDEN)
    topk_logits_TK, topk_ids_TK = randn(RANKS * TOKENS, EXPERTS).topk(TOP_K)
    return mk.ExpertWeights(w1, w2), x_TH, mk.Routing(topk_logits_TK.softmax(-1), topk_ids_TK)


def run(rank: int, store_path: str) -> None:
    """Run one rank, with half of the experts and half of the tokens."""
    torch.set_num_threads(1)
    use_gpus = torch.cuda.device_count() >= RANKS
    device = torch.device("cuda", rank) if use_gpus else torch.device("cpu")
    if use_gpus:
        torch.cuda.set_device(device)
    backend = "nccl" if use_gpus else "gloo"
    # By default, this_machine describes a GPU even if there is only one.
    machine = this_machine(device="cuda" if use_gpus else "cpu")
    dist.init_process_group(backend, f"file://{store_path}", rank=rank, world_size=RANKS)

    weights, x_TH, routing = make_inputs(device)
    global_problem = mk.Problem(
        tokens=RANKS * TOKENS,
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
        experts=EXPERTS,
        top_k=TOP_K,
        dtype=torch.float32,
    )
    reference_kernel = mk.make_kernel(
        "MoEPrepareAndFinalizeNoEP", "TorchExperts", global_problem, machine=machine
    )
    expected_TH = reference_kernel(x_TH, weights, routing)

    problem = mk.Problem(
        tokens=TOKENS,  # maximum number of tokens per rank and call
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
        experts=EXPERTS,  # number of experts on all ranks
        top_k=TOP_K,
        dtype=torch.float32,
        parallel=mk.Parallel(world_size=RANKS, placement="linear", rank=rank),
    )
    kernel = mk.make_kernel(
        "TorchAll2AllPrepareAndFinalize",
        "TorchExperts",
        problem,
        machine=machine,
        group=dist.group.WORLD,
    )
    local_experts = slice(rank * EXPERTS // RANKS, (rank + 1) * EXPERTS // RANKS)
    local_tokens = slice(rank * TOKENS, (rank + 1) * TOKENS)
    y_TH = kernel(
        x_TH[local_tokens],
        mk.ExpertWeights(w1=weights.w1[local_experts], w2=weights.w2[local_experts]),
        mk.Routing(
            routing.topk_weights_TK[local_tokens], routing.topk_ids_TK[local_tokens]
        ),  # global expert ids
    )
    torch.testing.assert_close(y_TH, expected_TH[local_tokens], rtol=1e-4, atol=1e-4)
    shape = tuple(y_TH.shape)
    print(f"rank {rank} of {RANKS} over {backend}: {shape}, the same as on one rank", flush=True)

    kernel.prepare_finalize.destroy()  # a collective operation: all ranks must call it
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        store_path = str(Path(folder) / "store")
        multiprocessing.spawn(run, args=(store_path,), nprocs=RANKS)
