"""Check how operations divide their work among programs, by comparing launches with a record.

The host code of an operation chooses tiles and the number of programs. A wrong choice gives right
results more slowly, so no comparison of values detects it. The choices were measured on GPUs. This
check makes the launches of problems of the size of models on tensors without memory, runs nothing,
and compares grids and compile-time constants with launch_plans.json. A deliberate change of a plan
is recorded with

    TRITON_INTERPRET=1 python -m modular_kernel.testing.verify.launch_plans

Plans are those of a device without a known number of SMs, and include no kernel of an experts part.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from modular_kernel.catalog import load_catalog
from modular_kernel.contracts import PrepareAndFinalize
from modular_kernel.ops.quantize import quantize_rows, quantize_specs, take_quantized
from modular_kernel.ops.valid_rows import BatchedRows
from modular_kernel.replay.launch.runtime import patch_interpreter
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.testing.cases.scenario_names import is_builtin
from modular_kernel.workspace import Workspace

_META = torch.device("meta")
_PATH = Path(__file__).with_suffix(".json")
_OPTIONS = ("num_warps", "num_stages")
_NUM_TOKENS = (1, 17)  # of calls with few tokens

Plan = list[str]  # a line for each launch


@contextmanager
def record_launches() -> Iterator[Plan]:
    """Inside the block, record the launches of interpreted kernels instead of running them."""
    from triton.runtime.interpreter import InterpretedFunction

    lines: Plan = []
    run = InterpretedFunction.run

    def record(
        self: Any, *_args: object, grid: tuple[int, ...], warmup: bool, **kwargs: Any
    ) -> None:
        del warmup
        constants = {
            name: value
            for name, value in kwargs.items()
            if (name.isupper() or name in _OPTIONS) and isinstance(value, int | str)
        }
        text = " ".join(f"{name}={value}" for name, value in sorted(constants.items()))
        lines.append(f"{self.fn.__name__}{list(grid)} {text}")

    InterpretedFunction.run = record
    try:
        yield lines
    finally:
        InterpretedFunction.run = run


def _quantize(
    scheme_text: str, tokens: int, hidden: int, stride: int, dtype: torch.dtype, segments: int = 1
) -> None:
    """Quantize rows that are `stride` values apart."""
    scheme = QuantScheme.parse(scheme_text)
    specs = quantize_specs("x", scheme, tokens, hidden, segments=segments)
    static_scale = torch.empty(1, device=_META) if scheme.static else None
    out = take_quantized(
        Workspace(specs, _META),
        "x",
        scheme,
        (tokens, hidden),
        segments=segments,
        static_scale=static_scale,
    )
    x_TH = torch.empty(tokens, stride, dtype=dtype, device=_META)[:, :hidden]
    counts_e = torch.empty(segments, dtype=torch.int32, device=_META)
    quantize_rows(x_TH, scheme, out=out, valid_rows=BatchedRows(counts_e) if segments > 1 else None)


_SCHEMES = (
    "fp8_w8a8_block",
    "fp8_w8a8_channel",
    "fp8_w8a8_tensor",
    "fp8_w8a8_tensor:static=true",
    "int8_w8a8_block:block=96x96",
)
# Tokens, columns, stride of the rows, dtype, and segments.
_ROWS: tuple[tuple[Any, ...], ...] = (
    (1, 7168, 7168, torch.bfloat16),
    (64, 2880, 2880, torch.bfloat16),
    (4096, 7168, 7168, torch.bfloat16),
    (4096, 7168, 7175, torch.bfloat16),  # rows that are not aligned to 16 bytes
    (4096, 7168, 7176, torch.bfloat16),
    (4096, 7168, 7168, torch.float32),
    (2048, 7168, 7168, torch.bfloat16, 8),
)


def list_calls() -> Mapping[str, Callable[[], object]]:
    """Return calls on tensors without memory that launch the kernels of our exchange parts."""
    calls: dict[str, Callable[[], object]] = {
        f"quantize {scheme} {' '.join(map(str, rows))}": partial(_quantize, scheme, *rows)
        for scheme in _SCHEMES
        for rows in _ROWS
    }
    catalog = load_catalog()
    for part in map(catalog.prepare_finalize, catalog.names("prepare_finalize")):
        if is_builtin(part):
            calls |= _list_calls_of_part(part)
    return calls


def _list_calls_of_part(part: type[PrepareAndFinalize]) -> dict[str, Callable[[], object]]:
    """Return the calls with which `mk compile` compiles a part, and some with few tokens."""
    calls: dict[str, Callable[[], object]] = {}
    for index, (name, call) in enumerate(part.meta_calls().items()):
        assert isinstance(call, partial)
        prefix, (problem,) = f"{call.func.__module__}.{call.func.__name__}", call.args
        calls[f"{prefix} {name}"] = call
        for tokens in _NUM_TOKENS if index == 0 else ():
            few = replace(problem, tokens=tokens)
            calls[f"{prefix} {name}, T = {tokens}"] = partial(call.func, few, **call.keywords)
    return calls


def make_plan(call: Callable[[], object]) -> Plan:
    """Return a line for each launch of a call."""
    with record_launches() as lines:
        call()
    return lines


@cache
def find_changed_plans() -> tuple[str, ...]:
    """Return a message for each call whose launches differ from the record."""
    if not patch_interpreter():
        return ()
    recorded, changed = json.loads(_PATH.read_text(encoding="utf-8")), list[str]()
    for name, call in list_calls().items():
        plan, need = make_plan(call), recorded.get(name, [])
        pairs = zip([*plan, *[""] * len(need)], [*need, *[""] * len(plan)], strict=False)
        difference = next(((got, line) for got, line in pairs if got != line), None)
        if difference is not None:
            changed.append(f"{name}: launches {difference[0]!r}, recorded {difference[1]!r}")
    return tuple(changed)


def _write() -> None:
    plans = {name: make_plan(call) for name, call in list_calls().items()}
    _PATH.write_text(json.dumps(plans, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    patch_interpreter()
    _write()
