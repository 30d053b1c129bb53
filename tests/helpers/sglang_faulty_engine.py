"""SGLang's MoE runners, and functions in their place that each have one fault.

Worker processes of `modular_kernel.testing.engines` load it. It imports SGLang in `load_engine`,
when SGLang is prepared for a CPU.
"""

import os
import time
from collections.abc import Callable
from typing import Any

import torch

from modular_kernel.integrations.sglang import classes


def wrong_activation(layer: Any, dispatch_output: Any) -> Any:
    """Compute silu of up instead of gate."""
    from sglang.srt.layers.moe.fused_moe_native import fused_moe_forward_native

    original = layer.w13_weight.data
    layer.w13_weight.data = original.roll(original.shape[1] // 2, 1)
    try:
        return fused_moe_forward_native(layer, dispatch_output)
    finally:
        layer.w13_weight.data = original


def raising(layer: Any, dispatch_output: Any) -> Any:
    raise RuntimeError("invalid tile")


def aborting(layer: Any, dispatch_output: Any) -> Any:
    os.abort()


def hanging(layer: Any, dispatch_output: Any) -> Any:
    time.sleep(600)


def missing_operator(layer: Any, dispatch_output: Any) -> Any:
    return torch.ops.sglang.no_such_operator()


def reading_memory(layer: Any, dispatch_output: Any) -> Any:
    """Add memory that was not written."""
    from sglang.srt.layers.moe.fused_moe_native import fused_moe_forward_native

    output = fused_moe_forward_native(layer, dispatch_output)
    memory = torch.empty_like(output.hidden_states)
    return output._replace(hidden_states=output.hidden_states.where(~memory.isnan(), memory))


FAULTY: dict[str, Callable[[Any, Any], Any]] = {
    "WrongActivation": wrong_activation,
    "Raising": raising,
    "Aborting": aborting,
    "Hanging": hanging,
    "MissingOperator": missing_operator,
    "ReadingMemory": reading_memory,
}


def load_engine() -> Any:
    engine: Any = classes.load_engine()
    for name, function in FAULTY.items():
        engine.add_function(name, function)
    # SGLang keeps the Triton runner for unquantized layers.
    engine.add_function("OtherBackend", wrong_activation, "marlin")
    return engine


if __name__ == "__main__":
    classes.run_program()
