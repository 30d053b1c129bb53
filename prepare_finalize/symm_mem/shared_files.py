"""Memory that the ranks of one machine share through files, for ranks on a CPU.

This memory replaces symmetric memory when Triton's interpreter runs the kernels of `symm_mem`.
"""

from collections.abc import Sequence

import torch

from modular_kernel.interpreter.bounds import allow_access
from prepare_finalize.rendezvous.memory_files import memory_file
from prepare_finalize.rendezvous.store_collectives import StoreCollectives


def share_memory(
    collectives: StoreCollectives,
    rank: int,
    nbytes: int,
    value: int,
    ranks: Sequence[int] | None = None,
) -> list[torch.Tensor]:
    """Return a block of memory of each rank, (nbytes,) uint8 filled with `value`. Collective.

    The files are deleted before the function returns. The memory is freed with the tensors.

    ranks: ranks on this host whose blocks are returned, in this order; None means all ranks.
    """
    with memory_file("block") as file:
        file.truncate(nbytes)
        local_block = _map_file(file.name, nbytes).fill_(value)
        file_names = [
            properties["file"] for properties in collectives.all_gather({"file": file.name})
        ]
        blocks = [
            local_block if index == rank else _map_file(file_names[index], nbytes)
            for index in (range(len(file_names)) if ranks is None else ranks)
        ]
        collectives.barrier()  # the files may be deleted once all ranks have mapped them
    return blocks


def _map_file(name: str, nbytes: int) -> torch.Tensor:
    block = torch.from_file(name, shared=True, size=nbytes, dtype=torch.uint8, device="cpu")
    allow_access(block)
    return block
