"""PrepareAndFinalize parts: quantise and dispatch, then combine. One scheme or vendor a file."""

from prepare_finalize.all_gather import AllGatherReduceScatterPrepareAndFinalize
from prepare_finalize.batched import BatchedPrepareAndFinalize
from prepare_finalize.deepep_ht import DeepEPHTPrepareAndFinalize
from prepare_finalize.deepep_ll import DeepEPLLPrepareAndFinalize
from prepare_finalize.deepep_v2 import DeepEPV2PrepareAndFinalize
from prepare_finalize.no_ep import MoEPrepareAndFinalizeNoEP
from prepare_finalize.pplx import PplxPrepareAndFinalize
from prepare_finalize.replicated_ep import ReplicatedEPPrepareAndFinalize
from prepare_finalize.symm_mem import SymmMemPrepareAndFinalize
from prepare_finalize.torch_all2all import TorchAll2AllPrepareAndFinalize
from prepare_finalize.torch_all2all_batched import TorchAll2AllBatchedPrepareAndFinalize

COMPONENTS = (
    MoEPrepareAndFinalizeNoEP,
    BatchedPrepareAndFinalize,
    ReplicatedEPPrepareAndFinalize,
    AllGatherReduceScatterPrepareAndFinalize,
    TorchAll2AllPrepareAndFinalize,
    SymmMemPrepareAndFinalize,
    TorchAll2AllBatchedPrepareAndFinalize,
    PplxPrepareAndFinalize,
    DeepEPHTPrepareAndFinalize,
    DeepEPLLPrepareAndFinalize,
    DeepEPV2PrepareAndFinalize,
)

__all__ = [
    "COMPONENTS",
    "AllGatherReduceScatterPrepareAndFinalize",
    "BatchedPrepareAndFinalize",
    "DeepEPHTPrepareAndFinalize",
    "DeepEPLLPrepareAndFinalize",
    "DeepEPV2PrepareAndFinalize",
    "MoEPrepareAndFinalizeNoEP",
    "PplxPrepareAndFinalize",
    "ReplicatedEPPrepareAndFinalize",
    "SymmMemPrepareAndFinalize",
    "TorchAll2AllBatchedPrepareAndFinalize",
    "TorchAll2AllPrepareAndFinalize",
]
