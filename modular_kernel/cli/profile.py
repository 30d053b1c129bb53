"""`mk profile`: traces a pairing on every rank, and compares stage times with their roofline.

A stage is a step of a call, such as quantization, dispatch or GEMM 1. `modular_kernel.profiling`
measures the stages and renders the reports.
"""

import hashlib
import json
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from modular_kernel.cli import output
from modular_kernel.cli.command import IntegerRange, option
from modular_kernel.cli.file_options import FilePath, FileUse
from modular_kernel.cli.machine_setup import prepare_host
from modular_kernel.cli.options import (
    AsJson,
    MeasuredProblemOptions,
    Prepared,
    make_not_prepared_error,
)
from modular_kernel.cli.ranks import (
    Backend,
    Executor,
    apply_launcher,
    open_executor,
    resolve_device,
)
from modular_kernel.cli.refusals import explain_defaults
from modular_kernel.errors import ConfigurationError, IncompatibleError

if TYPE_CHECKING:
    from modular_kernel.profiling.record import ProfileJob, RankRecord
    from modular_kernel.profiling.report import Profile
    from modular_kernel.spec.problem import Machine, Problem

_MAX_STEM = 72  # characters of a file name, so that it fits a line of a terminal
_DEFAULT_CALLS, _DEFAULT_CALLS_ON_CPU = 5, 1
_MAX_CALLS = 100  # traces with more calls open slowly
_RANK_TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """Options of the profiled calls, the pairing to compare with, and the output folder."""

    against: Annotated[
        tuple[str, str] | None,
        option(
            "Second pairing to compare with: the names of a PrepareAndFinalize and an experts part."
        ),
    ] = None
    routing: Annotated[
        str,
        option(
            "Routing pattern: uniform, zipf, zipfA (exponent A, as in zipf1.2) or hotN (every "
            "token uses the same N experts)."
        ),
    ] = "uniform"
    calls: Annotated[
        int | None,
        option(
            "Number of traced calls.  [default: 5, or 1 on a CPU]",
            type=IntegerRange(1, _MAX_CALLS),
        ),
    ] = None
    out: Annotated[
        Path,
        option("Folder for the traces and reports.", type=FilePath(FileUse.WRITE_FOLDER)),
    ] = Path("out")
    prepared: Prepared = False


def profile(
    *,
    options: MeasuredProblemOptions,
    profiling: ProfileOptions,
    pf_type: Annotated[
        str, option("Name of a PrepareAndFinalize (see mk list).")
    ] = "MoEPrepareAndFinalizeNoEP",
    experts_type: Annotated[
        str | None,
        option(
            "Name of an experts part (see mk list).  [default: TritonExperts, or TorchExperts "
            "without a GPU]"
        ),
    ] = None,
    backend: Backend = None,
    as_json: AsJson = None,
) -> None:
    """Profile a pairing: trace every rank, and compare the time of each stage with its roofline.

    Writes a Chrome trace (for Perfetto) of each rank, a trace that is merged over all ranks, a JSON
    file, and an HTML report.

    The end-to-end time is measured with a plan, a compiled sequence of the layer's launches. On a
    GPU, a CUDA graph replays it if possible. The times of stages are measured in separate, eager
    calls under torch.profiler. The device time of a stage is the time of the kernels that it
    launches. "Profiling" in the documentation describes the method and the roofline.

    Exits with 1 if a pairing is refused, listing every reason, and with 2 on bad usage.
    """
    options = apply_launcher(options)
    calls, against = profiling.calls, profiling.against
    prepare_host()
    device = resolve_device(options.world_size, backend)
    problem = options.with_default_sizes(device).problem()
    experts_type = experts_type or _get_default_experts()
    from modular_kernel.measure.routing_patterns import RoutingKind
    from modular_kernel.profiling.record import ProfileJob
    from modular_kernel.profiling.report import to_record

    pairs = ((pf_type, experts_type), *([against] if against else []))
    if len(set(pairs)) < len(pairs):
        raise ConfigurationError("--against", got=" x ".join(pairs[1]), need="a second pairing")
    routing = RoutingKind.parse(profiling.routing)
    with open_executor(options.world_size, backend) as executor:
        for pair in pairs:
            with explain_defaults(options):
                _check_valid(*pair, problem, executor.machine)
        if profiling.prepared:
            _check_prepared([experts for _, experts in pairs], problem)
        profiling.out.mkdir(parents=True, exist_ok=True)
        files = _OutputFiles(pairs, problem, profiling.out, profiling.prepared)
        on_gpu = executor.machine.device == "cuda"
        job = ProfileJob(
            pairs=pairs,
            problem=problem,
            machine=executor.machine,
            routing=routing,
            calls=calls or (_DEFAULT_CALLS if on_gpu else _DEFAULT_CALLS_ON_CPU),
            traces=tuple(files.out / files.get_stem(pair) for pair in pairs),
            command=shlex.join(["mk", *sys.argv[1:]]),
            prepared=profiling.prepared,
        )
        with output.show_activity(lambda: "profiling"):
            rank_records = _record_ranks(job, executor)
        result = _build_profile(job, rank_records, files, executor)
        record = (
            to_record(result)
            | executor.record_fields
            | {"report": str(files.get_report_path("html"))}
        )
    if output.is_reporting_rank():
        files.write(result, record)
    output.print_result(record, as_json, lambda: _print_text(result, files))


def _get_default_experts() -> str:
    import torch

    return "TritonExperts" if torch.cuda.is_available() else "TorchExperts"


