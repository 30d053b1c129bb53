"""`mk exchange`: times the communication of a layer between ranks.

Dispatch sends tokens to the ranks of their experts, and combine returns the results. Together they
are called the exchange. A transport performs an exchange. It is either a part or a peer, which is a
library that is called directly. `modular_kernel.bench.all2all` takes the measurements.
"""

import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import click
from click.exceptions import Exit

from modular_kernel.cli import output
from modular_kernel.cli.command import POSITIVE, IntegerRange, NumberRange, option
from modular_kernel.cli.file_options import FilePath, FileUse
from modular_kernel.cli.machine_setup import prepare_host
from modular_kernel.cli.options import TOKENS_LIST, parse_schemes
from modular_kernel.cli.ranks import Backend, make_pool, resolve_world_size
from modular_kernel.cli.report_files import ReportFiles, load_record
from modular_kernel.errors import ConfigurationError
from modular_kernel.settings import read_launcher
from modular_kernel.utils.package_probes import installed_version

if TYPE_CHECKING:
    from modular_kernel.bench.all2all.cases import ExchangeCase, TransportLink
    from modular_kernel.bench.all2all.records import ExchangeReport, ExchangeRow
    from modular_kernel.bench.all2all.run import TransportJob
    from modular_kernel.spec.problem import Machine

_DEFAULT_LINK_GBS = 393
# Cases share two sets of buffers: one for at most this many tokens, and one for more.
_SMALL_BATCH = 128
_LIBRARIES = ("torch", "triton", "nvidia-nccl-cu13", "deep_ep", "pplx_kernels")
_METHOD_TEXT = (
    "times are in microseconds on the slowest rank; the time of a rank is the median of {rounds} "
    "rounds of {replays} calls; dispatch includes receiving and quantization, except for "
    "libraries that are called directly and take quantized rows; graph: the CUDA graphs of "
    "dispatch and of combine are replayed alternately, and the time of a pair is a quarter of the "
    "time of a graph with four pairs; eager: calls without a graph; before it was timed, every "
    "case was verified: with identity experts, the output must equal x"
)


# The defaults on a GPU describe a layer of DeepSeek-V3. Those on a CPU describe a small layer,
# for which the measurement of all parts takes less than a minute.
_GPU_DEFAULTS: dict[str, Any] = {
    "tokens_list": (1, 8, 32, 128, 1024, 4096),
    "hidden": 7168,
    "experts": 256,
    "top_k": 8,
    "replays": 20,
    "rounds": 5,
}
_CPU_DEFAULTS: dict[str, Any] = {
    "tokens_list": (1, 8),
    "hidden": 256,
    "experts": 8,
    "top_k": 2,
    "replays": 3,
    "rounds": 3,
}


def _device_option(help: str, name: str, *, type: click.ParamType[Any] | None = None) -> Any:
    """Return an option whose help ends with the default values on a GPU and on a CPU."""
    gpu_default, cpu_default = (
        _format_default(defaults[name]) for defaults in (_GPU_DEFAULTS, _CPU_DEFAULTS)
    )
    default = f"[default: {gpu_default}; on a CPU {cpu_default}]"
    return option(f"{help}  {default}", type=type)


def _format_default(default: int | tuple[int, ...]) -> str:
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)


OptionsT = TypeVar("OptionsT", "ExchangeSizes", "ExchangeOptions")


def _fill_defaults(options: OptionsT, device: str) -> OptionsT:
    """Return the options with the defaults of the device in place of None."""
    defaults = _GPU_DEFAULTS if device == "cuda" else _CPU_DEFAULTS
    names = {f.name for f in fields(options)} & defaults.keys()
    return replace(options, **{n: defaults[n] for n in names if getattr(options, n) is None})


@dataclass(frozen=True, kw_only=True)
class ExchangeSizes:
    """Options of the number of ranks and the sizes of the exchange."""

    world_size: Annotated[
        int | None, option("Number of ranks, at least 2.  [default: 2, or that of the launcher]")
    ] = None
    tokens_list: Annotated[
        tuple[int, ...] | None,
        _device_option(
            "Numbers of tokens per rank, separated by commas.", "tokens_list", type=TOKENS_LIST
        ),
    ] = None
    hidden: Annotated[int | None, _device_option("Hidden size.", "hidden")] = None
    experts: Annotated[int | None, _device_option("Number of experts of the model.", "experts")] = (
        None
    )
    top_k: Annotated[
        int | None, _device_option("Number of experts per token (top-k).", "top_k")
    ] = None
    quant: Annotated[
        str, option("Quantization schemes of dispatched rows, separated by commas.")
    ] = "none,fp8_w8a8_block"

    @property
    def ranks(self) -> int:
        """Number of ranks: --world-size or the number of the launcher, or else 2."""
        is_set = self.world_size is not None or read_launcher() is not None
        return resolve_world_size(self.world_size) if is_set else 2


