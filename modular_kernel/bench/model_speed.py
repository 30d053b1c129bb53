"""Measures tokens per second of a transformers model in prefill and decoding (`mk bench --hf`).

transformers can compute the experts of a model with several implementations: its own ("eager",
"grouped_mm") and ours. Before an implementation is timed, it runs the model's first experts module
on inputs that were recorded with "eager". The recorded inputs include the routing, so that rounding
cannot change it. If the error exceeds its bound, the implementation is WRONG and is not timed.
"""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from modular_kernel.errors import IncompatibleError
from modular_kernel.machine import prefer_torch_reference
from modular_kernel.measure.timing import make_clock

OK, WRONG, FAILED = "ok", "WRONG", "failed"
EAGER = "eager"
_WARMUP_RUNS, _TIMED_RUNS = 1, 5


@dataclass(frozen=True)
class Workload:
    """The work to time: prefill, and then decoding.

    batch: number of sequences.
    prompt: tokens per sequence in the prefill.
    new: decoded tokens per sequence.
    """

    batch: int
    prompt: int
    new: int


@dataclass(frozen=True)
class Implementation:
    """An experts implementation that is registered with transformers.

    name: name in the table.
    registered: name in transformers.
    torch_references: whether operations run as their torch references instead of Triton kernels.
    """

    name: str
    registered: str
    torch_references: bool = False


@dataclass(frozen=True)
class ModelSpeed:
    """Measured speed and error of one implementation.

    experts: name of the implementation.
    prefill, decode: median tokens per second of the whole batch; None if not timed.
    error: relative error of the first experts module, compared with "eager".
    bound: maximum allowed `error`.
    note: reason for a failure.
    """

    experts: str
    status: str
    prefill: float | None = None
    decode: float | None = None
    error: float | None = None
    bound: float | None = None
    note: str = ""


@dataclass(frozen=True)
class _RecordedCall:
    """A call of an experts module that was recorded with the implementation "eager"."""

    module: torch.nn.Module
    arguments: tuple[torch.Tensor, ...]
    result: torch.Tensor

    @property
    def bound(self) -> float:
        """Error bound: four roundings in the result's dtype, plus the rounding of float32 sums.

        The error of sums grows with the square root of the number of terms of the longest dot
        product.
        """
        terms = max(max(p.shape[-2:]) for p in self.module.parameters() if p.dim() > 2)
        rounding = torch.finfo(self.result.dtype).eps
        return 4 * rounding + torch.finfo(torch.float32).eps * math.sqrt(terms)

    def measure_error(self) -> float:
        """Run the module on the recorded inputs, and return the relative error of its result."""
        result = self.module(*self.arguments).double()
        expected = self.result.double()
        return float((result - expected).norm() / expected.norm())


def measure(
    model: Any, workload: Workload, implementations: Sequence[Implementation]
) -> list[ModelSpeed]:
    """Time a transformers model with each implementation, and return a row for each.

    If an implementation raises an exception, the note of its row describes the exception. The model
    uses "eager" afterwards.
    """
    ids = _draw_prompt(model, workload)
    rows = []
    with torch.inference_mode():
        recorded = _record_call(model, ids)
        for implementation in implementations:
            try:
                rows.append(_measure_implementation(model, ids, workload, recorded, implementation))
            except IncompatibleError as error:
                note = " ".join(str(error).split())
                rows.append(ModelSpeed(implementation.name, FAILED, note=note))
            except Exception as error:  # noqa: BLE001 (model code can raise anything)
                note = " ".join(f"{type(error).__name__}: {error}".split())
                rows.append(ModelSpeed(implementation.name, FAILED, note=note[:300]))
        model.set_experts_implementation(EAGER)
    return rows


def _draw_prompt(model: Any, workload: Workload) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (workload.batch, workload.prompt)
    ids = torch.randint(model.config.vocab_size, shape, generator=generator)
    return ids.to(model.device)


def _record_call(model: Any, ids: torch.Tensor) -> _RecordedCall:
    from modular_kernel.integrations.transformers.modules import is_dispatched

    module = next(submodule for submodule in model.modules() if is_dispatched(submodule))
    calls: list[_RecordedCall] = []

    def record(_: object, arguments: tuple[torch.Tensor, ...], result: torch.Tensor) -> None:
        copies = tuple(argument.clone() for argument in arguments)
        calls.append(_RecordedCall(module, copies, result.clone()))

    model.set_experts_implementation(EAGER)
    handle = module.register_forward_hook(record)
    try:
        model(input_ids=ids, use_cache=False)
    finally:
        handle.remove()
    return calls[0]


def _measure_implementation(
    model: Any,
    ids: torch.Tensor,
    workload: Workload,
    recorded: _RecordedCall,
    implementation: Implementation,
) -> ModelSpeed:
    model.set_experts_implementation(implementation.registered)
    with ExitStack() as stack:
        stack.enter_context(prefer_torch_reference(enabled=implementation.torch_references))
        error, bound = recorded.measure_error(), recorded.bound
        row = ModelSpeed(implementation.name, OK, error=error, bound=bound)
        if not error <= bound:
            return replace(row, status=WRONG, note=f"error {error:.1e}, bound {bound:.1e}")
        prefills, decodes = zip(
            *(_time_once(model, ids, workload) for _ in range(_WARMUP_RUNS + _TIMED_RUNS)),
            strict=True,
        )
    prompt_tokens, new_tokens = workload.batch * workload.prompt, workload.batch * workload.new
    return replace(
        row,
        prefill=prompt_tokens / median(prefills[_WARMUP_RUNS:]),
        decode=new_tokens / median(decodes[_WARMUP_RUNS:]),
    )


def _time_once(model: Any, ids: torch.Tensor, workload: Workload) -> tuple[float, float]:
    """Return the seconds of one prefill and of decoding all new tokens."""
    from transformers import StaticCache

    clock = make_clock(model.device)
    cache = StaticCache(config=model.config, max_cache_len=workload.prompt + workload.new)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = model(input_ids=tokens, past_key_values=cache).logits
        return logits[:, -1:].argmax(-1)

    start = clock.mark()
    next_ids = step(ids)
    middle = clock.mark()
    for _ in range(workload.new):
        next_ids = step(next_ids)
    end = clock.mark()
    clock.wait()
    return clock.ms(start, middle) / 1e3, clock.ms(middle, end) / 1e3
