"""`mk bench --hf CONFIG`: times a whole transformers model with random weights.

Our experts are compared with the experts implementations of transformers. The rates are tokens per
second of prefill and of decoding.
"""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

from click.exceptions import Exit

from modular_kernel.cli import output
from modular_kernel.cli.command import IntegerRange, option
from modular_kernel.cli.machine_setup import prepare_host
from modular_kernel.cli.presets import is_known_model, make_unknown_model_error
from modular_kernel.errors import ConfigurationError
from modular_kernel.models.config_file import is_model_path
from modular_kernel.text import format_count

if TYPE_CHECKING:
    from modular_kernel.bench.model_speed import Implementation, ModelSpeed, Workload

_DEFAULT_PREPARE_FINALIZE = "MoEPrepareAndFinalizeNoEP"
_IMPLEMENTATION_NAME = "mk bench"  # name of our experts implementation in transformers
_DEFAULT_EXPERTS = {"cpu": "TorchExperts", "cuda": "TritonExperts"}
_TORCH_PARTS = ("TorchExperts", "NaiveBatchedExperts")
_CPU_NOTE = "no GPU: Triton kernels run in the interpreter, so times are meaningless"


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of the model and of its workload."""

    hf: Annotated[
        str | None,
        option(
            "Instead of a layer, time a whole transformers model with random weights: the path "
            "of a config.json or its folder, or a name listed by `mk models`.",
            metavar="CONFIG",
        ),
    ] = None
    layers: Annotated[
        int | None,
        option("With --hf: number of layers to keep.  [default: all]", type=IntegerRange(1)),
    ] = None
    batch: Annotated[
        int | None, option("With --hf: number of sequences.  [default: 1]", type=IntegerRange(1))
    ] = None
    prompt: Annotated[
        int | None,
        option("With --hf: tokens of the prefill.  [default: 128]", type=IntegerRange(1)),
    ] = None
    new_tokens: Annotated[
        int | None,
        option("With --hf: tokens decoded after the prefill.  [default: 16]", type=IntegerRange(1)),
    ] = None

    def make_workload(self) -> "Workload":
        """Return the workload, with defaults for unset options."""
        from modular_kernel.bench.model_speed import Workload

        return Workload(self.batch or 1, self.prompt or 128, self.new_tokens or 16)

    def check_requires_hf(self) -> None:
        """Raise ConfigurationError if an option that requires --hf is set without it."""
        for field in fields(self):
            if self.hf is None and getattr(self, field.name) is not None:
                name = f"--{field.name.replace('_', '-')}"
                raise ConfigurationError(name, got="no --hf", need="--hf CONFIG in addition")


def bench_model(
    model_options: ModelOptions,
    *,
    dtype: str | None,
    pf_type: str | None,
    experts_type: str | None,
    as_json: str | None,
) -> None:
    """Time a whole model with transformers' eager and grouped_mm experts, and with ours.

    Raises Exit(1) if a row is wrong or failed.
    """
    assert model_options.hf is not None
    if not is_model_path(model_options.hf) and not is_known_model(model_options.hf):
        raise make_unknown_model_error(model_options.hf)
    workload = model_options.make_workload()
    prepare_host()
    import torch

    from modular_kernel.bench.model_speed import OK, measure
    from modular_kernel.bench.random_model import build_random_model, import_transformers
    from modular_kernel.measure.environment import collect_environment

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    import_transformers().logging.set_verbosity_error()
    pair = pf_type or _DEFAULT_PREPARE_FINALIZE, experts_type or _DEFAULT_EXPERTS[device.type]
    implementations = _make_implementations(device.type, *pair)
    random_model = build_random_model(
        model_options.hf, device, dtype=dtype, layers=model_options.layers
    )
    rows = measure(random_model.model, workload, implementations)
    record = {
        "model": model_options.hf,
        "model_type": random_model.model_type,
        "layers": random_model.layers[0],
        "layers_of_config": random_model.layers[1],
        "parameters": random_model.parameters,
        "bytes": random_model.bytes,
        "dtype": random_model.model.dtype,
        "notes": random_model.notes,
        "workload": workload,
        "pairing": " x ".join(pair),
        "rows": rows,
        "environment": collect_environment(device, shlex.join(["mk", *sys.argv[1:]])),
    }
    notes = [
        *random_model.notes,
        f"ours: {record['pairing']}",
        *([_CPU_NOTE] * (device.type == "cpu")),
    ]
    output.print_result(record, as_json, lambda: _print_text(record, notes, rows))
    if any(row.status != OK for row in rows):
        raise Exit(1)


def _make_implementations(device: str, pf_type: str, experts_type: str) -> "list[Implementation]":
    from modular_kernel.bench.model_speed import EAGER, Implementation
    from modular_kernel.integrations.transformers import register

    registered_name = register(pf_type, experts_type, name=_IMPLEMENTATION_NAME)
    use_torch = device == "cpu" and experts_type in _TORCH_PARTS
    transformers_implementations = [Implementation(name, name) for name in (EAGER, "grouped_mm")]
    return [*transformers_implementations, Implementation("ours", registered_name, use_torch)]


def _print_text(
    record: Mapping[str, Any], notes: Sequence[str], rows: "Sequence[ModelSpeed]"
) -> None:
    dtype = str(record["dtype"]).removeprefix("torch.")
    size = f"{record['parameters'] / 1e6:,.1f} M parameters in {dtype}, random weights"
    output.print_line(f"{record['model']}: {record['model_type']}, {size}")
    for note in notes:
        output.print_line(f"  {note}")
    workload = record["workload"]
    prompt = format_count(workload.prompt, "token")
    output.print_line(
        f"workload: prefill of {workload.batch} x {prompt}, then {workload.new} decoding steps"
    )
    eager = rows[0]
    cells = [
        (
            row.experts,
            _format_rate(row.prefill, row.status),
            _format_ratio(row.prefill, eager.prefill),
            _format_rate(row.decode, row.status),
            _format_ratio(row.decode, eager.decode),
            "" if row.error is None or row.bound is None else f"{row.error / row.bound:.2f}",
        )
        for row in rows
    ]
    columns = (
        "experts",
        "prefill tokens/s",
        "x eager",
        "decode tokens/s",
        "x eager",
        "error / bound",
    )
    output.print_table(columns, cells)
    for row in rows:
        if row.note:
            output.print_line(f"{row.experts} {row.status}: {row.note}")


def _format_rate(rate: float | None, status: str) -> str:
    return status if rate is None else f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"


def _format_ratio(rate: float | None, eager: float | None) -> str:
    return "" if rate is None or eager is None else f"{rate / eager:.2f} x"
