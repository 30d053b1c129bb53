"""Adapters written by PEFT (tests/helpers/golden/peft), editable copies, and their products B A."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import modular_kernel as mk
from modular_kernel.checkpoints.peft import load_adapter
from modular_kernel.spec.lora import Adapter

GOLDEN = Path(__file__).parent / "golden" / "peft"
H, I, E = 16, 12, 4  # noqa: E741
PROBLEM = mk.Problem(
    tokens=8, hidden=H, intermediate=I, experts=E, top_k=2, dtype=torch.float32,
    lora="adapters=2,rank=8",
)  # fmt: skip
EXPERT = "base_model.model.model.layers.1.block_sparse_moe.experts"


def products(adapter: Adapter, problem: mk.Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the products B A of an adapter for w1 and w2, per expert in float64."""
    a13, b13, a2, b2 = (
        getattr(adapter, name).double() for name in ("lora_a13", "lora_b13", "lora_a2", "lora_b2")
    )
    rank = b13.shape[2]
    rows = torch.arange(2 * I)
    up = rows % 2 if problem.act.interleaved else rows // I
    a_of_gate_and_up = a13.unflatten(1, (-1, rank)).expand(b13.shape[0], 2, rank, H)
    return torch.einsum("enr,enrh->enh", b13, a_of_gate_and_up[:, up]), b2 @ a2


class AdapterFolder:
    """A copy of a golden adapter that a test can change."""

    def __init__(self, path: Path, kind: str) -> None:
        self.path = path / kind
        shutil.copytree(GOLDEN / kind, self.path)
        self.tensors = load_file(self.path / "adapter_model.safetensors")
        self.config: dict[str, Any] = json.loads((self.path / "adapter_config.json").read_text())

    def load(self, problem: mk.Problem = PROBLEM, layer: int = 1, **options: Any) -> Adapter:
        save_file(self.tensors, self.path / "adapter_model.safetensors")
        (self.path / "adapter_config.json").write_text(json.dumps(self.config))
        return load_adapter(self.path, layer, problem, **options)