def _check_valid(pf: str, experts: str, problem: "Problem", machine: "Machine") -> None:
    """Raise IncompatibleError if the pairing is refused.

    If the reasons differ between ranks, the error has those of the first rank that refuses.
    """
    from modular_kernel.catalog import load_catalog
    from modular_kernel.perf_model.verdicts import judge_pairs

    (verdict,) = judge_pairs(load_catalog(), pf, experts, problem, machine)
    if not verdict.ok:
        raise IncompatibleError(verdict.pairing, verdict.rejections)


def _check_prepared(experts: list[str], problem: "Problem") -> None:
    """Print the experts parts that do not prepare weights.

    Raises ConfigurationError if no part prepares weights.
    """
    from modular_kernel.measure.prepared_weights import prepared_specs_of

    unprepared = [name for name in experts if not prepared_specs_of(name, problem)]
    if len(unprepared) == len(experts):
        raise make_not_prepared_error(problem.quant, " and ".join(experts))
    for name in unprepared:
        output.print_note(f"profiled without prepared weights: {name} {problem.quant}")


def make_file_stem(subject: str, problem: "Problem") -> str:
    """Return a unique stem for the file names of a profiled pairing or comparison."""
    case = f"{subject.replace(' ', '')}-{problem}"
    name = re.sub(r"[^A-Za-z0-9._=-]", "_", re.sub("PrepareAndFinalize|Experts", "", case))
    if name != case or len(name) > _MAX_STEM:
        # Cases may differ only in removed or truncated characters. A hash keeps their names
        # distinct.
        name = f"{name[:_MAX_STEM]}-{hashlib.sha256(case.encode()).hexdigest()[:8]}"
    return name


@dataclass(frozen=True)
class _OutputFiles:
    """Paths of the traces and reports of one profile, below the folder `out`."""

    pairs: tuple[tuple[str, str], ...]
    problem: "Problem"
    out: Path
    prepared: bool = False

    def get_stem(self, pair: tuple[str, str]) -> str:
        return make_file_stem(" x ".join(pair) + self._suffix, self.problem)

    @property
    def _suffix(self) -> str:
        return "-prepared" if self.prepared else ""

    def get_merged_trace_path(self, pair: tuple[str, str]) -> Path:
        """Return the path of the trace merged over all ranks."""
        return self.out / f"{self.get_stem(pair)}-all-ranks.trace.json"

    def get_report_path(self, kind: str) -> Path:
        names = " against ".join(" x ".join(pair) for pair in self.pairs)
        return self.out / f"{make_file_stem(names + self._suffix, self.problem)}.profile.{kind}"

    def write(self, result: "Profile", record: dict[str, Any]) -> None:
        """Write the report as JSON and as HTML."""
        from modular_kernel.profiling.html import render_page

        json_text = json.dumps(output.to_json_types(record), indent=1)
        for kind, content in (("json", json_text), ("html", render_page(result))):
            path = self.get_report_path(kind)
            output.write_file(path, content)


def _record_ranks(job: "ProfileJob", executor: Executor) -> "list[RankRecord]":
    from modular_kernel.profiling.record import record_rank

    if executor.pool is None:
        return [record_rank(0, 1, None, job)]
    return executor.pool.run(record_rank, job, timeout=_RANK_TIMEOUT_S)


def _build_profile(
    job: "ProfileJob", records: "list[RankRecord]", files: _OutputFiles, executor: Executor
) -> "Profile":
    """Read the traces of all ranks, merge them, and return the profile."""
    from modular_kernel.profiling.chrome import merge_traces, read_trace
    from modular_kernel.profiling.report import make_profile

    def read_traces(rank: int) -> list[dict[str, Any]]:
        return [read_trace(pair.trace) for pair in records[rank].pairs]

    traces_by_rank = (
        [read_traces(0)] if executor.pool is None else executor.pool.collect(read_traces)
    )
    traces = [
        [rank_traces[index] for rank_traces in traces_by_rank] for index in range(len(job.pairs))
    ]
    merged_paths: list[Path | None] = [None] * len(job.pairs)
    if len(records) > 1:
        names = [f"rank {record.rank}: {record.environment['device']}" for record in records]
        for index, pair in enumerate(job.pairs):
            path = files.get_merged_trace_path(pair)
            if not output.is_reporting_rank():
                continue
            output.write_file(path, json.dumps(merge_traces(traces[index], names)))
            merged_paths[index] = path
    return make_profile(job, records, traces, merged_paths)


def _print_text(result: "Profile", files: _OutputFiles) -> None:
    """Print the tables, a summary, and the paths of the output files."""
    from modular_kernel.profiling import summary

    for name, value in summary.describe_profile(result):
        output.print_line(f"{name + ':':15} {value}")
    for caveat in result.missing:
        output.print_line(f"caveat: {caveat}")
    for pair in result.pairs:
        output.print_line(f"\n{pair.pairing}")
        for rank in pair.ranks:
            title = f"rank {rank.rank}" if len(pair.ranks) > 1 else ""
            output.print_table(
                summary.STAGE_COLUMNS,
                summary.make_stage_cells(rank),
                title=title,
                optional=summary.OPTIONAL_COLUMNS,
            )
        for line in summary.describe_slowest_rank(pair):
            output.print_line(line)
    if len(result.pairs) > 1:
        output.print_line(
            "\nA is the first pairing, B the second. " + summary.describe_difference(result)
        )
        output.print_table(summary.COMPARISON_COLUMNS, summary.make_comparison_rows(result))
    output.print_line()
    for pair in result.pairs:
        for path in [rank.trace for rank in pair.ranks] + (
            [pair.merged_trace] if pair.merged_trace else []
        ):
            output.print_line(f"trace (open it at https://ui.perfetto.dev): {path}")
    output.print_line(f"report: {files.get_report_path('html')} (and .json)")
