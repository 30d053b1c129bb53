"""The experts classes of vLLM 0.26, based on the module for 0.33."""

from typing import Any

import torch

from modular_kernel.integrations.vllm import v0_33_classes
from modular_kernel.spec.problem import Problem

prepare_program = v0_33_classes.prepare_program

WITHOUT_PREDICATES = {
    **v0_33_classes.WITHOUT_PREDICATES,
    "TritonWNA16Experts": ("int8_w8a16_group", "int4_w4a16_group", "int4_w4a16_group:group=32"),
}


class VllmEngine(v0_33_classes.VllmEngine):
    """vLLM 0.26 in this process."""

    reads_gptq = True
    without_predicates = WITHOUT_PREDICATES

    def name_backend(self, problem: Problem, cls: type) -> str:
        """Return the backend that converts weights; "" if vLLM does not convert them."""
        return "" if _reads_bytes(cls) else super().name_backend(problem, cls)

    def convert_groups(self, source: v0_33_classes.CheckpointLayer) -> v0_33_classes.Layer:
        """Convert integers with a scale per group of a row.

        vLLM expects the integers in GPTQ's layout, (e, K / 8, N), and empty tensors for the order
        of the columns. No oracle returns TritonWNA16Experts, which reads the bytes of rows.
        """
        weights, problem = source.weights, source.problem
        scales: Any = (weights.w1_scale, weights.w2_scale)
        if _reads_bytes(source.cls):
            biases = weights.b1, weights.b2
            return v0_33_classes.make_group_layer(problem, (weights.w1, weights.w2), scales, biases)
        oracle = v0_33_classes.get_oracle("int_wna16")
        backend = v0_33_classes.find_backend(oracle, source.cls, "EMULATION")
        packed_weights = [
            weight.view(torch.int32).mT.contiguous() for weight in (weights.w1, weights.w2)
        ]
        order = torch.empty(problem.e, 0, dtype=torch.int32, device=weights.w1.device)
        w13, w2, w13_scale, w2_scale, *other_tensors = oracle.convert_to_wna16_moe_kernel_format(
            backend,
            v0_33_classes.make_module(source),
            v0_33_classes.make_group_arguments(problem),
            None,
            *packed_weights,
            *(scale.mT.contiguous() for scale in scales),
            order,
            order,
            None,
            None,
            weights.b1,
            weights.b2,
        )
        converted = (w13, w2), (w13_scale, w2_scale)
        return v0_33_classes.make_group_layer(problem, *converted, other_tensors[-2:])


def _reads_bytes(cls: type) -> bool:
    return cls.__name__ == "TritonWNA16Experts"


def make_engine() -> VllmEngine:
    """Return vLLM in this process."""
    return VllmEngine()
