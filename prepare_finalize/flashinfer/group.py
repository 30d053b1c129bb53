"""FlashInferGroup: what the layers over FlashInfer's all-to-all keep for one process group.

    manager = FlashInferGroup(group)           # collective, as all that follows
    kernel = make_kernel("FlashInferCutlassMoEPrepareAndFinalize", "TritonExperts", problem,
                         group=manager)
    ...
    manager.destroy()

Layers of one shape share its workspaces, which are large: a model has one manager, not one a layer.
"""

from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from modular_kernel.errors import DeviceError
from prepare_finalize.common.exchanges import Exchange, ExchangeManager
from prepare_finalize.common.torch_group import in_short
from prepare_finalize.flashinfer.library import load

_FAILURES = (RuntimeError, AssertionError, ImportError, OSError, ValueError)
_UNIT = 128  # bytes
_serials = count(1)


@dataclass(frozen=True)
class AlltoAllShape:
    """What one MoeAlltoAll is made for; the same on every rank.

    max_tokens: T of one rank at most, above 0. numbers: experts that the library is told of.
    dispatch_bytes, combine_bytes: of one token's payloads, there and back.
    """

    max_tokens: int
    numbers: int
    top_k: int
    dispatch_bytes: int
    combine_bytes: int


FlashInferExchange = Exchange[AlltoAllShape]


class FlashInferGroup(ExchangeManager[AlltoAllShape]):
    """Workspaces of FlashInfer's all-to-all for the ranks of one process group, on one host.

    group: a ProcessGroup that can gather objects (NCCL or gloo), None for the default one; by it
    the library exchanges handles of memory. in_flight: how many calls of one shape may be between
    dispatch and combine; each takes a workspace, made at the first need. deadline_s: for whatever
    ranks do together here before the library is called; None: MK_DEADLINE_S, or 10 s. The library
    itself waits on the GPU for its peers, and stops the device's work for good after some 300 s.
    library: what to use instead of flashinfer.comm.

    ConfigurationError where the library is missing. CommunicationError where a rank stays away, or
    ranks mean different things.
    """

    package = "FlashInfer"
    beside = "/flashinfer"
    load_library = staticmethod(load)
    device = "cuda"

    def _met(self) -> None:
        self.agree({"in_flight": self.in_flight})

    def check_device(self, device: torch.device | str) -> None:
        """DeviceError unless tensors on `device` can be exchanged: on this process's GPU."""
        given = torch.device(device)
        here = None if self.device == "cpu" else torch.cuda.current_device()
        if given.type != self.device or given.index not in (None, here):
            need = f"{self.device}, the process's current one: the workspaces are there"
            raise DeviceError("tensors of an exchange", got=given, need=need)

    def _free(self, exchange: FlashInferExchange) -> None:
        # The library keeps workspaces for the life of the process, and has no other word to let go
        # of one.
        exchange.all_to_all._reset_workspace()

    def _make(self, shape: AlltoAllShape) -> FlashInferExchange:
        """One more workspace of a shape, on all ranks."""
        library, made = self._library, self._exchanges[shape]
        self._meeting.agree({"workspaces": len(made) + 1, "shape": shape})
        try:
            nbytes = library.moe_a2a_get_workspace_size_per_rank(
                self.world_size, shape.max_tokens, shape.dispatch_bytes, shape.combine_bytes
            )
            all_to_all = library.MoeAlltoAll(
                library.Mapping(
                    world_size=self.world_size,
                    rank=self.rank,
                    gpus_per_node=self.world_size,
                    tp_size=self.world_size,
                    moe_ep_size=self.world_size,
                    moe_tp_size=1,
                ),
                max_num_tokens=shape.max_tokens,
                top_k=shape.top_k,
                num_experts=shape.numbers,
                workspace_size_per_rank=nbytes + self._apart(),
                mnnvl_config=library.MnnvlConfig(comm_backend=self._communicator()),
            )
        except _FAILURES as error:
            got = in_short(RuntimeError(str(error).strip() or type(error).__name__))
            raise self._error(got, "FlashInfer to share its workspaces") from error
        made.append(FlashInferExchange(all_to_all, shape))
        return made[-1]

    def _apart(self) -> int:
        """Return bytes that no other workspace of these ranks' processes has more than it needs.

        The library takes workspaces of one size for one, whatever their groups and their calls.
        """
        told = self._meeting.tell({"serial": next(_serials)})
        serial = max(int(facts["serial"]) for facts in told)
        while next(_serials) <= serial:
            pass
        return serial * _UNIT

    def _communicator(self) -> Any:
        """Return the library's view of the group, of which it is to use the whole."""

        class Whole(self._library.TorchDistBackend):  # type: ignore[misc, name-defined]
            def Split(self, color: int, key: int) -> "Whole":
                return self

        return Whole(self._group)
