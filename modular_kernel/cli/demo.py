"""`mk demo`: four small models with transformers' experts and with ours.

After the models, quantized checkpoints of the same families run; see `demo_checkpoints`.

Accuracy criterion: logits are compared with those of a float64 copy of the model with the same
weights and the same routing. The error of our experts may be at most twice that of transformers'
experts in the same dtype, plus one rounding of the largest logit.
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
from modular_kernel.cli.check import matrix_record
from modular_kernel.cli.command import option
from modular_kernel.cli.demo_checkpoints import CHECKPOINTS, checkpoint_rows
from modular_kernel.cli.demo_models import EAGER, SMALL_MODELS, Model, small_model, transformers
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

# A torch and a Triton pairing for each activation format.
PAIRINGS = (
    ("MoEPrepareAndFinalizeNoEP", "TorchExperts"),
    ("MoEPrepareAndFinalizeNoEP", "TritonExperts"),
    ("BatchedPrepareAndFinalize", "NaiveBatchedExperts"),
    ("BatchedPrepareAndFinalize", "BatchedTritonExperts"),
)
PROMPT_TOKENS = 17
NEW_TOKENS = 32
_LOGIT_TOKENS = 24
# Bound on our logit error over that of transformers' eager experts. The maximum of many rounding
# errors varies: in 576 correct runs the ratio was at most 1.77, and between transformers' own
# implementations at most 1.43 (H200, 24 seeds, 2026-11).
_FACTOR = 2


@dataclass(frozen=True)
class Baseline:
    """A model, and the results of transformers' experts.

    ids: (2, tokens) token ids on the model's device. exact: logits in float64. baseline_error:
    maximum absolute error of the logits in the model's dtype. routing: the routing of each experts
    module in the float64 run.
    """

    model: Model
    ids: "torch.Tensor"
    exact: "torch.Tensor"
    baseline_error: float
    routing: "RecordedRouting"


@dataclass
class RecordedRouting:
    """Top-k ids and weights that were passed to each experts module, by its name, in one run."""

    of_module: "dict[str, tuple[torch.Tensor, torch.Tensor]]" = field(default_factory=dict)

    def recorded(self, model: Model) -> AbstractContextManager[None]:
        """Return a context that records the routing of the model's calls."""

        def record_call(name: str, module: object, args: tuple[Any, ...]) -> None:
            self.of_module[name] = args[1], args[2]

        return _hook_experts(model, record_call)

    def replayed(self, model: Model) -> AbstractContextManager[None]:
        """Return a context that replaces the model's routing by the recorded one.

        Without it, rounding would change the routing of tokens whose scores nearly tie.
        """

        def replace_routing(name: str, module: object, args: tuple[Any, ...]) -> tuple[Any, ...]:
            ids, weights = self.of_module[name]
            return args[0], ids, weights.to(args[2].dtype)

        return _hook_experts(model, replace_routing)


def demo(
    *,
    device: Annotated[
        Literal["cuda", "cpu"] | None, option("Run on this device.  [default: the GPU, if any]")
    ] = None,
    dtype: Annotated[str | None, option("Only this dtype: float32, float16 or bfloat16.")] = None,
    as_json: AsJson = None,
) -> None:
    """Run four small models with transformers' experts and with ours, and compare the results.

    The models are Mixtral, Qwen3-MoE, DeepSeek-V3 and gpt-oss with random weights; nothing is
    downloaded. Logits are compared in each dtype. Greedily decoded tokens are compared in float32
    only, where rounding does not change the chosen token. Then tiny quantized checkpoints of the
    same families are written to a temporary folder, loaded without dequantization, and compared
    with a float64 reference.

    Exits with 1 if any row fails.
    """
    machine = _machine(device)
    from modular_kernel.catalog import load_catalog
    from modular_kernel.perf_model.verdicts import judge_pairs
    from modular_kernel.spec.problem import dtype_name, parse_dtype

    dtypes = [dtype_name(parse_dtype(dtype))] if dtype else ["float32", "bfloat16"]
    start = time.perf_counter()
    pairings = [pair for pair in PAIRINGS if _available(*pair, machine)]
    runs = len(pairings) * len(SMALL_MODELS) * len(dtypes) + len(
        _standard_format_pairs(pairings)
    ) * len(CHECKPOINTS)
    rows, checkpoints = list[DemoRow](), list[CheckpointRow]()
    status = output.activity_notes(lambda: f"run {len(rows) + len(checkpoints) + 1} of {runs}")
    with (
        nullcontext() if sys.stderr.isatty() else status,
        nullcontext(_ignore_message)
        if as_json == output.STDOUT
        else output.step_lines(runs, "runs") as report,
    ):
        for row in _model_results(machine, pairings, dtypes, report):
            rows.append(row)
        for checkpoint in _checkpoint_results(machine, pairings, report):
            checkpoints.append(checkpoint)
    seconds = time.perf_counter() - start
    rates = _rates(dtypes[-1], machine) if rows else {}
    problem = ProblemOptions().problem()
    verdicts = judge_pairs(load_catalog(), None, None, problem, machine)
    record = {
        "machine": machine,
        "rows": [_record(row) for row in rows],
        "checkpoints": [_record(row) for row in checkpoints],
        "tokens_per_second": rates,
        "matrix": matrix_record(verdicts, problem, machine),
    }
    slow = _interpreted_parts(pairings, machine)
    output.print_result(
        record, as_json, lambda: print_demo(rows, checkpoints, seconds, rates, verdicts, slow)
    )
    passed = [row.ok for row in rows] + [row.ok for row in checkpoints]
    if not rows or not checkpoints or not all(passed):
        raise Exit(1)


