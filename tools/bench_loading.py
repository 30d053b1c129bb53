"""Time the loading of one layer of experts in each format, on one core.

    python tools/bench_loading.py
    python tools/bench_loading.py --format gptq --format awq --experts 16
    python tools/bench_loading.py --file-mb 1000 --rounds 3           # integer formats

Writes a layer with the sizes of Qwen3-30B-A3B in every format, loads each file several times with
`mk.load_experts`, and prints a Markdown table. In the first row, every tensor of the bf16 file is
read with the safetensors library alone and copied. A time is the minimum CPU time over the rounds.
In a round, each format is loaded once. All files are in the page cache. Peak memory is the maximum
that torch's allocator held, without the memory-mapped file. Rows named "bf16 to" a scheme quantize
while loading.

With `--file-mb`, each file has as many experts as fit into this size, by repeating the experts of a
small layer. Only one file exists at a time, and only integer formats are timed.
"""

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import in_checkout  # noqa: F401  adds the checkout to sys.path
import safetensors
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.profiler import ProfilerActivity, profile

from modular_kernel.checkpoints.loading import load_experts
from modular_kernel.testing.checkpoints.samples import write

FORMATS = (
    "bf16",
    "deepseek fp8",
    "fp8 tensor, static",
    "compressed fp8 channel",
    "compressed int8",
    "compressed int8, groups",
    "compressed int4",
    "compressed int4, zero points",
    "compressed int4, act-order",
    "gptq",
    "gptq, zero points",
    "gptq int8",
    "gptq, act-order",
    "gptq int8, act-order",
    "awq",
    "compressed mxfp4",
    "modelopt nvfp4",
)
INTEGER_FORMATS = tuple(
    kind for kind in FORMATS if "int" in kind or "gptq" in kind or kind == "awq"
)
REPEATED_EXPERTS = 4  # number of experts that are repeated to fill a file of a given size
QUANTIZED_SCHEMES = (
    "fp8_w8a8_block",
    "fp8_w8a8_channel",
    "int4_w4a16_group",
    "mxfp4_w4a16",
    "nvfp4_w4a16",
)


@dataclass(frozen=True)
class Load:
    """One row of the table.

    call: the function to time.
    file: the file that it reads.
    experts: number of experts in the file.
    """

    name: str
    call: Callable[[], object]
    file: Path
    experts: int


def read_and_copy(file: Path) -> dict[str, torch.Tensor]:
    """Read and copy every tensor of a file with the safetensors library."""
    with safe_open(file, "pt") as tensors:
        return {name: tensors.get_tensor(name).clone() for name in tensors.keys()}  # noqa: SIM118


def write_loads(
    folder: Path, formats: Sequence[str], schemes: Sequence[str], sizes: dict[str, int]
) -> list[Load]:
    """Write the files of the formats, and return the loads to time."""
    loads, experts = [], sizes["experts"]
    for number, kind in enumerate(dict.fromkeys(("bf16", *formats))):
        path = folder / str(number)
        write(path, "qwen3_moe", kind, **sizes)
        file = path / "model.safetensors"
        if kind == "bf16":
            read_all = lambda file=file: read_and_copy(file)  # noqa: E731
            loads.append(Load("safetensors alone", read_all, file, experts))
            loads += [
                Load(
                    f"bf16 to {scheme}",
                    lambda path=path, scheme=scheme: load_experts(path, 0, quantize=scheme),
                    file,
                    experts,
                )
                for scheme in schemes
            ]
        loads.append(Load(kind, lambda path=path: load_experts(path, 0), file, experts))
    # Rows named "bf16 to" are last.
    return sorted(loads, key=lambda load: load.name.startswith("bf16 to"))


def write_repeated(folder: Path, kind: str, sizes: dict[str, int], megabytes: float) -> Load:
    """Write a file of about `megabytes`, and return the load to time."""
    write(folder, "qwen3_moe", kind, **{**sizes, "experts": REPEATED_EXPERTS})
    file, config = folder / "model.safetensors", folder / "config.json"
    repeated_tensors = {name: t for name, t in load_file(file).items() if ".experts." in name}
    expert_bytes = sum(tensor.nbytes for tensor in repeated_tensors.values()) / REPEATED_EXPERTS
    experts = max(round(megabytes * 1e6 / expert_bytes), 1)
    tensors = {}
    for name, tensor in repeated_tensors.items():
        prefix, _, after = name.partition(".experts.")
        number, _, suffix = after.partition(".")
        for e in range(int(number), experts, REPEATED_EXPERTS):
            tensors[f"{prefix}.experts.{e}.{suffix}"] = tensor.clone()
    save_file(tensors, file)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_experts": experts}))
    return Load(kind, lambda: load_experts(folder, 0), file, experts)


