"""What torchrun starts on each of two hosts: a layer over the ranks, whose rank 1 dies in the first
try. The second try is right, and rank 0 says so."""

import os
import sys

import torch
import torch.distributed as dist
from ep_layers import ALL2ALL, Layer, call_layer

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
layer = Layer(ALL2ALL, (4, 3))
out, _ = call_layer(rank, 2, dist.group.WORLD, layer)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":  # noqa: TID251  torchrun's own
    if rank == 1:
        os._exit(9)
    dist.barrier()  # which rank 1 does not reach
exact = layer.exact()[layer.rows(rank)]
assert (out.double() - exact).abs().max() < 1e-4
sys.stdout.write(f"rank {rank} is right\n")
