"""`mk profile`: traces of a pairing on every rank, and stage times compared with their roofline."""

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
from modular_kernel.cli.options import AsJson, Prepared, ProblemOptions, not_prepared_error
from modular_kernel.cli.ranks import Backend, Host, host_of, with_launcher
from modular_kernel.errors import ConfigurationError, IncompatibleError

if TYPE_CHECKING:
    from modular_kernel.profiling.record import ProfileJob, RankRecord
    from modular_kernel.profiling.report import Profile
    from modular_kernel.spec.problem import Machine, Problem

_MAX_STEM = 72  # characters of a file name, so that it fits a line of a terminal
_CALLS, _CALLS_ON_CPU = 5, 1
_MAX_CALLS = 100  # traces with more calls open slowly
_RANK_TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """Options of the profiled calls, the pairing to compare with, and the output folder."""

    against: Annotated[
        tuple[str, str] | None,
        option("A second pairing to compare with on the same inputs, as two names."),
    ] = None
    routing: Annotated[
        str,
        option(
            "Routing pattern: uniform, zipf, zipfA (zipf1.2) or hotN (one expert in every token)."
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
    options: ProblemOptions,
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
    """Profile a pair: trace every rank, and compare the time of each stage with its roofline.

    Writes Chrome traces (for Perfetto) of each rank and merged over all ranks, a JSON file, and an
    HTML report.

    Two kinds of calls are measured. The end-to-end time is that of planned calls, which on a GPU
    are replayed from a CUDA graph where possible. Stage times come from eager calls under torch's
    profiler: the device time of a stage is that of the kernels launched in it. The method and the
    roofline are described in "Profiling" in the documentation.

    Exits with 1 if a pair is refused, listing every reason, and with 2 on bad usage.
    """
    options = with_launcher(options)
    problem = options.problem()
    calls, against = profiling.calls, profiling.against
    prepare_host()
    experts_type = experts_type or default_experts()
    from modular_kernel.measure.routing_patterns import RoutingKind
    from modular_kernel.profiling.record import ProfileJob
    from modular_kernel.profiling.report import to_record

    pairs = ((pf_type, experts_type), *([against] if against else []))
    if len(set(pairs)) < len(pairs):
        raise ConfigurationError("--against", got=" x ".join(pairs[1]), need="a second pairing")
    kind = RoutingKind.parse(profiling.routing)
    with host_of(options.world_size, backend) as host:
        for pair in pairs:
            check_valid(*pair, problem, host.machine)
        if profiling.prepared:
            check_prepared([experts for _, experts in pairs], problem)
        profiling.out.mkdir(parents=True, exist_ok=True)
        files = _Files(pairs, problem, profiling.out, profiling.prepared)
        on_gpu = host.machine.device == "cuda"
        job = ProfileJob(
            pairs=pairs,
            problem=problem,
            machine=host.machine,
            routing=kind,
            calls=calls or (_CALLS if on_gpu else _CALLS_ON_CPU),
            traces=tuple(files.out / files.stem(pair) for pair in pairs),
            command=shlex.join(["mk", *sys.argv[1:]]),
            prepared=profiling.prepared,
        )
        with output.activity_notes(lambda: "profiling"):
            recorded = _record_ranks(job, host)
        result = _build_profile(job, recorded, files, host)
        record = to_record(result) | host.record | {"report": str(files.report("html"))}
    if output.is_reporting_rank():
        files.write(result, record)
    output.print_result(record, as_json, lambda: _show(result, files))


def default_experts() -> str:
    """Return the default experts part: TritonExperts with a GPU, else TorchExperts."""
    import torch

    return "TritonExperts" if torch.cuda.is_available() else "TorchExperts"


def check_valid(pf: str, experts: str, problem: "Problem", machine: "Machine") -> None:
    """Raise IncompatibleError, with the reasons of the first rank that is refused, if any is."""
    from modular_kernel.catalog import load_catalog
    from modular_kernel.perf_model.verdicts import judge_pairs

    (verdict,) = judge_pairs(load_catalog(), pf, experts, problem, machine)
    if not verdict.ok:
        raise IncompatibleError(verdict.pairing, verdict.rejections)


def check_prepared(experts: list[str], problem: "Problem") -> None:
    """Raise ConfigurationError if no experts part prepares weights; print those that do not."""
    from modular_kernel.measure.prepared_weights import prepared_specs_of

    without = [name for name in experts if not prepared_specs_of(name, problem)]
    if len(without) == len(experts):
        raise not_prepared_error(problem.quant, " and ".join(experts))
    for name in without:
        output.note(f"profiled without prepared weights: {name} {problem.quant}")


def file_stem(subject: str, problem: "Problem") -> str:
    """Return a unique stem for the file names of a profiled pairing or comparison."""
    case = f"{subject.replace(' ', '')}-{problem}"
    name = re.sub(r"[^A-Za-z0-9._=-]", "_", re.sub("PrepareAndFinalize|Experts", "", case))
    if name != case or len(name) > _MAX_STEM:
        # A hash keeps names unique: cases may differ only in removed or truncated characters.
        name = f"{name[:_MAX_STEM]}-{hashlib.sha256(case.encode()).hexdigest()[:8]}"
    return name


@dataclass(frozen=True)
class _Files:
    """Paths of the output files."""

    pairs: tuple[tuple[str, str], ...]
    problem: "Problem"
    out: Path
    prepared: bool = False

    def stem(self, pair: tuple[str, str]) -> str:
        return file_stem(" x ".join(pair) + self._suffix, self.problem)

    @property
    def _suffix(self) -> str:
        return "-prepared" if self.prepared else ""

    def merged(self, pair: tuple[str, str]) -> Path:
        """Return the path of the trace merged over all ranks."""
        return self.out / f"{self.stem(pair)}-all-ranks.trace.json"

    def report(self, kind: str) -> Path:
        names = " against ".join(" x ".join(pair) for pair in self.pairs)
        return self.out / f"{file_stem(names + self._suffix, self.problem)}.profile.{kind}"

    def write(self, result: "Profile", record: dict[str, Any]) -> None:
        """Write the report as JSON and as HTML."""
        from modular_kernel.profiling.html import render_page

        text = json.dumps(output.to_json_types(record), indent=1)
        for kind, content in (("json", text), ("html", render_page(result))):
            path = self.report(kind)
            output.write_file(path, content)


def _record_ranks(job: "ProfileJob", host: Host) -> "list[RankRecord]":
    """Record the job on every rank and return their records."""
    from modular_kernel.profiling.record import record_rank

    if host.pool is None:
        return [record_rank(0, 1, None, job)]
    return host.pool.run(record_rank, job, timeout=_RANK_TIMEOUT_S)


def _build_profile(
    job: "ProfileJob", records: "list[RankRecord]", files: _Files, host: Host
) -> "Profile":
    """Read the traces back, merge those of several ranks, and return the resulting profile."""
    from modular_kernel.profiling.chrome import merge_traces, read_trace
    from modular_kernel.profiling.report import make_profile

    def traces_of(rank: int) -> list[dict[str, Any]]:
        return [read_trace(pair.trace) for pair in records[rank].pairs]

    by_rank = [traces_of(0)] if host.pool is None else host.pool.collect(traces_of)
    traces = [[of_rank[index] for of_rank in by_rank] for index in range(len(job.pairs))]
    merged_paths: list[Path | None] = [None] * len(job.pairs)
    if len(records) > 1:
        names = [f"rank {record.rank}: {record.environment['device']}" for record in records]
        for index, pair in enumerate(job.pairs):
            path = files.merged(pair)
            if not output.is_reporting_rank():
                continue
            output.write_file(path, json.dumps(merge_traces(traces[index], names)))
            merged_paths[index] = path
    return make_profile(job, records, traces, merged_paths)


def _show(result: "Profile", files: _Files) -> None:
    """Print the tables, a summary, and the paths of the output files."""
    from modular_kernel.profiling import summary

    for name, text in summary.describe_profile(result):
        output.line(f"{name + ':':15} {text}")
    for line in result.missing:
        output.line(f"caveat: {line}")
    for pair in result.pairs:
        output.line(f"\n{pair.pairing}")
        for rank in pair.ranks:
            title = f"rank {rank.rank}" if len(pair.ranks) > 1 else ""
            output.table(
                summary.STAGE_COLUMNS,
                summary.stage_cells(rank),
                title=title,
                optional=summary.OPTIONAL_COLUMNS,
            )
        for line in summary.describe_slowest_rank(pair):
            output.line(line)
    if len(result.pairs) > 1:
        output.line(
            "\nA is the first pairing, B the second. " + summary.describe_difference(result)
        )
        output.table(summary.COMPARISON_COLUMNS, summary.comparison_rows(result))
    output.line()
    for pair in result.pairs:
        for path in [rank.trace for rank in pair.ranks] + (
            [pair.merged_trace] if pair.merged_trace else []
        ):
            output.line(f"trace (open it at https://ui.perfetto.dev): {path}")
    output.line(f"report: {files.report('html')} (and .json)")
