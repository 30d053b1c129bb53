"""What torchrun starts on each of two hosts: a layer over the ranks, whose rank 1 dies in the first
try. The second try is right, and each rank says so.

The argument is a file that is there once a rank has died. An agent that starts its rank anew
because the other one asks for it does not count that: TORCHELASTIC_RESTART_COUNT may differ.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from ep_layers import ALL2ALL, Layer, call_layer

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
layer = Layer(ALL2ALL, (4, 3))
out, _ = call_layer(rank, 2, dist.group.WORLD, layer)
died = Path(sys.argv[1])
if rank == 1 and not died.exists():
    died.touch()
    os._exit(9)
dist.barrier()  # which rank 1 does not reach in the first try
exact = layer.exact()[layer.rows(rank)]
assert (out.double() - exact).abs().max() < 1e-4
sys.stdout.write(f"rank {rank} is right\n")
