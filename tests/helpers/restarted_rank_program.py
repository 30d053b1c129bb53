"""Program for torchrun on two hosts: rank 1 exits in the first attempt, the second one succeeds.

The argument is a file that rank 1 creates before it exits, by which the second attempt is
recognized. TORCHELASTIC_RESTART_COUNT does not distinguish the attempts, because an agent that
restarts its rank after a failure on the other host does not increase the count.
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
marker = Path(sys.argv[1])
if rank == 1 and not marker.exists():
    marker.touch()
    os._exit(9)
dist.barrier()  # rank 1 does not reach this barrier in the first attempt
exact = layer.exact()[layer.rows(rank)]
assert (out.double() - exact).abs().max() < 1e-4
sys.stdout.write(f"rank {rank} is right\n")
