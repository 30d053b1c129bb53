"""Combinations of two checkpoint features: formats, biases, rank shares, several files, and module
names.

Features that work alone can fail in combination: for example, act-order moves rows of w1, and must
then also move the elements of b1. Each expert's output is compared with float64, so the order of
rows does not matter.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkpoint_values import dequantize_w1_w2

import modular_kernel as mk
from modular_kernel.checkpoints.loading import LoadedExperts
from modular_kernel.models.families import FAMILIES
from modular_kernel.testing.cases.covering import Axis, Row, Space, covering_array
from modular_kernel.testing.checkpoints.published_formats import (
    ACT_ORDER_FORMATS,
    CHECKPOINT_FORMATS,
)
from modular_kernel.testing.checkpoints.samples import Tensors, write

EXPERTS, HIDDEN, INTERMEDIATE = 4, 128, 256
FORMAT_SAMPLES = CHECKPOINT_FORMATS | ACT_ORDER_FORMATS
UNSORTED_FORMATS = (
    "bf16",
    "gptq",
    "gptq, zero points",
    "awq",
    "compressed int4",
    "deepseek fp8",
)
FORMATS = (*UNSORTED_FORMATS, *ACT_ORDER_FORMATS)
PROJECTION = re.compile(r"(.*experts\.(\d+)\.(\w+))\.(weight|qweight|weight_packed)$")
AXES = (
    Axis("kind", FORMATS),
    Axis("family", ("mixtral", "qwen3_moe")),
    Axis("bias", (False, True)),
    Axis("ep", (1, 2)),
    Axis("tp", (1, 2)),
    Axis("shards", (1, 3)),
    Axis("seed", (0, 1)),
)


def name_values(row: Row) -> dict[str, Any]:
    return {axis.name: axis.values[i] for axis, i in zip(AXES, row, strict=True)}


def list_refusals(row: Row) -> tuple[str, ...]:
    values = name_values(row)
    splits_sorted_columns = values["kind"] in ACT_ORDER_FORMATS and values["tp"] > 1
    return ("a share of sorted columns",) if splits_sorted_columns else ()


ARRAY = covering_array(Space(AXES, list_refusals, lambda _row: True, lambda _row: 1.0))
ROWS = [name_values(row) for row in ARRAY.rows]
BIASES: dict[tuple[int, str], torch.Tensor] = {}


def add_biases(tensors: Tensors) -> None:
    """Give each projection of each expert a random bias, and record it in BIASES."""
    BIASES.clear()
    generator = torch.Generator().manual_seed(7)
    for name in list(tensors):
        if match := PROJECTION.match(name):
            base, expert, projection = match.group(1), int(match.group(2)), match.group(3)
            is_down = projection in ("w2", "down_proj")
            bias = torch.randn(HIDDEN if is_down else INTERMEDIATE, generator=generator).to(
                torch.bfloat16
            )
            tensors[f"{base}.bias"] = BIASES[expert, normalize_projection(projection)] = bias


def normalize_projection(projection: str) -> str:
    """Return "gate", "up" or "down" for a projection's name in any family."""
    return {"w1": "gate", "w3": "up", "w2": "down"}.get(projection, projection.split("_")[0])


def compute_expert_output(
    x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, b1: Any, b2: Any
) -> torch.Tensor:
    """Return the float64 output of one expert."""
    gate_up = x @ w1.T + (0 if b1 is None else b1.double())
    gate, up = gate_up.chunk(2, 1)
    return torch.nn.functional.silu(gate) * up @ w2.T + (0 if b2 is None else b2.double())


def compute_expert_outputs(loaded: LoadedExperts, x: torch.Tensor) -> list[torch.Tensor]:
    """Return the output of each expert of a rank's share."""
    (w1, w2), weights = dequantize_w1_w2(loaded), loaded.weights
    return [
        compute_expert_output(
            x,
            w1[expert],
            w2[expert],
            None if weights.b1 is None else weights.b1[expert],
            None if weights.b2 is None else weights.b2[expert],
        )
        for expert in range(len(w1))
    ]


def test_rows_cover_every_pair_of_values() -> None:
    assert ARRAY.missing_pairs() == ()
    assert set(ARRAY.impossible.values()) <= {"a share of sorted columns"}
    assert {(row["kind"] in ACT_ORDER_FORMATS, row["bias"]) for row in ROWS} >= {
        (True, True),
        (False, True),
    }


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row.values())))
def test_expert_outputs_equal_the_checkpoint(
    row: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Among published families, only those that fuse gate and up have biases. The patched family
    # has biases if the row does.
    family = replace(FAMILIES[row["family"]], bias=row["bias"])
    monkeypatch.setitem(FAMILIES, row["family"], family)
    sample = write(
        tmp_path,
        row["family"],
        row["kind"],
        shards=row["shards"],
        seed=row["seed"],
        change=add_biases if row["bias"] else None,
    )
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(1)).double()
    per_rank = EXPERTS // row["ep"]
    for rank in range(row["ep"]):
        total: list[Any] = [0] * per_rank
        for tp_rank in range(row["tp"]):
            loaded = mk.load_experts(tmp_path, 0, ep=(rank, row["ep"]), tp=(tp_rank, row["tp"]))
            assert loaded.problem_fields["bias"] == row["bias"]
            total = [a + b for a, b in zip(total, compute_expert_outputs(loaded, x), strict=True)]
        for local, got in enumerate(total):
            expert = rank * per_rank + local
            b1 = b2 = None
            if row["bias"]:
                b1, b2 = (
                    torch.cat([BIASES[expert, "gate"], BIASES[expert, "up"]]),
                    BIASES[expert, "down"],
                )
            want = compute_expert_output(x, sample.w1[expert], sample.w2[expert], b1, b2)
            assert float((got - want).norm() / want.norm()) <= max(
                1e-5, FORMAT_SAMPLES[row["kind"]].bound
            )


def test_unsorted_bias_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of either feature alone would pass if w1 were sorted but b1 were not."""
    from modular_kernel.checkpoints import loading
    from modular_kernel.checkpoints.fusing import sort_w1_rows

    def sort_without_bias(weights: Any, *args: Any, **kwargs: Any) -> None:
        sort_w1_rows({name: t for name, t in weights.items() if name != "b1"}, *args, **kwargs)

    monkeypatch.setattr(loading, "sort_w1_rows", sort_without_bias)
    row = next(row for row in ROWS if row["kind"] in ACT_ORDER_FORMATS and row["bias"])
    with pytest.raises(AssertionError):
        test_expert_outputs_equal_the_checkpoint(row, tmp_path, monkeypatch)
