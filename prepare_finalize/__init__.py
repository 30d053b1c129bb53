"""PrepareAndFinalize parts: quantise and dispatch, then combine. One scheme or vendor a file."""

from prepare_finalize.batched import BatchedPrepareAndFinalize
from prepare_finalize.no_ep import MoEPrepareAndFinalizeNoEP

COMPONENTS = (MoEPrepareAndFinalizeNoEP, BatchedPrepareAndFinalize)

__all__ = [
    "COMPONENTS",
    "BatchedPrepareAndFinalize",
    "MoEPrepareAndFinalizeNoEP",
]
