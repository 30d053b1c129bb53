"""Counts the Python functions of the project that a call enters. Ranks import this module."""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from unittest.mock import patch

from ep_layers import Layer
from interpreted_replays import interpreted_replays

import modular_kernel as mk
from prepare_finalize.common import device_handshake

ROOT = str(Path(mk.__file__).parents[1])
SOURCE_FOLDERS = tuple(
    f"{ROOT}/{folder}/"
    for folder in ("modular_kernel", "prepare_finalize", "experts", "topk_reduce")
)


def count_functions(call: Callable[[], object]) -> Counter[str]:
    """Count the entries into each function, except kernels, in the third of three equal calls."""
    counts: Counter[str] = Counter()

    def count_call(frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        is_ours = (
            file.startswith(SOURCE_FOLDERS) and "kernels" not in file and "interpreter" not in file
        )
        if event == "call" and is_ours:
            counts[f"{file.removeprefix(ROOT)}:{frame.f_code.co_name}"] += 1

    for _ in range(2):
        call()
    sys.setprofile(count_call)
    try:
        call()
    finally:
        sys.setprofile(None)
    return counts


def count_calls(call: Callable[[], object]) -> tuple[int, int]:
    """Count the calls of the project's Python functions in the third of three equal calls.

    Returns their number, and the number of C functions that they call.
    """
    counts = Counter[str]()

    def count_call(frame: FrameType, event: str, _: object) -> None:
        if frame.f_code.co_filename.startswith(SOURCE_FOLDERS):
            counts[event] += 1

    for _ in range(2):
        call()
    sys.setprofile(count_call)
    try:
        call()
    finally:
        sys.setprofile(None)
    return counts["call"], counts["c_call"]


def count_functions_on_rank(rank: int, world: int, group: object, layer: Layer) -> Counter[str]:
    """Return `count_functions` for calls of a layer on one rank, without poisoned buffers."""
    kernel = mk.make_kernel(layer.part, layer.experts_part, layer.problem(rank), group=group)
    inputs = layer.inputs_of(rank)
    counts = count_functions(lambda: kernel(inputs.x_TH, inputs.weights, inputs.routing))
    kernel.prepare_finalize.destroy()
    return counts


def count_functions_of_replay(rank: int, world: int, group: object, layer: Layer) -> Counter[str]:
    """Return `count_functions` for replayed calls of a plan on one rank.

    The comparison of sizes between ranks is disabled, because GPUs do not run it.
    """
    with interpreted_replays():
        problem = replace(layer.problem(rank), graph=True)
        kernel = mk.make_kernel(layer.part, layer.experts_part, problem, group=group)
        plan, inputs = kernel.plan(), layer.inputs_of(rank)
        arguments = inputs.x_TH, inputs.weights, inputs.routing
        plan(*arguments)
        with patch.object(device_handshake, "check_equal_sizes", lambda *_: None):
            counts = count_functions(lambda: plan(*arguments))
        assert kernel.counters()["replayed_calls"] >= 2
        kernel.prepare_finalize.destroy()
    return counts
