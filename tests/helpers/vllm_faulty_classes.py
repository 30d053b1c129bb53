"""Experts classes derived from vLLM's NaiveBatchedExperts, each with one fault."""

import os
import time
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.experts.fused_batched_moe import (
    BatchedTritonExperts,
    NaiveBatchedExperts,
)


class WrongActivation(NaiveBatchedExperts):
    """Computes silu of up instead of gate."""

    def activation(self, activation: Any, output: torch.Tensor, input: torch.Tensor) -> None:
        gate, up = input.float().chunk(2, dim=-1)
        output.copy_(torch.nn.functional.silu(up) * gate)


class Raising(NaiveBatchedExperts):
    """Fails in every call."""

    def apply(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("invalid tile")


class Aborting(NaiveBatchedExperts):
    """Aborts the process in every call."""

    def apply(self, *args: Any, **kwargs: Any) -> None:
        os.abort()


class Hanging(NaiveBatchedExperts):
    """Does not return from a call."""

    def apply(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(600)


class Refusing(BatchedTritonExperts):
    """Refuses a hidden size that vLLM's class supports."""

    @staticmethod
    def _supports_shape(hidden_dim: int) -> bool:
        return hidden_dim != 64


class MissingOperator(NaiveBatchedExperts):
    """Calls a compiled operator that does not exist."""

    def apply(self, *args: Any, **kwargs: Any) -> None:
        torch.ops._C.no_such_operator()


class ReadingWorkspace(NaiveBatchedExperts):
    """Writes NaN if its workspace is full of NaN."""

    def apply(self, *args: Any, **kwargs: Any) -> None:
        is_poisoned = bool(kwargs["workspace2"].isnan().all())
        super().apply(*args, **kwargs)
        if is_poisoned:
            kwargs["output"].fill_(torch.nan)


FAULTY = (
    WrongActivation,
    Raising,
    Aborting,
    Hanging,
    Refusing,
    MissingOperator,
    ReadingWorkspace,
)
