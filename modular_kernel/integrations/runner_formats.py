"""What a token dispatcher gives to `MoeRunner`, and what a combiner takes from it.

A format tells how rows lie: "standard" (T, H) tokens with their routing; "deepep_normal" rows that
were received, with local ids; "deepep_ll" rows expert by expert, with counts. What comes back is of
the format of what was given.
"""

from typing import Any, NamedTuple, TypeGuard

import torch

from modular_kernel.errors import ConfigurationError
from modular_kernel.spec.router import StandardTopKOutput, TritonKernelTopKOutput


class StandardDispatchOutput(NamedTuple):
    """hidden_states: (T, H). topk_output: a router's, or weights and ids, both (T, K)."""

    hidden_states: torch.Tensor
    topk_output: StandardTopKOutput | TritonKernelTopKOutput | tuple[torch.Tensor | None, ...]

    @property
    def format(self) -> str:
        """The name of the format."""
        return "standard"


class DeepEPNormalDispatchOutput(NamedTuple):
    """Rows that arrived on this rank, (R, H).

    hidden_states_scale: None where rows are unquantized, else as `ContiguousTokens.scale`.
    topk_ids: (R, K) local, -1 for experts elsewhere. topk_weights: (R, K) float32.
    num_recv_tokens_per_expert: the rows of each expert here; nothing is computed from it.
    """

    hidden_states: torch.Tensor
    hidden_states_scale: torch.Tensor | None
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    num_recv_tokens_per_expert: Any = None

    @property
    def format(self) -> str:
        """The name of the format."""
        return "deepep_normal"


class DeepEPLLDispatchOutput(NamedTuple):
    """Rows by expert, (e, C, H), of which the first masked_m[i] of expert i are tokens.

    hidden_states_scale: None where rows are unquantized, else as `BatchedTokens.scale`.
    topk_ids, topk_weights: (T, K), this rank's own tokens': for the combine, untouched.
    masked_m: (e,) int32. expected_m: a hint; nothing is computed from it.
    """

    hidden_states: torch.Tensor
    hidden_states_scale: torch.Tensor | None
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    masked_m: torch.Tensor
    expected_m: int = 0

    @property
    def format(self) -> str:
        """The name of the format."""
        return "deepep_ll"


class StandardCombineInput(NamedTuple):
    """hidden_states: (T, H), weighted and summed; (T, K, H) with no_combine."""

    hidden_states: torch.Tensor

    @property
    def format(self) -> str:
        """The name of the format."""
        return "standard"


class DeepEPNormalCombineInput(NamedTuple):
    """hidden_states: (R, H), each row weighted and summed over its experts here."""

    hidden_states: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor

    @property
    def format(self) -> str:
        """The name of the format."""
        return "deepep_normal"


class DeepEPLLCombineInput(NamedTuple):
    """hidden_states: (e, C, H), not weighted. topk_weights: with the routed scaling factor."""

    hidden_states: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor

    @property
    def format(self) -> str:
        """The name of the format."""
        return "deepep_ll"


DispatchOutput = StandardDispatchOutput | DeepEPNormalDispatchOutput | DeepEPLLDispatchOutput
CombineInput = StandardCombineInput | DeepEPNormalCombineInput | DeepEPLLCombineInput
DISPATCHES = (StandardDispatchOutput, DeepEPNormalDispatchOutput, DeepEPLLDispatchOutput)


def format_is_standard(
    value: DispatchOutput | CombineInput,
) -> TypeGuard[StandardDispatchOutput | StandardCombineInput]:
    """Tell whether a dispatch output or combine input is of the standard format."""
    return value.format == "standard"


def format_is_deepep_normal(
    value: DispatchOutput | CombineInput,
) -> TypeGuard[DeepEPNormalDispatchOutput | DeepEPNormalCombineInput]:
    """Tell whether a dispatch output or combine input is of received rows."""
    return value.format == "deepep_normal"


def format_is_deepep_ll(
    value: DispatchOutput | CombineInput,
) -> TypeGuard[DeepEPLLDispatchOutput | DeepEPLLCombineInput]:
    """Tell whether a dispatch output or combine input is of rows expert by expert."""
    return value.format == "deepep_ll"


def expect_format(value: object, *formats: str) -> str:
    """Return the format of a dispatch output; ConfigurationError with both names if another."""
    need = " or ".join(formats)
    if not isinstance(value, DISPATCHES):
        got = f"{type(value).__name__}, no dispatch output"
        raise ConfigurationError("dispatch format", got=got, need=need)
    if value.format not in formats:
        raise ConfigurationError("dispatch format", got=value.format, need=need)
    return value.format
