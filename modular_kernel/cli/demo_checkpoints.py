"""Writes tiny quantized checkpoints for `mk demo`, loads them without unpacking, and runs them.

The quantized codes and scales are random, so they define the weights exactly.

Accuracy criterion: the error of a layer relative to float64 with the same weights may be at most
1e-2 if only the weights are quantized, and 8e-2 if activations are also rounded to 8 bits.
"""

import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from modular_kernel.cli.demo_output import CheckpointRow

if TYPE_CHECKING:
    from modular_kernel.testing.checkpoints.samples import Sample

# (model family, name of a format). Published checkpoints of the family have this format, which
# modular_kernel.testing.checkpoints.published_formats defines.
CHECKPOINTS = (
    ("mixtral", "awq"),
    ("qwen3_moe", "qwen3 fp8"),
    ("deepseek_v3", "compressed int4"),
    ("gpt_oss", "mxfp4"),
)
_TOKENS = 13


def run_checkpoints(pairings: Sequence[tuple[str, str]], device: str) -> Iterator[CheckpointRow]:
    """Write each checkpoint to a temporary folder and yield a row for each pairing."""
    from modular_kernel.testing.checkpoints.samples import write

    with tempfile.TemporaryDirectory(prefix="mk-demo-") as folder:
        for number, (family, kind) in enumerate(CHECKPOINTS):
            sample = write(Path(folder) / str(number), family, kind)
            for pair in pairings:
                yield check_layer(sample, family, kind, pair, device)


def check_layer(
    sample: "Sample", family: str, kind: str, pair: tuple[str, str], device: str
) -> CheckpointRow:
    """Load and run the experts of layer 0 of a checkpoint, and compare them with float64.

    kind: name of the checkpoint's format.

    Raises the errors of `load_experts` and `make_kernel`.
    """
    import torch

    from modular_kernel.catalog import make_kernel
    from modular_kernel.checkpoints.loading import load_experts
    from modular_kernel.tensors import Routing

    start = time.perf_counter()
    layer = load_experts(sample.folder, 0, device=device)
    problem = layer.problem(_TOKENS)
    kernel = make_kernel(*pair, problem)
    x_TH, weights_TK, ids_TK = sample.inputs(_TOKENS)
    x_TH = x_TH.to(problem.dtype)
    routing = Routing(weights_TK.to(device), ids_TK.to(device))
    with torch.inference_mode():
        result = kernel(x_TH.to(device), layer.weights, routing).double().cpu()
    expected = sample.expected_output(x_TH.double(), weights_TK, ids_TK)
    return CheckpointRow(
        model=family,
        quant=str(problem.scheme),
        stored=kind,
        pairing=" x ".join(pair),
        error=((result - expected).norm() / expected.norm()).item(),
        bound=sample.kind.bound,
        bytes_read=layer.bytes_read,
        seconds=time.perf_counter() - start,
    )
