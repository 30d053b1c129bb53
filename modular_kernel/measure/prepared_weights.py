"""Sizes of prepared weights, as declared by the experts class.

Prepared weights are copies of 4-bit weights in a layout for faster kernels, which
`kernel.prepare_weights` creates. An experts class is one of the interchangeable parts of a layer.
"""

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
    """Return the shapes and dtypes of the prepared tensors of one rank, by field of ExpertWeights.

    The result is {} if the part does not prepare weights of this problem.

    experts: name of the experts part.
    machine: the machine that the part would run on. None means this machine.

    Raises ConfigurationError if the part may prepare weights, but its packages are not installed.
    """
    part = load_catalog().experts(experts)
    if part.prepared_specs is PermuteExpertsUnpermute.prepared_specs:
        return {}
    with nullcontext() if machine is None else part.described(machine):
        try:
            return part(problem).prepared_specs()
        except ImportError as error:
            need = "the packages of this part"
            raise ConfigurationError(
                f"prepared weights of {experts}", got=error, need=need
            ) from error


def prepared_tensor_bytes(experts: str, problem: Problem, machine: Machine | None = None) -> int:
    """Return the bytes of the prepared tensors of one rank (`prepared_specs_of`)."""
    return sum(spec.nbytes for spec in prepared_specs_of(experts, problem, machine).values())