@dataclass(frozen=True, kw_only=True)
class ExchangeOptions:
    """Options of the measurement and the parameters of the roofline."""

    backend: Backend = None
    only: Annotated[
        str | None,
        option(
            "Time only parts and peers whose names contain one of these words, separated by commas."
        ),
    ] = None
    peer: Annotated[
        tuple[Path, ...],
        option(
            "A Python file that defines transports() to compare with; may be repeated.",
            type=FilePath(FileUse.READ),
        ),
    ] = ()
    replays: Annotated[
        int | None, _device_option("Calls per round.", "replays", type=IntegerRange(1))
    ] = None
    rounds: Annotated[
        int | None,
        _device_option(
            "Number of rounds; the result is the median of their medians.",
            "rounds",
            type=IntegerRange(1),
        ),
    ] = None
    link: Annotated[
        float,
        option(
            "Bandwidth of the link into one GPU in GB/s, for the roofline. On a CPU, the roofline "
            "is shown only if this option is set.",
            type=POSITIVE,
        ),
    ] = _DEFAULT_LINK_GBS
    link_latency: Annotated[
        float, option("Latency of the roofline in microseconds.", type=NumberRange(0))
    ] = 6
    deadline: Annotated[float | None, option("Start no new transport after this many seconds.")] = (
        None
    )

    def is_selected(self, name: str) -> bool:
        substrings = (self.only or "").lower().split(",")
        return any(substring in name.lower() for substring in substrings)


@dataclass(frozen=True, kw_only=True)
class ExchangeFiles(ReportFiles):
    """Options of the output files, and the records to show instead of measuring."""

    load: Annotated[
        tuple[Path, ...],
        option(
            "Show this --json record instead of measuring; if repeated, the records are joined.",
            type=FilePath(FileUse.READ),
        ),
    ] = ()


def exchange(*, sizes: ExchangeSizes, method: ExchangeOptions, files: ExchangeFiles) -> None:
    """Time only dispatch and combine, of every part that supports N ranks and of every peer.

    The experts are the identity and router weights sum to 1, so the output must equal the input.
    This is verified before a case is timed.

    A peer is a library that is called directly. A --peer file defines transports(), which returns a
    list of modular_kernel.bench.all2all.cases.Transport. tools/exchange_peers.py in the repository
    (it is not installed with the package) defines transports for NCCL and other libraries.
    Libraries that cannot be installed together are measured in separate runs, whose records --load
    joins.

    Exits with 1 if a row is wrong or failed, and with 2 on bad usage.
    """
    if files.load:
        _show_and_save(_join_records(files.load), files)
        return
    _check_options(sizes, method)
    prepare_host()
    from modular_kernel.bench.all2all.cases import TransportLink

    link = TransportLink(method.link * 1e9, method.link_latency * 1e-6)
    report = _measure_report(sizes, method, link, files)
    _show_and_save(report, files)
    if any(row.status in ("wrong", "failed") for row in report.rows):
        raise Exit(1)


def _check_options(sizes: ExchangeSizes, method: ExchangeOptions) -> None:
    if sizes.ranks < 2:
        raise ConfigurationError("--world-size", got=sizes.ranks, need=">= 2")
    if method.deadline is not None and read_launcher() is not None:
        need = "no --deadline, because the ranks of a launcher have no common clock"
        raise ConfigurationError("--deadline", got=method.deadline, need=need)


def _measure_report(
    sizes: ExchangeSizes, method: ExchangeOptions, link: "TransportLink", files: ExchangeFiles
) -> "ExchangeReport":
    from modular_kernel.bench.all2all import run
    from modular_kernel.bench.all2all.records import ExchangeReport
    from modular_kernel.bench.all2all.timing import Repeats
    from modular_kernel.testing.verify.over_ranks import machine_of

    world_size = sizes.ranks
    first_pool = make_pool(world_size, method.backend)
    unused_pools = [first_pool]  # `run` starts with this pool

    def get_pool() -> Any:
        if unused_pools:
            return unused_pools.pop()
        if read_launcher() is not None:  # the ranks of a launcher cannot be restarted
            return first_pool
        return make_pool(world_size, "nccl" if machine.device == "cuda" else "gloo")

    try:
        machine = machine_of(first_pool)
        sizes, method = (
            _fill_defaults(sizes, machine.device),
            _fill_defaults(method, machine.device),
        )
        jobs = tuple(_make_jobs(tuple(_make_cases(sizes)), method, machine))
        if not jobs:
            raise ConfigurationError(
                "--only", got=repr(method.only), need="part of the name of a transport"
            )
        event_gap_us = first_pool.run(run.measure_event_gap_on_rank, timeout=120)[0]
        report = ExchangeReport(_describe_environment(sizes, method, machine, event_gap_us))
        assert method.replays is not None and method.rounds is not None  # noqa: PT018
        repeats = Repeats(method.replays, method.rounds)
        for rows in run.run(
            jobs, get_pool, link=link, repeats=repeats, start_limit_s=method.deadline
        ):
            _print_outcomes(rows)
            report = replace(report, rows=(*report.rows, *rows))
            if files.record is not None and output.is_reporting_rank():
                with output.report_write_errors(files.record):
                    report.write(files.record)
        return report
    finally:
        first_pool.close()


