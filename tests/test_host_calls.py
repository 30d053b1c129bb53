"""How much Python an eager call runs on the host, kernels apart: half of what it once did."""

import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import pytest
import torch

import modular_kernel as mk
from modular_kernel.testing.cases.case import Case
from modular_kernel.testing.verify.sample import Sample

ROOT = str(Path(mk.__file__).parents[1])
OURS = tuple(
    f"{ROOT}/{p}/" for p in ("modular_kernel", "prepare_finalize", "experts", "topk_reduce")
)
NO_EP, BATCHED = "MoEPrepareAndFinalizeNoEP", "BatchedPrepareAndFinalize"
# (parts, scheme, tokens) -> calls of version 0.1.0, with the interpreter on.
BEFORE = {
    (NO_EP, "TritonExperts", "none", 1): 252,
    (NO_EP, "TritonExperts", "none", 8): 326,
    (NO_EP, "TritonExperts", "none", 128): 454,
    (NO_EP, "TritonExperts", "fp8_w8a8_channel", 1): 343,
    (NO_EP, "TritonExperts", "fp8_w8a8_channel", 8): 530,
    (NO_EP, "TritonExperts", "fp8_w8a8_channel", 128): 734,
    (NO_EP, "GroupedGemmExperts", "none", 8): 317,
    (NO_EP, "GroupedGemmExperts", "none", 128): 401,
    (BATCHED, "BatchedTritonExperts", "none", 8): 273,
}


def host_calls(pf: str, experts: str, problem: mk.Problem) -> Counter[str]:
    """Count the project's Python functions that the third of three like calls enters."""
    kernel = mk.make_kernel(pf, experts, problem)
    case = Case(prepare_finalize=pf, experts=experts, problem=problem)
    inputs = Sample(case, torch.device("cpu"), tokens=problem.tokens, salt=0).inputs
    arguments = inputs.x_TH, inputs.weights, inputs.routing
    found: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        inside = file.startswith(OURS) and "kernels" not in file and "interpreter" not in file
        if event == "call" and inside:
            found[f"{file.removeprefix(ROOT)}:{frame.f_code.co_name}"] += 1

    for _ in range(2):
        kernel(*arguments)
    sys.setprofile(note)
    try:
        kernel(*arguments)
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.share(3)
@pytest.mark.parametrize("call", BEFORE, ids=lambda call: "-".join(map(str, call[1:])))
def test_an_eager_call_runs_half_the_python_it_once_did(call: tuple[str, str, str, int]) -> None:
    pf, experts, quant, tokens = call
    problem = mk.Problem(
        tokens=tokens, hidden=128, intermediate=256, experts=8, top_k=2, quant=quant
    )
    found = host_calls(pf, experts, problem)
    assert found["/modular_kernel/kernel.py:__call__"] == 1
    assert 2 * sum(found.values()) <= BEFORE[call], found.most_common(20)
