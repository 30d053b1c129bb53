"""Inputs of `MoeRunner` (dispatch outputs) and its outputs (combine inputs), in three formats.

- "standard": (T, H) tokens with their routing.
- "deepep_normal": received rows with local expert ids.
- "deepep_ll": received rows grouped by expert, with counts.

The combine input has the format of the dispatch output. Names follow SGLang.
"""

from typing import Any, NamedTuple, TypeGuard

import torch

from modular_kernel.errors import ConfigurationError
from modular_kernel.spec.router import StandardTopKOutput, TritonKernelTopKOutput


class StandardDispatchOutput(NamedTuple):
    """Tokens and their routing.

    hidden_states: (T, H).
    topk_output: the output of a router, or (weights, ids), both (T, K).
    """

    hidden_states: torch.Tensor
    topk_output: StandardTopKOutput | TritonKernelTopKOutput | tuple[torch.Tensor | None, ...]

    @property
    def format(self) -> str:
        """Name of the format."""
        return "standard"


class DeepEPNormalDispatchOutput(NamedTuple):
    """Rows that this rank has received.

    hidden_states: (R, H).
    hidden_states_scale: scales of quantized rows, as in `StandardTokens.scale`; None if the rows
        are not quantized.
    topk_ids: (R, K) local ids, with -1 for experts of other ranks.
    topk_weights: (R, K) float32.
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
    """Received rows, grouped by expert.

    hidden_states: (e, C, H).
    hidden_states_scale: scales of quantized rows, as in `BatchedTokens.scale`; None if the rows are
        not quantized.
    topk_ids, topk_weights: (T, K), the routing of this rank's tokens, which the combine needs.
    masked_m: (e,) int32, number of valid rows of each expert.
    expected_m: not used.
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
    """Output of the layer: weighted sums (T, H), or (T, K, H) with MoeRunnerConfig.no_combine."""

    hidden_states: torch.Tensor

    @property
    def format(self) -> str:
        """Name of the format."""
        return "standard"


class DeepEPNormalCombineInput(NamedTuple):
    """Rows for the combine. Each row is the weighted sum over this rank's experts.

    hidden_states: (R, H).
    """

    hidden_states: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor

    @property
    def format(self) -> str:
        """Name of the format."""
        return "deepep_normal"


class DeepEPLLCombineInput(NamedTuple):
    """Unweighted rows for the combine, which weights and sums them.

    hidden_states: (e, C, H).
    topk_weights: (T, K), including the routed scaling factor.
    """

    hidden_states: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor

    @property
    def format(self) -> str:
        """Name of the format."""
        return "deepep_ll"


DispatchOutput = StandardDispatchOutput | DeepEPNormalDispatchOutput | DeepEPLLDispatchOutput
CombineInput = StandardCombineInput | DeepEPNormalCombineInput | DeepEPLLCombineInput
DISPATCH_OUTPUTS = (StandardDispatchOutput, DeepEPNormalDispatchOutput, DeepEPLLDispatchOutput)


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
    """Return the format of a dispatch output.

    Raises ConfigurationError unless the format is one of `formats`.
    """
    need = " or ".join(formats)
    if not isinstance(value, DISPATCH_OUTPUTS):
        got = f"{type(value).__name__}, which is not a dispatch output"
        raise ConfigurationError("dispatch format", got=got, need=need)
    if value.format not in formats:
        raise ConfigurationError("dispatch format", got=value.format, need=need)
    return value.format
