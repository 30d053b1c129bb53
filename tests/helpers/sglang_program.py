"""Prints as JSON which runner SGLang selects for its layers: `python sglang_program.py BACKEND`.

The program also prints whether the plugin has imported HEAVY_MODULE when SGLang starts, and how
many seconds the registration took.
"""

import json
import logging
import sys
import time

import sglang_runtime
import torch
from sglang_runtime import (
    channel_config,
    fp8_config,
    fused_moe,
    group_config,
    int8_block_config,
)

from modular_kernel.spec.problem import Problem

PROBLEM = Problem(tokens=5, hidden=64, intermediate=64, experts=4, top_k=2, dtype=torch.bfloat16)
CONFIGS = {
    "none": lambda: None,
    "fp8": fp8_config,
    "fp8 by block": lambda: fp8_config(weight_block_size=[32, 32]),
    "fp8 by channel": lambda: channel_config("fp8_w8a8_channel"),
    "int8 by channel": lambda: channel_config("int8_w8a8_channel"),
    "int8 by block": int8_block_config,
    "int4 in groups": lambda: group_config(4, zero_points=True),
}
HEAVY_MODULE = "modular_kernel.integrations.moe_runner"


def main(backend: str) -> None:
    logs = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: logs.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("modular_kernel").addHandler(handler)
    from sglang.srt.arg_groups.choices import MOE_RUNNER_BACKEND_CHOICES

    start = time.perf_counter()
    from modular_kernel.integrations.sglang import register

    register()
    seconds = time.perf_counter() - start
    sglang_runtime.start(backend)
    is_loaded = HEAVY_MODULE in sys.modules
    selected = {}
    for name, config in CONFIGS.items():
        runner = fused_moe(PROBLEM, config()).runner
        fused = getattr(runner.fused_func, "__qualname__", None)
        selected[name] = runner.runner_backend.value, type(runner.runner_core).__name__, fused
    choices = list(MOE_RUNNER_BACKEND_CHOICES)
    results = {"selected": selected, "choices": choices, "loaded": is_loaded, "seconds": seconds}
    sys.stdout.write(json.dumps(results | {"logs": logs}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
