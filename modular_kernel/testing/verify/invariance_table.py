"""Measure which experts components ("parts") are batch invariant, and for which schemes.

A call is batch invariant if the output bits of a token do not depend on the other tokens of the
call. docs/batch-invariance.md shows the table. It has two rows per experts part, without and with
`batch_invariant` in the problem, and a column for each scheme or dtype.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from modular_kernel.catalog import check, load_catalog
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.testing.cases.lists import Case
from modular_kernel.testing.verify.invariance import run_regrouped_calls, view_output_bytes
from modular_kernel.testing.verify.trial import Trial

LAYER = Problem(tokens=64, hidden=256, intermediate=192, experts=4, top_k=2)
COLUMNS: dict[str, dict[str, object]] = {
    "float32": {"dtype": torch.float32},
    "bfloat16": {},
    "fp8 channel": {"quant": "fp8_w8a8_channel"},
    "fp8 block": {"quant": "fp8_w8a8_block:block=64x64"},
    "int8 channel": {"quant": "int8_w8a8_channel"},
    "int4 group": {"quant": "int4_w4a16_group:group=64"},
    "mxfp4": {"quant": "mxfp4_w4a16"},
    "fp8 tensor": {"quant": "fp8_w8a8_tensor"},
}


@dataclass(frozen=True)
class InvarianceRow:
    """The measurement of one pairing in one column of the table.

    Attributes:
        prepare_finalize, experts: names of the parts.
        column: a key of COLUMNS.
        batch_invariant: whether the problem requires batch invariance.
        num_changed: number of output rows whose bits depend on the call; None if the pairing
            refuses the problem.
        num_tokens: number of output rows.
    """

    prepare_finalize: str
    experts: str
    column: str
    batch_invariant: bool
    num_changed: int | None
    num_tokens: int

    @property
    def cell(self) -> str:
        return "refused" if self.num_changed is None else f"{self.num_changed} of {self.num_tokens}"


def measure_invariance(machine: Machine, layer: Problem = LAYER) -> Iterator[InvarianceRow]:
    """Measure every pairing on one rank in every column, without and with `batch_invariant`.

    Pairings that refuse `layer` itself are left out. `num_changed` is None where a pairing refuses
    the problem of a column.
    """
    catalog = load_catalog()
    for pf in catalog.names("prepare_finalize"):
        for experts in catalog.names("experts"):
            if not check(pf, experts, layer, machine).ok:
                continue
            for batch_invariant in (False, True):
                for column, changes in COLUMNS.items():
                    problem = replace(layer, batch_invariant=batch_invariant, **changes)  # type: ignore[arg-type]
                    num_changed = None
                    if check(pf, experts, problem, machine).ok:
                        num_changed = count_call_dependent_rows(Case(pf, experts, problem), machine)
                    yield InvarianceRow(
                        pf, experts, column, batch_invariant, num_changed, layer.tokens
                    )


def count_call_dependent_rows(case: Case, machine: Machine) -> int:
    """Count the tokens whose output bits change in any of the `run_regrouped_calls`."""
    trial = Trial(case, machine)
    expected = view_output_bytes(trial.eager_output)
    is_changed = torch.zeros(len(expected), dtype=torch.bool, device=expected.device)
    for _, rows in run_regrouped_calls(trial):
        is_changed |= (view_output_bytes(rows) != expected).any(1)
    return int(is_changed.sum())


def format_markdown(table_rows: list[InvarianceRow]) -> str:
    columns = list(dict.fromkeys(row.column for row in table_rows))
    lines = [
        f"| experts | `batch_invariant` | {' | '.join(columns)} |",
        "|---|---" + "|---" * len(columns) + "|",
    ]
    for experts, batch_invariant in dict.fromkeys(
        (row.experts, row.batch_invariant) for row in table_rows
    ):
        cells = {
            row.column: row.cell
            for row in table_rows
            if (row.experts, row.batch_invariant) == (experts, batch_invariant)
        }
        cell_text = " | ".join(cells.get(column, "") for column in columns)
        lines.append(f"| `{experts}` | {'yes' if batch_invariant else 'no'} | {cell_text} |")
    return "\n".join(lines) + "\n"
