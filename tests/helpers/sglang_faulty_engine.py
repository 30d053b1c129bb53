"""An engine with SGLang's MoE runners and with functions that replace them and have one fault each.

Worker processes of `modular_kernel.testing.engines` load this module. SGLang is imported in
functions, because `load_engine` must prepare it for a CPU before.
"""

import os
import time
from collections.abc import Callable
from typing import Any

import torch

from modular_kernel.integrations.sglang import classes


def use_wrong_activation(layer: Any, dispatch_output: Any) -> Any:
    """Compute silu of up instead of gate."""
    from sglang.srt.layers.moe.fused_moe_native import fused_moe_forward_native

    original = layer.w13_weight.data
    layer.w13_weight.data = original.roll(original.shape[1] // 2, 1)
    try:
        return fused_moe_forward_native(layer, dispatch_output)
    finally:
        layer.w13_weight.data = original


def raise_error(layer: Any, dispatch_output: Any) -> Any:
    raise RuntimeError("invalid tile")


def abort_process(layer: Any, dispatch_output: Any) -> Any:
    os.abort()


def hang(layer: Any, dispatch_output: Any) -> Any:
    time.sleep(600)


def call_missing_operator(layer: Any, dispatch_output: Any) -> Any:
    return torch.ops.sglang.no_such_operator()


def read_unwritten_memory(layer: Any, dispatch_output: Any) -> Any:
    """Replace the output by unwritten memory where that memory is NaN."""
    from sglang.srt.layers.moe.fused_moe_native import fused_moe_forward_native

    output = fused_moe_forward_native(layer, dispatch_output)
    memory = torch.empty_like(output.hidden_states)
    return output._replace(hidden_states=output.hidden_states.where(~memory.isnan(), memory))


FAULTY: dict[str, Callable[[Any, Any], Any]] = {
    "WrongActivation": use_wrong_activation,
    "Raising": raise_error,
    "Aborting": abort_process,
    "Hanging": hang,
    "MissingOperator": call_missing_operator,
    "ReadingMemory": read_unwritten_memory,
}


def load_engine() -> Any:
    engine: Any = classes.load_engine()
    for name, function in FAULTY.items():
        engine.add_function(name, function)
    # For unquantized layers, SGLang selects its Triton runner instead of this backend.
    engine.add_function("OtherBackend", use_wrong_activation, "marlin")
    return engine


if __name__ == "__main__":
    classes.run_program()
