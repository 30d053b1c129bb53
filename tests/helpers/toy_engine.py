"""A toy engine with a correct experts class, and classes that are wrong, refuse, crash or hang.

Worker processes of `modular_kernel.testing.engines` load this module.
"""

import os
import sys
import time
from typing import Any

import torch

from modular_kernel.integrations.engine import (
    Description,
    EngineCase,
    ExpertsClass,
    NotJudgedError,
    RefusedError,
    UnavailableError,
)
from modular_kernel.reference import rounded_reference
from modular_kernel.spec.problem import ActivationSpec
from modular_kernel.tensors import ExpertWeights, Routing

CLASSES = (
    "Right",
    "Doubled",
    "WrongAboveOneToken",
    "Careless",
    "Raising",
    "Aborting",
    "Hanging",
    "Refusing",
    "Unavailable",
    "NotBuilt",
    "MissingKernel",
)

CALL_ERRORS = {
    "Raising": RuntimeError("no such\nluck"),
    "MissingKernel": torch.AcceleratorError("CUDA error: no kernel image is available"),
}


class ToyEngine:
    def describe(self) -> Description:
        schemes = ("none", "fp8_w8a8_channel")
        classes = [ExpertsClass(name, "toy_engine", "standard", "", schemes) for name in CLASSES]
        classes.append(ExpertsClass("Abstract", "toy_engine", "", "an abstract base class"))
        activations = {"silu": ActivationSpec("silu"), "gelu": ActivationSpec("gelu")}
        return Description("toy", "1.0", "cpu", "CPU", tuple(classes), activations, ("a note",))

    def check_support(self, case: EngineCase) -> None:
        if case.experts == "Refusing":
            raise RefusedError("kernel does not support Tuesdays")
        if case.experts == "Right" and case.activation == "gelu":
            raise RefusedError("kernel does not support gelu")

    def build(self, case: EngineCase, weights: ExpertWeights) -> Any:
        if case.experts == "Unavailable":
            raise UnavailableError("no compiled operator 'toy'")
        if case.experts == "NotBuilt":
            raise NotJudgedError("Toy(): missing argument")

        def call(x_TH: torch.Tensor, routing: Routing, poisoned: bool) -> torch.Tensor:
            problem = case.problem.with_tokens(len(x_TH))
            if case.experts in CALL_ERRORS:
                raise CALL_ERRORS[case.experts]
            if case.experts == "Aborting":
                os.write(2, b"toy: about to abort")
                os.abort()
            if case.experts == "Hanging":
                time.sleep(60)
            output = rounded_reference(x_TH, weights, routing, problem, input_weighted=True)
            output = output.to(problem.dtype)
            if case.experts == "Doubled" or (
                case.experts == "WrongAboveOneToken" and len(x_TH) > 1
            ):
                output = output * 2
            if case.experts == "Careless":
                if poisoned or not len(x_TH) or bool((routing.topk_ids_TK < 0).any()):
                    raise RuntimeError("careless")
                output = output.nan_to_num(0.0)
            return output

        return call

    def explain_unavailable(self, error: BaseException) -> str | None:
        return None

    def make_reproducer(self, case: EngineCase, bound: float) -> str:
        error = 0.0 if case.experts == "WrongAboveOneToken" else 1.0
        return f"assert {error} <= {bound}, 'relative RMS error {error}, allowed {bound}'\n"


def load_engine() -> ToyEngine:
    return ToyEngine()


if __name__ == "__main__":
    exec(sys.stdin.read())
