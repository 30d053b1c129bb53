"""Memory that processes of one machine share, for ranks on a CPU."""

from collections.abc import Sequence

import torch

from modular_kernel.interpreter.bounds import make_reachable
from prepare_finalize.rendezvous.memory_files import memory_file
from prepare_finalize.rendezvous.store_rounds import Meeting


def share_file(
    meeting: Meeting, rank: int, nbytes: int, value: int, ranks: Sequence[int] | None = None
) -> list[torch.Tensor]:
    """Share a block of each rank, (nbytes,) uint8 filled with `value`.

    Collective. The blocks of `ranks`, of this host, are mapped here and returned in their order;
    None: of every rank.

    The files are gone when this returns; the memory lives as long as the tensors.
    """
    with memory_file("block") as file:
        file.truncate(nbytes)
        own = _mapped(file.name, nbytes).fill_(value)
        names = [facts["file"] for facts in meeting.tell({"file": file.name})]
        blocks = [
            own if at == rank else _mapped(names[at], nbytes)
            for at in (range(len(names)) if ranks is None else ranks)
        ]
        meeting.tell({})  # all are mapped
    return blocks


def _mapped(name: str, nbytes: int) -> torch.Tensor:
    block = torch.from_file(name, shared=True, size=nbytes, dtype=torch.uint8)
    make_reachable(block)
    return block