def _describe_environment(
    sizes: ExchangeSizes, method: ExchangeOptions, machine: "Machine", event_gap_us: float | None
) -> dict[str, Any]:
    """Return the environment and the method of the measurement, for the record.

    event_gap_us: see bench.all2all.timing.measure_event_gap.
    """
    import torch

    from modular_kernel.measure.environment import collect_environment

    return {
        **collect_environment(torch.device(machine.device), shlex.join(["mk", *sys.argv[1:]])),
        "world_size": sizes.ranks,
        "versions": {name: installed_version(name) for name in _LIBRARIES},
        "link_gbs": method.link,
        "latency_us": method.link_latency,
        "event_gap_us": event_gap_us,
        "method": _METHOD_TEXT.format(rounds=method.rounds, replays=method.replays),
    }


def _make_cases(sizes: ExchangeSizes) -> "Iterator[ExchangeCase]":
    """Yield the cases. Cases that share buffers (equal quant and capacity) are adjacent."""
    from modular_kernel.bench.all2all.cases import ExchangeCase

    token_counts = sorted(sizes.tokens_list or ())
    small_counts = [tokens for tokens in token_counts if tokens <= _SMALL_BATCH]
    shape: dict[str, Any] = {name: getattr(sizes, name) for name in ("hidden", "experts", "top_k")}
    for quant in parse_schemes(sizes.quant):
        for tokens in token_counts:
            capacity = max(small_counts) if tokens <= _SMALL_BATCH else max(token_counts)
            yield ExchangeCase(sizes.ranks, tokens, capacity, quant=quant, **shape)


def _make_jobs(
    cases: "tuple[ExchangeCase, ...]", method: ExchangeOptions, machine: "Machine"
) -> "Iterator[TransportJob]":
    from modular_kernel.bench.all2all.cases import load_transports
    from modular_kernel.bench.all2all.parts import PartTransport
    from modular_kernel.bench.all2all.run import TransportJob
    from modular_kernel.catalog import load_catalog
    from modular_kernel.measure.records import OURS

    catalog = load_catalog()
    names = [name for name in catalog.names("prepare_finalize") if _supports_ranks(catalog, name)]
    for name in filter(method.is_selected, names):
        transport = PartTransport(name, machine)
        yield TransportJob(
            name, OURS, transport.with_capacities(cases), machine, transport.needs_fresh_ranks
        )
    for path in method.peer:
        for peer in load_transports(path):
            if method.is_selected(peer.name):
                yield TransportJob(
                    peer.name, peer.origin, cases, machine, peer.needs_fresh_ranks, path
                )


def _supports_ranks(catalog: Any, name: str) -> bool:
    max_ranks: int | None = catalog.prepare_finalize(name).requires.world_sizes[1]
    return max_ranks is None or max_ranks > 1


def _join_records(paths: Sequence[Path]) -> "ExchangeReport":
    from modular_kernel.bench.all2all.records import ExchangeReport

    reports = [load_record("--load", path, ExchangeReport.from_json) for path in paths]
    return reports[0].with_rows_from(reports[1:])


def _print_outcomes(rows: "Sequence[ExchangeRow]") -> None:
    """Print a transport's number of cases by status, and its failed cases, to stderr."""
    from modular_kernel.bench.all2all.records import format_row

    name, statuses = rows[0].transport, [row.status for row in rows]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))
    output.print_note(f"{name}: {'refused' if {*statuses} == {'refused'} else counts}")
    for row in rows:
        if row.status in ("wrong", "failed"):
            output.print_note(format_row(row))


def _show_and_save(report: "ExchangeReport", files: ExchangeFiles) -> None:
    from modular_kernel.bench.all2all import records

    if not output.is_reporting_rank():
        return
    files.show(report, lambda: _print_text(report), lambda: records.markdown(report))
    files.save(report)


def _print_text(report: "ExchangeReport") -> None:
    from modular_kernel.bench.all2all import records
    from modular_kernel.measure.records import INTERPRETER

    env = report.environment
    hide_roofline = env.get("device") == "cpu" and env.get("link_gbs") == _DEFAULT_LINK_GBS
    for title, columns, cells in records.make_detail_tables(report.rows):
        indices = [
            i for i, name in enumerate(columns) if not (hide_roofline and name in ("floor", "GB/s"))
        ]
        rows = [[row[i] for i in indices] for row in cells]
        columns = tuple(columns[i] for i in indices)
        output.print_table(columns, rows, title=title, optional=records.OPTIONAL_COLUMNS)
    output.print_interpreted_layers(row.transport for row in report.rows if row.mode == INTERPRETER)
    refused = {row.transport: row.note for row in report.rows if row.status == "refused"}
    for name, note in refused.items():
        output.print_line(f"refused: {name}: {note}")
