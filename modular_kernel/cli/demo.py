"""`mk demo`: runs four small models with the experts of transformers and with ours.

It then runs quantized checkpoints of the same model families (see `demo_checkpoints`).

Accuracy criterion: the logits are compared with a float64 copy of the model with the same weights
and the same routing. With our experts, the error may be at most twice the error with the experts of
transformers in the same dtype, plus the rounding error of the largest logit.
"""

import copy
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Literal

from click.exceptions import Exit

from modular_kernel.cli import output
from modular_kernel.cli.check import make_matrix_record
from modular_kernel.cli.command import option
from modular_kernel.cli.demo_checkpoints import CHECKPOINTS, run_checkpoints
from modular_kernel.cli.demo_models import (
    EAGER,
    SMALL_MODELS,
    Model,
    build_small_model,
    import_transformers,
)
from modular_kernel.cli.demo_output import CheckpointRow, DemoRow, print_demo
from modular_kernel.cli.machine_setup import prepare_host
from modular_kernel.cli.options import AsJson, ProblemOptions
from modular_kernel.errors import ConfigurationError
from modular_kernel.settings import enable_interpreter

if TYPE_CHECKING:
    import torch

    from modular_kernel.spec.problem import Machine

Tokens = tuple[int, ...]
Pair = tuple[str, str]

# For each activation format (standard, then batched): a pairing in torch and a pairing with Triton.
PAIRINGS = (
    ("MoEPrepareAndFinalizeNoEP", "TorchExperts"),
    ("MoEPrepareAndFinalizeNoEP", "TritonExperts"),
    ("BatchedPrepareAndFinalize", "NaiveBatchedExperts"),
    ("BatchedPrepareAndFinalize", "BatchedTritonExperts"),
)
PROMPT_TOKENS = 17
NEW_TOKENS = 32
_LOGIT_TOKENS = 24
# Maximum ratio of our logit error to the error of transformers' eager experts. The maximum of many
# rounding errors varies: in 576 correct runs the ratio was at most 1.77, and between
# implementations of transformers at most 1.43 (H200, 24 seeds, 2026-11).
_MAX_ERROR_RATIO = 2


@dataclass(frozen=True)
class Baseline:
    """A model and its results with the experts of transformers.

    ids: (2, tokens) token ids on the device of the model.
    exact: logits in float64.
    baseline_error: maximum absolute error of the logits in the dtype of the model.
    routing: routing of each experts module in the float64 run.
    """

    model: Model
    ids: "torch.Tensor"
    exact: "torch.Tensor"
    baseline_error: float
    routing: "RoutingRecorder"


@dataclass
class RoutingRecorder:
    """Records the routing in one run of a model, and replays it in other runs.

    by_module: (top-k ids, top-k weights) by the name of the experts module.
    """

    by_module: "dict[str, tuple[torch.Tensor, torch.Tensor]]" = field(default_factory=dict)

    def record(self, model: Model) -> AbstractContextManager[None]:
        """Return a context that records the routing of the calls of a model."""

        def record_call(name: str, module: object, args: tuple[Any, ...]) -> None:
            self.by_module[name] = args[1], args[2]

        return _hook_experts(model, record_call)

    def replay(self, model: Model) -> AbstractContextManager[None]:
        """Return a context that replaces the routing of a model with the recorded routing.

        Otherwise, rounding would change the routing of tokens whose scores are nearly equal.
        """

        def replace_routing(name: str, module: object, args: tuple[Any, ...]) -> tuple[Any, ...]:
            ids, weights = self.by_module[name]
            return args[0], ids, weights.to(args[2].dtype)

        return _hook_experts(model, replace_routing)


def demo(
    *,
    device: Annotated[
        Literal["cuda", "cpu"] | None, option("Run on this device.  [default: the GPU, if any]")
    ] = None,
    dtype: Annotated[
        str | None, option("Compare only in this dtype: float32, float16 or bfloat16.")
    ] = None,
    as_json: AsJson = None,
) -> None:
    """Run four small models with transformers' experts and with ours, and compare the results.

    The models are Mixtral, Qwen3-MoE, DeepSeek-V3 and gpt-oss with random weights; nothing is
    downloaded. Logits are compared in each dtype. Greedily decoded tokens are compared in float32,
    where rounding does not change the chosen token. Then tiny quantized checkpoints of the same
    families are written to a temporary folder, and loaded without dequantization. Their layers are
    compared with a float64 reference.

    Exits with 1 if any comparison fails.
    """
    machine = _select_machine(device)
    from modular_kernel.catalog import load_catalog
    from modular_kernel.perf_model.verdicts import judge_pairs
    from modular_kernel.spec.problem import dtype_name, parse_dtype

    dtypes = [dtype_name(parse_dtype(dtype))] if dtype else ["float32", "bfloat16"]
    start = time.perf_counter()
    pairings = [pair for pair in PAIRINGS if _is_available(*pair, machine)]
    num_runs = len(pairings) * len(SMALL_MODELS) * len(dtypes) + len(
        _select_standard_format(pairings)
    ) * len(CHECKPOINTS)
    rows, checkpoints = list[DemoRow](), list[CheckpointRow]()
    status = output.show_activity(lambda: f"run {len(rows) + len(checkpoints) + 1} of {num_runs}")
    with (
        nullcontext() if sys.stderr.isatty() else status,
        nullcontext(_ignore_step)
        if as_json == output.STDOUT
        else output.show_steps(num_runs, "runs") as report,
    ):
        for row in _run_models(machine, pairings, dtypes, report):
            rows.append(row)
        for checkpoint in _run_checkpoints(machine, pairings, report):
            checkpoints.append(checkpoint)
    seconds = time.perf_counter() - start
    rates = _measure_rates(dtypes[-1], machine) if rows else {}
    problem = ProblemOptions().problem()
    verdicts = judge_pairs(load_catalog(), None, None, problem, machine)
    record = {
        "machine": machine,
        "rows": [_make_record(row) for row in rows],
        "checkpoints": [_make_record(row) for row in checkpoints],
        "tokens_per_second": rates,
        "matrix": make_matrix_record(verdicts, problem, machine),
    }
    interpreted_parts = _list_interpreted_parts(pairings, machine)
    output.print_result(
        record,
        as_json,
        lambda: print_demo(rows, checkpoints, seconds, rates, verdicts, interpreted_parts),
    )
    passed = [row.ok for row in rows] + [row.ok for row in checkpoints]
    if not rows or not checkpoints or not all(passed):
        raise Exit(1)