def _record(row: DemoRow | CheckpointRow) -> dict[str, object]:
    return {**output.to_json_types(row), "ok": row.ok}  # type: ignore[dict-item]


def _machine(device: Literal["cuda", "cpu"] | None) -> "Machine":
    if device == "cpu":
        enable_interpreter()
    prepare_host(quiet=device == "cpu")
    from modular_kernel.catalog import this_machine

    machine = this_machine(device="cpu" if device == "cpu" else None)
    if device == "cuda" and machine.device != "cuda":
        raise ConfigurationError("--device", got="cuda", need="cpu: there is no CUDA device")
    return machine


def _ignore_message(_: str) -> None:
    """Ignore a progress message."""


def _model_results(
    machine: "Machine",
    pairings: Sequence[Pair],
    dtypes: list[str],
    report_step: Callable[[str], None],
) -> Iterator[DemoRow]:
    try:
        from modular_kernel.integrations.transformers import register
    except ImportError as error:
        output.note(f"error: {error}")
        raise Exit(2) from None
    transformers().logging.set_verbosity_error()
    for pair in pairings:
        register(*pair, name=" x ".join(pair))
    for dtype in dtypes:
        for name in SMALL_MODELS:
            base = baseline(small_model(name, dtype, machine.device))
            baseline_tokens = greedy_tokens(base) if dtype == "float32" else None
            for pair in pairings:
                row = compare(base, " x ".join(pair), name, baseline_tokens)
                report_step(f"{name} {dtype} on {row.pairing}: {row.seconds:.1f} s")
                yield row


def _standard_format_pairs(pairings: Sequence[Pair]) -> list[Pair]:
    """Return the pairings in the standard format, which together support every scheme."""
    return [pair for pair in pairings if pair in PAIRINGS[:2]]


def _checkpoint_results(
    machine: "Machine", pairings: Sequence[Pair], report_step: Callable[[str], None]
) -> Iterator[CheckpointRow]:
    """Run the quantized checkpoints on the pairings in the standard format."""
    for row in checkpoint_rows(_standard_format_pairs(pairings), machine.device):
        report_step(f"{row.model} {row.stored} on {row.pairing}: {row.seconds:.1f} s")
        yield row


def _rates(dtype: str, machine: "Machine") -> dict[str, float]:
    """Measure the tokens per second of forward passes over 512 tokens, interleaved.

    Returns the rates of transformers' fastest experts implementation, and of ours.
    """
    import torch

    from modular_kernel.integrations.transformers import register

    model = small_model("mixtral", dtype, machine.device)
    ids = torch.randint(model.config.vocab_size, (8, 64), device=model.device)
    ours = register()
    theirs = {name: f"transformers' {name}" for name in (EAGER, "grouped_mm", "batched_mm")}
    times: dict[str, list[float]] = {name: [] for name in (*theirs, ours)}
    with torch.inference_mode():
        for _ in range(6):
            for name, seconds in times.items():
                model.set_experts_implementation(name)
                seconds.append(_time_forward(model, ids))
    speeds = {name: ids.numel() / median(seconds[1:]) for name, seconds in times.items()}
    fastest = max(theirs, key=speeds.__getitem__)
    return {theirs[fastest]: speeds[fastest], ours: speeds[ours]}


def _time_forward(model: Model, ids: "torch.Tensor") -> float:
    """Return the seconds of one forward pass."""
    from modular_kernel.measure.timing import make_clock

    clock = make_clock(model.device)
    start = clock.mark()
    model(input_ids=ids, use_cache=False)
    end = clock.mark()
    clock.wait()
    return clock.ms(start, end) / 1e3


