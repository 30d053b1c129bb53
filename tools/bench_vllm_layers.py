"""Time MoE layers of vLLM on one GPU, with the plugin and with vLLM's own kernels.

    python tools/bench_vllm_layers.py --json layers.json
    python tools/bench_vllm_layers.py --shape 64,6,2048,1408 --scheme none --tokens 1,64

For each shape and scheme, two stacks of vLLM's MoE layers have the same weights: one with the
plugin, and one with MK_VLLM=0. A layer includes its router, but not the GEMM of its gate. Its
output is added to its input. Each stack is captured in a CUDA graph for each number of tokens, and
the graphs are replayed alternately. A time is the median over rounds. `difference` is the RMS
difference of the two outputs, relative to vLLM's output.
"""

import argparse
import gc
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]

import torch
import vllm
from vllm.config import get_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm_layers import experts_class, load, vllm_process

from modular_kernel.integrations.vllm import register
from modular_kernel.measure.environment import collect_environment
from modular_kernel.spec.problem import Problem
from modular_kernel.testing.random_inputs import random_inputs

SHAPES = ("128,8,2048,768", "32,4,2880,2880")
# Name -> (scheme, format of the checkpoint as in tests/helpers/vllm_layers, activation).
SCHEMES = {
    "none": ("none", "", "silu"),
    "fp8_block": ("fp8_w8a8_block", "", "silu"),
    "fp8_channel": ("fp8_w8a8_channel", "", "silu"),
    "int4_gptq": ("int4_w4a16_group:group=64", "gptq", "silu"),
    "mxfp4": ("mxfp4_w4a16", "", "silu"),
    "mxfp4_gpt_oss": ("mxfp4_w4a16", "", "swiglu_oai"),
}
DEFAULT_SCHEMES = ("none", "fp8_block", "int4_gptq", "mxfp4", "mxfp4_gpt_oss")
TOKENS = (1, 16, 64, 256, 1024, 4096)
DEVICE = "cuda"
SIDES = ("plugin", "vllm")
_MIN_MS = 2.0  # minimum duration of a sample, in which short replays are repeated


