"""Memory that processes of one machine share, for ranks on a CPU."""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from prepare_finalize.all2all.connect import tell_all

_IN_MEMORY = Path("/dev/shm")


def share_file(
    store: Store, group: dist.ProcessGroup, nbytes: int, value: int, deadline_s: float
) -> list[torch.Tensor]:
    """A block of each rank, (nbytes,) uint8 filled with `value`, mapped here; by rank. Collective.

    The files are gone when this returns; the memory lives as long as the tensors.
    """
    folder = _IN_MEMORY if _IN_MEMORY.is_dir() else Path(tempfile.gettempdir())
    descriptor, name = tempfile.mkstemp(prefix="modular_kernel-", dir=folder)
    try:
        os.truncate(descriptor, nbytes)
        _mapped(name, nbytes).fill_(value)
        names = tell_all(store, group, "files", name, deadline_s)
        blocks = [_mapped(each, nbytes) for each in names]
        tell_all(store, group, "mapped", "", deadline_s)
        return blocks
    finally:
        os.close(descriptor)
        Path(name).unlink()


def _mapped(name: str, nbytes: int) -> torch.Tensor:
    return torch.from_file(name, shared=True, size=nbytes, dtype=torch.uint8)