def _available(prepare_finalize: str, experts: str, machine: "Machine") -> bool:
    """Return whether both parts can run on this machine; print the reasons if not.

    Other reasons for a refusal are not expected, and make the demo fail.
    """
    from modular_kernel.catalog import load_catalog
    from modular_kernel.compatibility.rules import judge_part

    catalog = load_catalog()
    parts = catalog.prepare_finalize(prepare_finalize), catalog.experts(experts)
    reasons = [r for part in parts for r in judge_part(part.__name__, part.requires, machine)]
    if reasons:
        output.note(f"not run: {prepare_finalize} x {experts}: {'; '.join(map(str, reasons))}")
    return not reasons


def _interpreted_parts(pairings: Sequence[Pair], machine: "Machine") -> list[str]:
    """Return the experts whose pairings ran in Triton's interpreter."""
    from modular_kernel.catalog import needs_triton

    return [pair[1] for pair in pairings if machine.interpreter and needs_triton(*pair)]


def baseline(model: Model) -> Baseline:
    """Run a model with transformers' experts, in float64 and in the model's dtype."""
    import torch

    generator = torch.Generator().manual_seed(1)
    vocabulary = model.config.vocab_size
    ids = torch.randint(vocabulary, (2, _LOGIT_TOKENS), generator=generator).to(model.device)
    routing = RecordedRouting()
    exact_model = copy.deepcopy(model).double()
    with routing.recorded(exact_model), _float64():
        exact = logits(exact_model, ids)
    with routing.replayed(model):
        baseline_error = (logits(model, ids) - exact).abs().max().item()
    return Baseline(model, ids, exact, baseline_error, routing)


def compare(
    base: Baseline, implementation: str, name: str, baseline_tokens: Tokens | None
) -> DemoRow:
    """Run the model of `base` with another experts implementation, and compare the results.

    The model has transformers' eager experts again afterwards.

    implementation: name under which it is registered with transformers. name: of the model.
    baseline_tokens: tokens decoded with transformers' experts; None skips decoding.
    """
    import torch

    from modular_kernel.integrations.transformers import registration

    start = time.perf_counter()
    kernels = registration(implementation).kernels
    kernels.clear()
    base.model.set_experts_implementation(implementation)
    with base.routing.replayed(base.model):
        difference = (logits(base.model, base.ids) - base.exact).abs().max().item()
    equal = None
    if baseline_tokens is not None:
        tokens = greedy_tokens(base, len(baseline_tokens))
        equal = sum(
            token == expected for token, expected in zip(tokens, baseline_tokens, strict=True)
        )
    base.model.set_experts_implementation(EAGER)
    dtype = base.model.dtype
    rounding = torch.finfo(dtype).eps / 2 * base.exact.abs().max().item()
    return DemoRow(
        model=name,
        dtype=str(dtype).removeprefix("torch."),
        pairing=" and ".join(sorted({kernel.pairing for kernel in kernels.values()})),
        difference=difference,
        bound=_FACTOR * base.baseline_error + rounding,
        equal_tokens=equal,
        decoded_tokens=len(baseline_tokens or ()),
        seconds=time.perf_counter() - start,
    )


def logits(model: Model, ids: "torch.Tensor") -> "torch.Tensor":
    """Return the logits (2, tokens, vocabulary) of ids (2, tokens), converted to float64."""
    import torch

    with torch.inference_mode():
        result: torch.Tensor = model(input_ids=ids, use_cache=False).logits.double()
    return result


def greedy_tokens(base: Baseline, count: int = NEW_TOKENS) -> Tokens:
    """Decode `count` tokens greedily after a fixed prompt."""
    prompt = base.ids[:1, :PROMPT_TOKENS]
    output_ids = base.model.generate(prompt, max_new_tokens=count, do_sample=False)
    return tuple(output_ids[0, PROMPT_TOKENS:].tolist())


@contextmanager
def _hook_experts(model: Model, hook: Any) -> Iterator[None]:
    """Register `hook(name, module, args)` as forward pre-hook of every experts module."""
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


def _float64() -> AbstractContextManager[object]:
    """Return a context that replaces float32 by float64 in torch calls.

    Norms of transformers convert to float32 explicitly, whatever the model's dtype.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    def widen(value: object) -> object:
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
            converted = {name: widen(value) for name, value in (kwargs or {}).items()}
            return func(*map(widen, args), **converted)

    return Float64()
