"""Inputs of `MoeRunner`, which a token dispatcher produces, and its outputs (combine inputs).

There are three formats: "standard" is (T, H) tokens with their routing; "deepep_normal" is received
rows with local ids; "deepep_ll" is received rows grouped by expert, with counts. The output has the
format of the input.
"""

from typing import Any, NamedTuple, TypeGuard

import torch

from modular_kernel.errors import ConfigurationError
from modular_kernel.spec.router import StandardTopKOutput, TritonKernelTopKOutput


class StandardDispatchOutput(NamedTuple):
    """Tokens (T, H) and their routing: a router's output, or (weights, ids), both (T, K)."""

    hidden_states: torch.Tensor
    topk_output: StandardTopKOutput | TritonKernelTopKOutput | tuple[torch.Tensor | None, ...]

    @property
    def format(self) -> str:
        """Name of the format."""
        return "standard"


class DeepEPNormalDispatchOutput(NamedTuple):
    """Rows (R, H) that this rank has received.

    hidden_states_scale: None for unquantized rows, else like `ContiguousTokens.scale`.
    topk_ids: (R, K) local ids, -1 for experts of other ranks. topk_weights: (R, K) float32.
    num_recv_tokens_per_expert: not used.
    """

    hidden_states: torch.Tensor
    hidden_states_scale: torch.Tensor | None
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    num_recv_tokens_per_expert: Any = None

    @property
    def format(self) -> str:
        """Name of the format."""
        return "deepep_normal"


class DeepEPLLDispatchOutput(NamedTuple):
    """Rows grouped by expert, (e, C, H).

    hidden_states_scale: None for unquantized rows, else like `BatchedTokens.scale`.
    topk_ids, topk_weights: (T, K) routing of this rank's tokens, returned for the combine.
    masked_m: (e,) int32, number of valid rows of each expert. expected_m: not used.
    """

    hidden_states: torch.Tensor
    hidden_states_scale: torch.Tensor | None
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    masked_m: torch.Tensor
    expected_m: int = 0

    @property
    def format(self) -> str:
        """Name of the format."""
        return "deepep_ll"


class StandardCombineInput(NamedTuple):
    """Weighted sums (T, H), or outputs (T, K, H) with no_combine: see `MoeRunnerConfig`."""

    hidden_states: torch.Tensor

    @property
    def format(self) -> str:
        """Name of the format."""
        return "standard"


class DeepEPNormalCombineInput(NamedTuple):
    """Rows (R, H), each the weighted sum over this rank's experts."""

    hidden_states: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor

    @property
    def format(self) -> str:
        """Name of the format."""
        return "deepep_normal"


class DeepEPLLCombineInput(NamedTuple):
    """Unweighted rows (e, C, H); topk_weights include the routed scaling factor."""

    hidden_states: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor

    @property
    def format(self) -> str:
        """Name of the format."""
        return "deepep_ll"


DispatchOutput = StandardDispatchOutput | DeepEPNormalDispatchOutput | DeepEPLLDispatchOutput
CombineInput = StandardCombineInput | DeepEPNormalCombineInput | DeepEPLLCombineInput
DISPATCHES = (StandardDispatchOutput, DeepEPNormalDispatchOutput, DeepEPLLDispatchOutput)


def format_is_standard(
    value: DispatchOutput | CombineInput,
) -> TypeGuard[StandardDispatchOutput | StandardCombineInput]:
    """Return whether a dispatch output or combine input has the standard format."""
    return value.format == "standard"


def format_is_deepep_normal(
    value: DispatchOutput | CombineInput,
) -> TypeGuard[DeepEPNormalDispatchOutput | DeepEPNormalCombineInput]:
    """Return whether a dispatch output or combine input has the deepep_normal format."""
    return value.format == "deepep_normal"


def format_is_deepep_ll(
    value: DispatchOutput | CombineInput,
) -> TypeGuard[DeepEPLLDispatchOutput | DeepEPLLCombineInput]:
    """Return whether a dispatch output or combine input has the deepep_ll format."""
    return value.format == "deepep_ll"


def expect_format(value: object, *formats: str) -> str:
    """Return the format of a dispatch output. Raises ConfigurationError unless `formats` has it."""
    need = " or ".join(formats)
    if not isinstance(value, DISPATCHES):
        got = f"{type(value).__name__}, which is not a dispatch output"
        raise ConfigurationError("dispatch format", got=got, need=need)
    if value.format not in formats:
        raise ConfigurationError("dispatch format", got=value.format, need=need)
    return value.format
