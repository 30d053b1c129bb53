"""Layers of vLLM on a GPU, and a program that writes their outputs to a file.

    python vllm_cases.py FILE [plugin]

FILE gets one entry per case: the name of the selected experts class, and outputs of REPEATS calls.
With `plugin`, the plugin is registered first; MK_VLLM controls it.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch

from modular_kernel.spec.problem import Problem

DEVICE = "cuda"
REPEATS = 3
_BASE = Problem(tokens=256, hidden=512, intermediate=256, experts=8, top_k=2)
# (problem, checkpoint format). The format "" is described in `vllm_layers.quant_config`.
CASES: tuple[tuple[Problem, str], ...] = (
    (_BASE, ""),
    (replace(_BASE, activation="gelu"), ""),
    (replace(_BASE, activation="swiglu_oai", bias=True), ""),
    (replace(_BASE, dtype=torch.float16), ""),
    (replace(_BASE, quant="fp8_w8a8_tensor"), ""),
    (replace(_BASE, quant="fp8_w8a8_tensor:static=true"), ""),
    (replace(_BASE, quant="fp8_w8a8_tensor:static=true"), "compressed-tensors"),
    (replace(_BASE, quant="fp8_w8a8_tensor:static=true"), "modelopt"),
    (replace(_BASE, quant="fp8_w8a8_channel"), ""),
    (replace(_BASE, quant="fp8_w8a8_block"), ""),
    (replace(_BASE, quant="fp8_w8a8_block"), "compressed-tensors"),
    (replace(_BASE, quant="int8_w8a8_channel"), ""),
    (replace(_BASE, quant="mxfp4_w4a16"), ""),
    (replace(_BASE, quant="mxfp4_w4a16", activation="swiglu_oai", bias=True), ""),
    (replace(_BASE, quant="nvfp4_w4a16"), ""),
    (replace(_BASE, quant="nvfp4_w4a16"), "modelopt"),
    (replace(_BASE, quant="int4_w4a16_group:group=32"), ""),
    (replace(_BASE, quant="int4_w4a16_group:group=128"), "gptq"),
    (replace(_BASE, quant="int4_w4a16_group:group=128,zero_points=true"), "awq"),
    (replace(_BASE, quant="int8_w8a16_group:group=128"), "gptq"),
)


def name_case(problem: Problem, form: str) -> str:
    """Return the unique name of a case. It has no spaces."""
    fields = (problem.quant, form, problem.act.kind, str(problem.dtype).removeprefix("torch."))
    return "-".join(field for field in fields if field)


def write_outputs(file: Path, *, plugin: bool) -> None:
    """Run each case, and write its experts class and outputs."""
    from vllm_layers import call_runner, experts_class, load, tensors, vllm_process

    from modular_kernel.integrations.vllm import register

    results: dict[str, tuple[str, list[torch.Tensor]]] = {}
    with vllm_process(device=DEVICE):
        if plugin:
            register()
        for problem, form in CASES:
            x_TH, weights, logits_TE, _ = tensors(problem)
            try:
                runner = load(problem, weights, form)
                name, outputs = experts_class(runner), []
                for _ in range(REPEATS):
                    output = call_runner(runner, x_TH.to(DEVICE), logits_TE.to(DEVICE))
                    outputs.append(output.cpu())
            except Exception as error:  # noqa: BLE001  compared with the result with the plugin
                name, outputs = f"{type(error).__name__}: {error}", []
            results[name_case(problem, form)] = name, outputs
    torch.save(results, file)


if __name__ == "__main__":
    write_outputs(Path(sys.argv[1]), plugin=sys.argv[2:] == ["plugin"])
