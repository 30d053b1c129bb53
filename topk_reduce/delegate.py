"""Marker for experts that leave the choice of the reducer to the PrepareAndFinalize."""

import torch

from modular_kernel.contracts import TopKWeightAndReduce
from modular_kernel.errors import UnsupportedError
from modular_kernel.spec.problem import Reduce
from modular_kernel.tensors import ExpertRows


class TopKWeightAndReduceDelegate(TopKWeightAndReduce):
    """Marker that a PrepareAndFinalize replaces with its own reducer."""

    kind = Reduce.DELEGATE

    def apply(self, rows: ExpertRows, out: torch.Tensor) -> None:
        """Raise UnsupportedError: a delegate cannot reduce."""
        need = "the PrepareAndFinalize to substitute its own reducer"
        raise UnsupportedError("TopKWeightAndReduceDelegate.apply", got="a call", need=need)
