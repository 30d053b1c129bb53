"""Sizes of the tensors that `kernel.prepare_weights` adds, as declared by the experts."""

from collections.abc import Mapping
from contextlib import nullcontext

from modular_kernel.catalog import load_catalog
from modular_kernel.contracts import PermuteExpertsUnpermute
from modular_kernel.errors import ConfigurationError
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.workspace import BufferSpec


def prepared_specs_of(
    experts: str, problem: Problem, machine: Machine | None = None
) -> Mapping[str, BufferSpec]:
    """Return the specs of the prepared tensors of one rank, by field of ExpertWeights.

    The result is {} if the experts part prepares nothing for such weights.

    experts: name of the part. machine: where it would run; None uses this machine. Raises
    ConfigurationError if the part may prepare weights, but its packages are missing.
    """
    part = load_catalog().experts(experts)
    if part.prepared_specs is PermuteExpertsUnpermute.prepared_specs:
        return {}
    with nullcontext() if machine is None else part.described(machine):
        try:
            return part(problem).prepared_specs()
        except ImportError as error:
            need = "the packages of this part"
            raise ConfigurationError(f"what {experts} prepares", got=error, need=need) from error


def prepared_tensor_bytes(experts: str, problem: Problem, machine: Machine | None = None) -> int:
    """Return the bytes of the prepared tensors. For the arguments, see `prepared_specs_of`."""
    return sum(spec.nbytes for spec in prepared_specs_of(experts, problem, machine).values())