def _make_record(row: DemoRow | CheckpointRow) -> dict[str, object]:
    return {**output.to_json_types(row), "ok": row.ok}  # type: ignore[dict-item]


def _select_machine(device: Literal["cuda", "cpu"] | None) -> "Machine":
    if device == "cpu":
        enable_interpreter()
    prepare_host(quiet=device == "cpu")
    from modular_kernel.catalog import this_machine

    machine = this_machine(device="cpu" if device == "cpu" else None)
    if device == "cuda" and machine.device != "cuda":
        raise ConfigurationError("--device", got="cuda", need="cpu: there is no CUDA device")
    return machine


def _ignore_step(_: str) -> None:
    """Ignore the description of a completed step."""


def _run_models(
    machine: "Machine",
    pairings: Sequence[Pair],
    dtypes: list[str],
    report_step: Callable[[str], None],
) -> Iterator[DemoRow]:
    try:
        from modular_kernel.integrations.transformers import register
    except ImportError as error:
        output.print_note(f"error: {error}")
        raise Exit(2) from None
    import_transformers().logging.set_verbosity_error()
    for pair in pairings:
        register(*pair, name=" x ".join(pair))
    for dtype in dtypes:
        for name in SMALL_MODELS:
            baseline = run_baseline(build_small_model(name, dtype, machine.device))
            baseline_tokens = decode_greedily(baseline) if dtype == "float32" else None
            for pair in pairings:
                row = compare_with_baseline(baseline, " x ".join(pair), name, baseline_tokens)
                report_step(f"{name} {dtype} on {row.pairing}: {row.seconds:.1f} s")
                yield row


def _select_standard_format(pairings: Sequence[Pair]) -> list[Pair]:
    return [pair for pair in pairings if pair in PAIRINGS[:2]]


def _run_checkpoints(
    machine: "Machine", pairings: Sequence[Pair], report_step: Callable[[str], None]
) -> Iterator[CheckpointRow]:
    """Run the quantized checkpoints on pairings that together support all of their schemes."""
    for row in run_checkpoints(_select_standard_format(pairings), machine.device):
        report_step(f"{row.model} {row.stored} on {row.pairing}: {row.seconds:.1f} s")
        yield row


def _measure_rates(dtype: str, machine: "Machine") -> dict[str, float]:
    """Measure the tokens per second of forward passes over 512 tokens.

    The implementations are timed alternately. Returns the rates of ours and of the fastest
    implementation of transformers.
    """
    import torch

    from modular_kernel.integrations.transformers import register

    model = build_small_model("mixtral", dtype, machine.device)
    ids = torch.randint(model.config.vocab_size, (8, 64), device=model.device)
    ours = register()
    label_by_name = {name: f"transformers' {name}" for name in (EAGER, "grouped_mm", "batched_mm")}
    times_by_name: dict[str, list[float]] = {name: [] for name in (*label_by_name, ours)}
    with torch.inference_mode():
        for _ in range(6):
            for name, seconds in times_by_name.items():
                model.set_experts_implementation(name)
                seconds.append(_time_forward(model, ids))
    rate_by_name = {
        name: ids.numel() / median(seconds[1:]) for name, seconds in times_by_name.items()
    }
    fastest = max(label_by_name, key=rate_by_name.__getitem__)
    return {label_by_name[fastest]: rate_by_name[fastest], ours: rate_by_name[ours]}


def _time_forward(model: Model, ids: "torch.Tensor") -> float:
    from modular_kernel.measure.timing import make_clock

    clock = make_clock(model.device)
    start = clock.mark()
    model(input_ids=ids, use_cache=False)
    end = clock.mark()
    clock.wait()
    return clock.ms(start, end) / 1e3


