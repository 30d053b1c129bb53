"""Check how operations divide their work among programs, by comparing launches with a record.

The host code of an operation chooses tiles and the number of programs. A wrong choice gives right
results more slowly, so no comparison of values detects it. The choices were measured on GPUs. This
check makes the launches of problems of the size of models on tensors without memory, runs nothing,
and compares grids and compile-time constants with launch_plans.json. The record of a launch also
has its stage, which profiles show. The following command records a deliberate change of a plan.

    TRITON_INTERPRET=1 python -m modular_kernel.testing.verify.launch_plans

`planned_calls` lists the calls of operations and exchange parts, and `planned_layers` those of
layers on the Triton experts, with their buffers. All calls are planned for a device whose number of
SMs is unknown. Layers of a part with paths from other packages are neither compared nor recorded,
because such a path may run some of their calls.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context
from functools import cache, partial
from pathlib import Path
from typing import Any

from modular_kernel.errors import StateError
from modular_kernel.replay import stages
from modular_kernel.replay.launch.runtime import patch_interpreter
from modular_kernel.testing.cases.path_coverage import find_external_paths
from modular_kernel.testing.verify.planned_calls import list_calls
from modular_kernel.testing.verify.planned_layers import (
    list_layers,
    list_refusals,
    plan_layer,
)

_PATH = Path(__file__).with_suffix(".json")
_LAUNCH_OPTIONS = ("num_warps", "num_stages")

Plan = list[str]  # a line for each launch


@contextmanager
def record_launches() -> Iterator[Plan]:
    """Inside the block, record the launches of interpreted kernels instead of running them."""
    from triton.runtime.interpreter import InterpretedFunction

    lines: Plan = []
    entered_stages: list[str] = []
    run = InterpretedFunction.run

    @contextmanager
    def enter_stage(name: str) -> Iterator[None]:
        entered_stages.append(name)
        yield
        entered_stages.pop()

    def record(
        self: Any, *_args: object, grid: tuple[int, ...], warmup: bool, **kwargs: Any
    ) -> None:
        del warmup
        constants = {
            name: value
            for name, value in kwargs.items()
            if (name.isupper() or name in _LAUNCH_OPTIONS) and isinstance(value, int | str)
            if value is not False
        }
        formatted_constants = " ".join(
            f"{name}={value}" for name, value in sorted(constants.items())
        )
        stage = f"{entered_stages[-1].removeprefix(stages.PREFIX)}: " if entered_stages else ""
        lines.append(f"{stage}{self.fn.__name__}{list(grid)} {formatted_constants}")

    InterpretedFunction.run = record
    try:
        with stages.watch_stages(enter_stage):
            yield lines
    finally:
        InterpretedFunction.run = run


def make_plan(call: Callable[[], object]) -> Plan:
    """Return a line for each launch of a call."""
    with record_launches() as lines:
        call()
    return lines


def list_plans() -> Iterator[tuple[str, Callable[[], Plan]]]:
    """Yield the name of each recorded call, and a function that makes its plan."""
    for name, call in list_calls().items():
        yield name, partial(make_plan, call)
    for name, pair, problem in list_layers():
        yield name, partial(plan_layer, pair, problem, make_plan)
    for name, lines in list_refusals():
        yield name, lines.copy


@cache
def find_changed_plans() -> tuple[str, ...]:
    """Return a message for each call whose launches differ from the record."""
    if not patch_interpreter():
        return ()
    recorded, changed = json.loads(_PATH.read_text(encoding="utf-8")), list[str]()
    # The calls of these layers may run on a path that the record does not know.
    ignored = {name for name, (_, experts), _ in list_layers() if find_external_paths(experts)}
    # An empty context hides overrides of launch configurations that surround the case.
    plans = Context().run(
        lambda: {name: make() for name, make in list_plans() if name not in ignored}
    )
    for name in dict.fromkeys((*plans, *recorded)):
        if name in ignored:
            continue
        plan, need = plans.get(name, []), recorded.get(name, [])
        line_pairs = zip([*plan, *[""] * len(need)], [*need, *[""] * len(plan)], strict=False)
        difference = next(
            ((got, recorded_line) for got, recorded_line in line_pairs if got != recorded_line),
            None,
        )
        if difference is not None:
            changed.append(f"{name}: plans {difference[0]!r}, recorded {difference[1]!r}")
    return tuple(changed)


def _write_record() -> None:
    """Write the record. Raise StateError if a package provides paths for one of the parts."""
    for experts in dict.fromkeys(experts for _, (_, experts), _ in list_layers()):
        external = find_external_paths(experts)
        if external:
            got = f"{', '.join(sorted(external))} from other packages"
            raise StateError(f"paths of {experts}", got=got, need="built-in paths only")
    plans = {name: make() for name, make in list_plans()}
    _PATH.write_text(json.dumps(plans, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    patch_interpreter()
    _write_record()