def measure_cpu_seconds(call: Callable[[], object]) -> float:
    """Return the CPU time of one call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def measure_peak_bytes(load: Load) -> int:
    """Return the maximum number of bytes that torch's allocator held, without the mapped file."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = load.call()
    del result
    mapped_bytes, allocated, peak = load.file.stat().st_size, 0, 0
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += 0 if abs(event.nbytes()) == mapped_bytes else event.nbytes()
        peak = max(peak, allocated)
    return peak


def format_row(load: Load, seconds: float, reference: float) -> str:
    """Return one row of the table.

    reference: seconds per expert for bf16.
    """
    result = load.call()
    bytes_read = getattr(result, "bytes_read", load.file.stat().st_size)
    cells = [
        load.name,
        f"{bytes_read / 1e6:.1f}",
        f"{measure_peak_bytes(load) / 1e6:.1f}",
        f"{seconds:.3f}",
        f"{seconds / load.experts * 1e3:.2f}",
        f"{seconds / load.experts / reference:.2f}",
    ]
    return "| " + " | ".join(cells) + " |"


HEADER = "| format | MB read | peak MB | s | ms per expert | time over bf16's |"
DELIMITER_ROW = "|---|---:|---:|---:|---:|---:|"


def print_table_of_repeated_files(
    folder: Path, formats: Sequence[str], sizes: dict[str, int], megabytes: float, rounds: int
) -> None:
    """Print the table for one file after another. bf16 is timed again next to each file."""
    click.echo(HEADER.replace("format |", "format | experts |") + "\n" + DELIMITER_ROW + "---:|")
    bf16 = write_repeated(folder / "bf16", "bf16", sizes, megabytes)
    for kind in dict.fromkeys(("bf16", *formats)):
        path = folder / "file"
        load = bf16 if kind == "bf16" else write_repeated(path, kind, sizes, megabytes)
        times, reference = [], []
        for _ in range(rounds):
            times.append(measure_cpu_seconds(load.call))
            reference.append(measure_cpu_seconds(bf16.call))
        row = format_row(load, min(times), min(reference) / bf16.experts)
        click.echo(row.replace(f"| {kind} |", f"| {kind} | {load.experts} |", 1))
        shutil.rmtree(path, ignore_errors=True)


@click.command(help=__doc__.split("\n\n", maxsplit=1)[0])
@click.option("--format", "formats", multiple=True, default=FORMATS, help="A format; repeatable.")
@click.option(
    "--quantize", default=",".join(QUANTIZED_SCHEMES), help="Schemes to quantize bf16 to."
)
@click.option("--file-mb", type=float, help="Size of each file, of integers.")
@click.option("--experts", default=16, show_default=True)
@click.option("--hidden", default=2048, show_default=True)
@click.option("--intermediate", default=768, show_default=True)
@click.option("--rounds", default=9, show_default=True)
def main(formats, quantize, file_mb, experts, hidden, intermediate, rounds):
    torch.set_num_threads(1)
    sizes = {"experts": experts, "hidden": hidden, "intermediate": intermediate}
    with tempfile.TemporaryDirectory() as folder:
        if file_mb is not None:
            formats = INTEGER_FORMATS if formats == FORMATS else formats
            click.echo(format_title(f"files of {file_mb:g} MB", hidden, intermediate, rounds))
            print_table_of_repeated_files(Path(folder), formats, sizes, file_mb, rounds)
            return
        schemes = [scheme for scheme in quantize.split(",") if scheme]
        loads = write_loads(Path(folder), formats, schemes, sizes)
        times = {load.name: list[float]() for load in loads}
        for _ in range(rounds):
            for load in loads:
                times[load.name].append(measure_cpu_seconds(load.call))
        min_seconds = {name: min(measured) for name, measured in times.items()}
        click.echo(format_title(f"{experts} experts", hidden, intermediate, rounds))
        click.echo(HEADER + "\n" + DELIMITER_ROW)
        for load in loads:
            click.echo(format_row(load, min_seconds[load.name], min_seconds["bf16"] / experts))


def format_title(description: str, hidden: int, intermediate: int, rounds: int) -> str:
    versions = f"torch {torch.__version__}, safetensors {safetensors.__version__}"
    settings = f"{description}, H {hidden}, I {intermediate}; {rounds} rounds; {versions}"
    return f"{settings}; {time.strftime('%Y-%m-%d')}\n"


if __name__ == "__main__":
    main()