@dataclass(frozen=True)
class Stack:
    """Layers of vLLM that run one after the other.

    classes: names of their experts classes.
    logits_NTE: router logits of each layer, for the maximum number of tokens.
    """

    runners: list[Any]
    logits_NTE: list[torch.Tensor]

    @property
    def classes(self) -> str:
        return ",".join(sorted({experts_class(runner) for runner in self.runners}))

    def run(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Return the output of the last layer."""
        for runner, logits_TE in zip(self.runners, self.logits_NTE, strict=True):
            x_TH = x_TH + runner(x_TH.clone(), logits_TE[: len(x_TH)])
        return x_TH


@contextmanager
def set_vllm_context(tokens: int) -> Iterator[None]:
    """Set up calls of layers with this number of tokens."""
    config = get_current_vllm_config()
    with torch.inference_mode(), set_forward_context(None, config, num_tokens=tokens):
        yield


def make_stacks(problem: Problem, checkpoint_format: str, layers: int) -> dict[str, Stack]:
    """Return the stacks by side. They have the same weights and logits."""
    _, weights, _ = random_inputs(problem.with_tokens(1), torch.device(DEVICE))
    if weights.w1_global_scale is not None:  # vLLM uses the global scale of gate for up, too
        raise ValueError("nvfp4 is not measured")
    generator = torch.Generator(DEVICE).manual_seed(1)
    shape = problem.tokens, problem.experts
    logits = [
        torch.randn(*shape, device=DEVICE, generator=generator, dtype=torch.float32)
        .to(problem.dtype)
        for _ in range(layers)
    ]  # fmt: skip
    stacks = {}
    for side in SIDES:
        os.environ["MK_VLLM"] = "1" if side == "plugin" else "0"
        stacks[side] = Stack(
            [load(problem, weights, checkpoint_format) for _ in range(layers)], logits
        )
    return stacks


def capture(stack: Stack, x_TH: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Return a graph of the stack and its output."""
    with set_vllm_context(len(x_TH)):
        for _ in range(2):
            stack.run(x_TH)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = stack.run(x_TH)
    return graph, output


def measure_replay_us(replay: Callable[[], object], repeats: int) -> float:
    """Return the microseconds of one replay, from events around several replays."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000 / repeats


def measure(stacks: dict[str, Stack], x_TH: torch.Tensor, rounds: int) -> dict[str, Any]:
    """Return a row with the median microseconds of a replay of each stack."""
    captured = {side: capture(stack, x_TH) for side, stack in stacks.items()}
    replays = {side: graph.replay for side, (graph, _) in captured.items()}
    repeats = {}
    for side, replay in replays.items():
        measure_replay_us(replay, 3)
        repeats[side] = max(1, round(_MIN_MS * 1000 / measure_replay_us(replay, 3)))
    samples: dict[str, list[float]] = {side: [] for side in SIDES}
    order = list(SIDES)
    for _ in range(rounds):
        random.shuffle(order)
        for side in order:
            samples[side].append(measure_replay_us(replays[side], repeats[side]))
    row: dict[str, Any] = {f"{side}_us": statistics.median(samples[side]) for side in SIDES}
    row |= {f"{side}_min_us": min(samples[side]) for side in SIDES}
    ours, theirs = (captured[side][1].float() - x_TH.float() for side in SIDES)
    row["difference"] = float((ours - theirs).norm() / theirs.norm())
    row["tokens_per_s"] = {side: len(x_TH) / row[f"{side}_us"] * 1e6 for side in SIDES}
    row["ratio"] = row["vllm_us"] / row["plugin_us"]
    return row


def format_row(row: dict[str, Any]) -> str:
    """Return one line of the table."""
    shape = "E{experts} K{top_k} H{hidden} I{intermediate}".format(**row)
    name = f"{shape:22} {row['scheme']:14} {row.get('tokens', ''):>5}"
    if "error" in row:
        return f"{name}  {row['error'][:150]}"
    rates = row["tokens_per_s"]
    return (
        f"{name} {rates['plugin']:>11,.0f} {rates['vllm']:>11,.0f} {row['ratio']:6.3f} "
        f"{row['difference']:8.1e}"
    )


def parse_numbers(text: str) -> tuple[int, ...]:
    """Parse integers that are separated by commas."""
    return tuple(int(number) for number in text.split(","))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", action="append", help="experts,top_k,hidden,intermediate")
    parser.add_argument("--scheme", action="append", choices=list(SCHEMES))
    parser.add_argument("--tokens", type=parse_numbers, default=TOKENS)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", type=Path, help="write rows and the environment to this file")
    parser.add_argument("--time-limit", type=float, default=1e9, help="begin no cell after (s)")
    parser.add_argument(
        "--warm", action="store_true", help="compile kernels only: one layer, called eagerly"
    )
    return parser.parse_args()


def run_shape(
    shape: tuple[int, ...], scheme: str, options: argparse.Namespace, deadline: float
) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of tokens, or one row with an error."""
    experts, top_k, hidden, intermediate = shape
    quant, checkpoint_format, activation = SCHEMES[scheme]
    sizes = {"experts": experts, "top_k": top_k, "hidden": hidden, "intermediate": intermediate}
    row: dict[str, Any] = {**sizes, "scheme": scheme, "layers": options.layers}
    try:
        problem = Problem(
            tokens=max(options.tokens), **sizes, quant=quant, activation=activation,
            bias=activation == "swiglu_oai",
        )  # fmt: skip
        stacks = make_stacks(problem, checkpoint_format, 1 if options.warm else options.layers)
        row |= {f"{side}_class": stacks[side].classes for side in SIDES}
        print(f"{scheme}: {row['plugin_class']}, vLLM: {row['vllm_class']}", flush=True)
        generator = torch.Generator(DEVICE).manual_seed(2)
        x_TH = torch.randn(problem.tokens, hidden, device=DEVICE, generator=generator)
        x_TH = x_TH.to(problem.dtype)
    except Exception as error:  # noqa: BLE001 (other shapes and schemes are still measured)
        yield row | {"error": f"{type(error).__name__}: {error}"}
        return
    # The numbers of tokens are in descending order, so that vLLM's workspace grows only once.
    for tokens in sorted(options.tokens, reverse=True):
        if time.monotonic() > deadline:
            yield row | {"tokens": tokens, "error": "not measured: --time-limit"}
            continue
        try:
            if options.warm:
                for stack in stacks.values():
                    with set_vllm_context(tokens):
                        stack.run(x_TH[:tokens].clone())
                torch.cuda.synchronize()
                continue
            yield row | {"tokens": tokens} | measure(stacks, x_TH[:tokens].clone(), options.rounds)
        except Exception as error:  # noqa: BLE001 (other shapes and schemes are still measured)
            yield row | {"tokens": tokens, "error": f"{type(error).__name__}: {error}"}


def main() -> None:
    options = parse_arguments()
    deadline = time.monotonic() + options.time_limit
    rows = []
    print(
        f"{'shape':22} {'scheme':14} {'T':>5} {'plugin t/s':>11} {'vLLM t/s':>11}  ratio     diff"
    )
    with vllm_process(device=DEVICE):
        get_current_vllm_config().scheduler_config.max_num_batched_tokens = max(options.tokens)
        register()
        for shape in options.shape or SHAPES:
            for scheme in options.scheme or DEFAULT_SCHEMES:
                for row in run_shape(parse_numbers(shape), scheme, options, deadline):
                    rows.append(row)
                    print(format_row(row), flush=True)
                get_current_vllm_config().compilation_config.static_forward_context.clear()
                gc.collect()
                torch.cuda.empty_cache()
        if options.json:
            environment = collect_environment(torch.device(DEVICE), " ".join(sys.argv))
            report = {"vllm": vllm.__version__, "environment": environment, "rows": rows}
            options.json.write_text(json.dumps(report, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
