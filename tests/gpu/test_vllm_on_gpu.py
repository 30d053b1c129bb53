"""vLLM's MoE layers on a GPU, with and without the plugin.

pytest tests/gpu/test_vllm_on_gpu.py -rs  # lists the reasons for skips
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_cases import CASES, DEVICE, REPEATS, name_case

from modular_kernel.integrations.vllm import MODULE_BY_VERSION, _parse_minor_version, register
from modular_kernel.reference import float64_reference, rounded_reference
from modular_kernel.settings import make_child_environment
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.testing.verify.compare import compare
from modular_kernel.testing.verify.compare_isolated import RoundingErrors

vllm = pytest.importorskip("vllm", reason="vLLM is not installed")
if _parse_minor_version(vllm.__version__) not in MODULE_BY_VERSION:
    pytest.skip(f"the plugin does not support vLLM {vllm.__version__}", allow_module_level=True)

# These modules import vLLM.
from vllm.config import get_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.platforms import current_platform
from vllm_layers import (
    call,
    call_runner,
    experts_class,
    load,
    prepared_tensors,
    reload,
    tensors,
    vllm_process,
)

if current_platform.device_type != DEVICE:
    pytest.skip(f"vLLM's platform is {current_platform}", allow_module_level=True)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
TOKENS = (1, 17, 256)
OURS = "ModularKernelTritonExperts"
_INDUCTOR_PATCH = "_apply_constrain_to_fx_strides_patch"
NAMES = [name_case(*case) for case in CASES]
FOUR_BIT_CASES = [case for case in CASES if case[0].scheme.packed]
each_case = pytest.mark.parametrize(("problem", "form"), CASES, ids=NAMES)


@pytest.fixture(scope="module", autouse=True)
def engine() -> Iterator[None]:
    with vllm_process(device=DEVICE):
        register()
        yield


@pytest.fixture(autouse=True)
def _enable_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MK_VLLM", "TritonExperts" if DEVICE == "cpu" else "1")


class Sample:
    """A layer of vLLM, with its weights and inputs."""

    def __init__(self, problem: Problem, form: str) -> None:
        x_TH, self.cpu_weights, logits_TE, routing = tensors(problem)
        self.problem = problem
        self.runner = load(problem, self.cpu_weights, form)
        self.x_TH, self.logits_TE = x_TH.to(DEVICE), logits_TE.to(DEVICE)
        self.routing = Routing(
            routing.topk_weights_TK.to(DEVICE), routing.topk_ids_TK.int().to(DEVICE)
        )

    @property
    def weights(self) -> ExpertWeights:
        """The weights of the checkpoint, on the GPU."""
        moved = {
            name: value.to(DEVICE)
            for name, value in vars(self.cpu_weights).items()
            if isinstance(value, torch.Tensor)
        }
        return replace(self.cpu_weights, **moved)

    def inputs(self, tokens: int, first: int = 0) -> tuple[torch.Tensor, Routing]:
        rows = slice(first, first + tokens)
        weights_TK, ids_TK = self.routing.topk_weights_TK, self.routing.topk_ids_TK
        return self.x_TH[rows], Routing(weights_TK[rows].clone(), ids_TK[rows].clone())

    def run(self, x_TH: torch.Tensor, routing: Routing) -> torch.Tensor:
        return call(self.runner.routed_experts, x_TH, routing)


def assert_close_to_reference(
    got: torch.Tensor, sample: Sample, x_TH: torch.Tensor, routing: Routing
) -> None:
    """Compare an output of the layer with the float64 reference."""
    tokens = len(x_TH)
    all_rows = sample.x_TH, sample.weights, sample.routing, sample.problem
    exact, rounded = float64_reference(*all_rows), rounded_reference(*all_rows)
    # The errors are those of calls with this number of tokens.
    rounding = RoundingErrors.measure(exact, rounded, tokens)
    inputs = x_TH, sample.weights, routing, sample.problem.with_tokens(tokens)
    comparison = compare(
        got, float64_reference(*inputs), rounded_reference(*inputs), inputs[3],
        rounding_error=rounding.rounding_error,
        rounding_row_error=rounding.rounding_row_error,
        rounding_value_error=rounding.rounding_value_error,
    )  # fmt: skip
    assert comparison.ok, comparison.problems


def test_a_disabled_plugin_changes_neither_classes_nor_bits(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """A process with MK_VLLM=0 has the same results as a process that never imported the plugin."""
    program = str(Path(__file__).parents[1] / "helpers" / "vllm_cases.py")
    environment = make_child_environment(interpreted=False) | {
        "PYTHONPATH": os.pathsep.join(sys.path)
    }
    files = {option: tmp_path / f"{option or 'without'}.pt" for option in ("", "plugin")}
    processes = {
        option: subprocess.Popen(
            [sys.executable, program, str(file), *([option] if option else [])],
            env=environment | ({"MK_VLLM": "0"} if option else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for option, file in files.items()
    }
    for process in processes.values():
        output, _ = process.communicate()
        assert process.returncode == 0, output[-2000:]
    outputs_without_plugin, outputs_when_disabled = (
        torch.load(files[option]) for option in ("", "plugin")
    )
    assert outputs_without_plugin.keys() == outputs_when_disabled.keys()
    for case, (name, outputs) in outputs_without_plugin.items():
        other_name, other_outputs = outputs_when_disabled[case]
        record_property(case, name)
        assert other_name == name, case
        assert OURS not in name
        assert len(other_outputs) == len(outputs), case
        assert len(outputs) == REPEATS, f"{case}: {name}"
        assert all(output.isfinite().all() for output in outputs), case
        if all(torch.equal(output, outputs[0]) for output in outputs):
            assert all(torch.equal(output, outputs[0]) for output in other_outputs), case
        else:  # vLLM adds the experts' outputs in an order that changes between calls.
            for output in other_outputs:
                torch.testing.assert_close(output, outputs[0], rtol=0.03, atol=0.03, msg=case)


@each_case
def test_a_layer_runs_on_our_part(problem: Problem, form: str) -> None:
    sample = Sample(problem, form)
    assert experts_class(sample.runner) == OURS
    for tokens in TOKENS:
        x_TH, routing = sample.inputs(tokens)
        assert_close_to_reference(sample.run(x_TH.clone(), routing), sample, x_TH, routing)


@each_case
def test_replays_of_a_captured_layer_give_the_bits_of_eager_calls(
    problem: Problem, form: str
) -> None:
    sample = Sample(problem, form)
    tokens = 17
    calls = [sample.inputs(tokens, first) for first in (0, 64, 128)]
    eager = [sample.run(x_TH.clone(), routing).clone() for x_TH, routing in calls]
    x_TH, routing = sample.inputs(tokens)
    x_TH = x_TH.clone()
    sample.run(x_TH, routing)  # allocates the buffers that the graph reads
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = sample.run(x_TH, routing)
    for (new_x_TH, new_routing), expected in zip(calls[::-1], eager[::-1], strict=True):
        x_TH.copy_(new_x_TH)
        routing.topk_weights_TK.copy_(new_routing.topk_weights_TK)
        routing.topk_ids_TK.copy_(new_routing.topk_ids_TK)
        with torch.inference_mode():
            output.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(output, expected)


@pytest.mark.skipif(
    DEVICE == "cuda" and torch.cuda.get_device_capability() != (9, 0),
    reason="4-bit weights are prepared on sm_90",
)
@pytest.mark.parametrize(
    ("problem", "form"), FOUR_BIT_CASES, ids=[name_case(*c) for c in FOUR_BIT_CASES]
)
def test_replays_after_a_reload_read_the_new_weights(problem: Problem, form: str) -> None:
    sample = Sample(problem, form)
    layer = sample.runner.routed_experts
    tensors_before = prepared_tensors(layer)
    assert tensors_before
    x_TH, routing = sample.inputs(problem.tokens)
    x_TH = x_TH.clone()
    sample.run(x_TH, routing)  # allocates the buffers that the graph reads
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = sample.run(x_TH, routing)
    _, new_weights, _, _ = tensors(problem, seed=4)
    fresh = load(problem, new_weights, form).routed_experts
    expected = call(fresh, x_TH.clone(), routing).clone()
    reload(layer, problem, new_weights, form)
    assert prepared_tensors(layer) is tensors_before
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(output, expected)


def patch_inductor() -> None:
    """Patch Inductor as vLLM does before it compiles a model.

    Inductor of torch 2.11 cannot lower an operator with an opaque argument. The operators of vLLM
    have such an argument, the name of the layer.
    """
    patch = getattr(import_module("vllm.env_override"), _INDUCTOR_PATCH, None)
    if patch is not None:
        patch()


def check_compiled(runner: Any, x_TH: torch.Tensor, logits_TE: torch.Tensor) -> None:
    """Compile a step with the layer, and compare its output with that of an eager call.

    As in a model that vLLM compiles, the layer and its router are one operator.
    """
    expected = call_runner(runner, x_TH, logits_TE)

    def step(x_TH: torch.Tensor, logits_TE: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = runner(x_TH * 1, logits_TE) * 2
        return output

    patch_inductor()
    torch.compiler.reset()  # compiles `step` again in each case
    compiled = torch.compile(step, fullgraph=True, dynamic=False)
    config = get_current_vllm_config()
    with torch.inference_mode(), set_forward_context(None, config, num_tokens=len(x_TH)):
        got = compiled(x_TH.clone(), logits_TE)
    assert torch.equal(got, expected * 2)


@each_case
def test_a_layer_in_torch_compile_gives_the_bits_of_eager_calls(
    problem: Problem, form: str
) -> None:
    sample = Sample(problem, form)
    assert experts_class(sample.runner) == OURS
    check_compiled(sample.runner, sample.x_TH, sample.logits_TE)


def test_a_layer_on_the_kernels_of_vllm_compiles_in_the_same_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If this test fails too, vLLM causes the failures of the test with our part."""
    monkeypatch.setenv("MK_VLLM", "0")
    sample = Sample(*CASES[0])
    assert experts_class(sample.runner) != OURS
    check_compiled(sample.runner, sample.x_TH, sample.logits_TE)
