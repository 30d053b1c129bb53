"""How many of the project's Python functions a call enters; ranks import this file."""

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from ep_layers import Layer

import modular_kernel as mk

ROOT = str(Path(mk.__file__).parents[1])
OURS = tuple(
    f"{ROOT}/{p}/" for p in ("modular_kernel", "prepare_finalize", "experts", "topk_reduce")
)


def functions_of_third(call: Callable[[], object]) -> Counter[str]:
    """Count the functions that the third of three like calls enters, kernels apart."""
    found: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        inside = file.startswith(OURS) and "kernels" not in file and "interpreter" not in file
        if event == "call" and inside:
            found[f"{file.removeprefix(ROOT)}:{frame.f_code.co_name}"] += 1

    for _ in range(2):
        call()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def functions_of_rank(rank: int, world: int, group: object, layer: Layer) -> Counter[str]:
    """Count those of one rank's call; no buffer is poisoned."""
    kernel = mk.make_kernel(layer.part, layer.experts_part, layer.problem(rank), group=group)
    given = layer.inputs_of(rank)
    found = functions_of_third(lambda: kernel(given.x_TH, given.weights, given.routing))
    kernel.prepare_finalize.destroy()
    return found
