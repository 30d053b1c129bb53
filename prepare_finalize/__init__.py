"""PrepareAndFinalize components: quantize and dispatch tokens, then combine expert outputs.

A fused MoE layer is composed of interchangeable components, called parts. The parts in `COMPONENTS`
move tokens to the ranks of their experts and back. There is one package per transport: `local` (a
single rank), `collectives` (torch.distributed), `symm_mem` (torch's symmetric memory),
`host_then_rank` (torch.distributed between hosts, symmetric memory inside a host), `deepep`,
`flashinfer` and `pplx`. `common` has the code that they share, and `rendezvous` connects the ranks.

A manager (`TorchGroup`, `SymmetricGroup`, `DeepEPGroup` and others) owns the connections and
buffers of a process group for one transport. The parts of many layers can share it. The methods of
`TorchGroup` return an `Exchange`, a collective in flight.
"""

from modular_kernel.compatibility.support import PlannedPart
from prepare_finalize.collectives.all_gather import AllGatherReduceScatterPrepareAndFinalize
from prepare_finalize.collectives.all_to_all import TorchAll2AllPrepareAndFinalize
from prepare_finalize.collectives.all_to_all_batched import TorchAll2AllBatchedPrepareAndFinalize
from prepare_finalize.collectives.replicated import ReplicatedEPPrepareAndFinalize
from prepare_finalize.common.torch_group import Exchange, TorchGroup
from prepare_finalize.deepep.group import DeepEPGroup
from prepare_finalize.deepep.high_throughput import DeepEPHTPrepareAndFinalize
from prepare_finalize.deepep.low_latency import DeepEPLLPrepareAndFinalize
from prepare_finalize.deepep.v2 import DeepEPV2PrepareAndFinalize
from prepare_finalize.flashinfer.group import FlashInferGroup
from prepare_finalize.flashinfer.part import FlashInferCutlassMoEPrepareAndFinalize
from prepare_finalize.host_then_rank.group import HostThenRankGroup
from prepare_finalize.host_then_rank.part import HostThenRankPrepareAndFinalize
from prepare_finalize.local.batched import BatchedPrepareAndFinalize
from prepare_finalize.local.no_ep import MoEPrepareAndFinalizeNoEP
from prepare_finalize.pplx.part import PplxPrepareAndFinalize
from prepare_finalize.symm_mem.group import SymmetricGroup
from prepare_finalize.symm_mem.part import SymmMemPrepareAndFinalize

COMPONENTS = (
    MoEPrepareAndFinalizeNoEP,
    BatchedPrepareAndFinalize,
    ReplicatedEPPrepareAndFinalize,
    AllGatherReduceScatterPrepareAndFinalize,
    TorchAll2AllPrepareAndFinalize,
    SymmMemPrepareAndFinalize,
    HostThenRankPrepareAndFinalize,
    TorchAll2AllBatchedPrepareAndFinalize,
    PplxPrepareAndFinalize,
    DeepEPHTPrepareAndFinalize,
    DeepEPLLPrepareAndFinalize,
    DeepEPV2PrepareAndFinalize,
    FlashInferCutlassMoEPrepareAndFinalize,
)

# Parts that `mk list` shows although they are not implemented.
PLANNED: tuple[PlannedPart, ...] = ()

__all__ = [
    "COMPONENTS",
    "PLANNED",
    "AllGatherReduceScatterPrepareAndFinalize",
    "BatchedPrepareAndFinalize",
    "DeepEPGroup",
    "DeepEPHTPrepareAndFinalize",
    "DeepEPLLPrepareAndFinalize",
    "DeepEPV2PrepareAndFinalize",
    "Exchange",
    "FlashInferCutlassMoEPrepareAndFinalize",
    "FlashInferGroup",
    "HostThenRankGroup",
    "HostThenRankPrepareAndFinalize",
    "MoEPrepareAndFinalizeNoEP",
    "PplxPrepareAndFinalize",
    "ReplicatedEPPrepareAndFinalize",
    "SymmMemPrepareAndFinalize",
    "SymmetricGroup",
    "TorchAll2AllBatchedPrepareAndFinalize",
    "TorchAll2AllPrepareAndFinalize",
    "TorchGroup",
]
