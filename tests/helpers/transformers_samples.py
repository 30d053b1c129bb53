"""Pairings for tests with models of transformers, and a skip of pairings that cannot run."""

import pytest
import torch

import modular_kernel as mk

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NO_EP = "MoEPrepareAndFinalizeNoEP"
# The parts that `register()` selects on a GPU, or on a CPU if transformers' grouped_mm cannot run.
OURS = (NO_EP, "TritonExperts" if DEVICE == "cuda" else "TorchExperts")
CONTIGUOUS = ((NO_EP, "TorchExperts"), (NO_EP, "TritonExperts"))


def skip_if_refused(pair: tuple[str, str]) -> None:
    problem = mk.Problem(tokens=16, hidden=64, intermediate=96, experts=8, top_k=2)
    verdict = mk.check(*pair, problem)
    if not verdict.ok:
        pytest.skip("; ".join(map(str, verdict.rejections)))
