"""Computes errors against float64 for transformers' comparisons that fail with our implementation.

transformers' tests require a tolerance of 1e-4 in every dtype. In 16 bits, only implementations
with the same roundings meet it. The script runs in the environment of a checkout
(`upstream.make_environment`), and prints relative errors as JSON.
"""

import copy
import json
import math
import sys
from importlib import import_module
from typing import Any

import torch
from transformers import set_seed

from modular_kernel.integrations.transformers import register

DTYPES = {"0_fp16": torch.float16, "1_fp32": torch.float32, "2_bf16": torch.bfloat16}


def compute_errors(case: str) -> dict[str, float]:
    """Return the errors of eager, batched_mm and ours, each the maximum over the model classes."""
    path, cls, test = case.split("::")
    dtype = next(dtype for suffix, dtype in DTYPES.items() if test.endswith(suffix))
    common = import_module("tests.test_modeling_common")
    suite = getattr(import_module(path.removesuffix(".py").replace("/", ".")), cls)(test)
    suite.setUp()
    maxima: dict[str, float] = {}
    for model_class in suite.all_model_classes:
        set_seed(42)
        config, inputs = suite.model_tester.prepare_config_and_inputs_for_common()
        common.set_config_for_less_flaky_test(config)
        model = model_class(config).eval().to(dtype)
        common.set_model_for_less_flaky_test(model)
        prepared = suite._prepare_for_class(_cast(inputs, dtype), model_class)
        exact = copy.deepcopy(model).double()
        expected = _run(common, exact, "eager", _cast(prepared, torch.float64))
        for side in ("eager", "batched_mm", register()):
            result = _run(common, model, side, prepared)
            error = float((result.double() - expected).norm() / expected.norm())
            update_maximum(maxima, side, error)
    return maxima


def update_maximum(maxima: dict[str, float], side: str, error: float) -> None:
    """Update a side's maximum error. NaN counts as the largest value."""
    previous = maxima.get(side, 0.0)
    maxima[side] = previous if math.isnan(previous) or error <= previous else error


def _cast(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    floating = {k: v for k, v in inputs.items() if torch.is_tensor(v) and v.is_floating_point()}
    return inputs | {name: tensor.to(dtype) for name, tensor in floating.items()}


def _run(common: Any, model: Any, side: str, inputs: dict[str, Any]) -> torch.Tensor:
    model.set_experts_implementation(side)
    with torch.no_grad():
        outputs = common._get_output_tensors(model(**inputs))
    first = outputs[0] if isinstance(outputs, (list, tuple)) else outputs
    tensor: torch.Tensor = first[0] if isinstance(first, (list, tuple)) else first
    return tensor


if __name__ == "__main__":
    print(json.dumps(compute_errors(sys.argv[1])))