def _is_available(prepare_finalize: str, experts: str, machine: "Machine") -> bool:
    """Return whether both parts can run on this machine, and print the reasons if they cannot.

    A refusal for any other reason is not expected, and makes the demo fail later.
    """
    from modular_kernel.catalog import load_catalog
    from modular_kernel.compatibility.rules import judge_part

    catalog = load_catalog()
    parts = catalog.prepare_finalize(prepare_finalize), catalog.experts(experts)
    reasons = [r for part in parts for r in judge_part(part.__name__, part.requires, machine)]
    if reasons:
        output.print_note(
            f"not run: {prepare_finalize} x {experts}: {'; '.join(map(str, reasons))}"
        )
    return not reasons


def _list_interpreted_parts(pairings: Sequence[Pair], machine: "Machine") -> list[str]:
    """Return the names of the experts that ran in Triton's interpreter."""
    from modular_kernel.catalog import needs_triton

    return [pair[1] for pair in pairings if machine.interpreter and needs_triton(*pair)]


def run_baseline(model: Model) -> Baseline:
    """Run a model with the experts of transformers, in float64 and in the dtype of the model."""
    import torch

    generator = torch.Generator().manual_seed(1)
    vocabulary = model.config.vocab_size
    ids = torch.randint(vocabulary, (2, _LOGIT_TOKENS), generator=generator).to(model.device)
    routing = RoutingRecorder()
    exact_model = copy.deepcopy(model).double()
    with routing.record(exact_model), _compute_in_float64():
        exact = compute_logits(exact_model, ids)
    with routing.replay(model):
        baseline_error = (compute_logits(model, ids) - exact).abs().max().item()
    return Baseline(model, ids, exact, baseline_error, routing)


def compare_with_baseline(
    baseline: Baseline, implementation: str, name: str, baseline_tokens: Tokens | None
) -> DemoRow:
    """Run the model of `baseline` with another experts implementation, and compare the results.

    Afterwards, the model uses the eager experts of transformers again.

    implementation: name under which the implementation is registered with transformers.
    name: name of the model.
    baseline_tokens: tokens decoded with the experts of transformers. None skips decoding.
    """
    import torch

    from modular_kernel.integrations.transformers import registration

    start = time.perf_counter()
    kernels = registration(implementation).kernels
    kernels.clear()
    baseline.model.set_experts_implementation(implementation)
    with baseline.routing.replay(baseline.model):
        difference = (
            (compute_logits(baseline.model, baseline.ids) - baseline.exact).abs().max().item()
        )
    equal = None
    if baseline_tokens is not None:
        tokens = decode_greedily(baseline, len(baseline_tokens))
        equal = sum(
            token == expected for token, expected in zip(tokens, baseline_tokens, strict=True)
        )
    baseline.model.set_experts_implementation(EAGER)
    dtype = baseline.model.dtype
    rounding = torch.finfo(dtype).eps / 2 * baseline.exact.abs().max().item()
    return DemoRow(
        model=name,
        dtype=str(dtype).removeprefix("torch."),
        pairing=" and ".join(sorted({kernel.pairing for kernel in kernels.values()})),
        difference=difference,
        bound=_MAX_ERROR_RATIO * baseline.baseline_error + rounding,
        equal_tokens=equal,
        decoded_tokens=len(baseline_tokens or ()),
        seconds=time.perf_counter() - start,
    )


def compute_logits(model: Model, ids: "torch.Tensor") -> "torch.Tensor":
    """Return the logits (B, tokens, vocabulary) of ids (B, tokens), converted to float64."""
    import torch

    with torch.inference_mode():
        result: torch.Tensor = model(input_ids=ids, use_cache=False).logits.double()
    return result


def decode_greedily(baseline: Baseline, count: int = NEW_TOKENS) -> Tokens:
    """Return `count` greedily decoded tokens after a fixed prompt."""
    prompt = baseline.ids[:1, :PROMPT_TOKENS]
    output_ids = baseline.model.generate(prompt, max_new_tokens=count, do_sample=False)
    return tuple(output_ids[0, PROMPT_TOKENS:].tolist())


@contextmanager
def _hook_experts(model: Model, hook: Any) -> Iterator[None]:
    """Register `hook(name, module, args)` as a forward pre-hook of every experts module."""
    handles = [
        module.register_forward_pre_hook(partial(hook, name))
        for name, module in model.named_modules()
        if hasattr(module, "down_proj") and hasattr(module, "has_gate")
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _compute_in_float64() -> AbstractContextManager[object]:
    """Return a context that replaces float32 with float64 in torch calls.

    The norms of transformers convert to float32 even if the model is in float64.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    def to_float64(value: object) -> object:
        return torch.float64 if value is torch.float32 else value

    class Float64(TorchFunctionMode):
        def __torch_function__(
            self,
            func: Callable[..., object],
            types: object,
            args: Sequence[object] = (),
            kwargs: Mapping[str, object] | None = None,
        ) -> object:
            if func is torch.Tensor.float:
                func = torch.Tensor.double
            converted_kwargs = {name: to_float64(value) for name, value in (kwargs or {}).items()}
            return func(*map(to_float64, args), **converted_kwargs)

    return Float64()
