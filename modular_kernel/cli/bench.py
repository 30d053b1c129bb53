"""`mk bench`: times this project's layers and others, and compares them with the roofline.

`modular_kernel.bench` measures. This module converts the options to candidates (layers
to time) and benchmark cases, and prints the report. A case is a layer shape, a routing pattern and
a number of tokens.
"""

import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from click.exceptions import Exit

from modular_kernel.cli import output
from modular_kernel.cli.bench_model import ModelOptions, bench_model
from modular_kernel.cli.command import POSITIVE, option
from modular_kernel.cli.engine import load_engine
from modular_kernel.cli.file_options import FilePath, FileUse
from modular_kernel.cli.machine_setup import prepare_host
from modular_kernel.cli.options import (
    TOKENS_LIST,
    ExpertsType,
    MeasuredProblemOptions,
    PfType,
    Prepared,
    ProblemOptions,
    make_not_prepared_error,
    parse_schemes,
    refuse_combination,
)
from modular_kernel.cli.presets import (
    BASELINE_SHAPES,
    SHAPES,
    format_model_name,
    is_known_model,
    load_problem_fields,
    make_unknown_model_error,
)
from modular_kernel.cli.ranks import resolve_world_size
from modular_kernel.cli.refusals import explain_defaults
from modular_kernel.cli.report_files import ReportFiles, load_record
from modular_kernel.errors import ConfigurationError, UnsupportedError
from modular_kernel.models.config_file import is_model_path
from modular_kernel.utils import json_files

if TYPE_CHECKING:
    from modular_kernel.bench.candidates import Candidate
    from modular_kernel.measure.cases import LayerCase
    from modular_kernel.measure.records import Report
    from modular_kernel.spec.problem import Machine, Problem

BenchEngine = Annotated[
    Literal["vllm"] | None, option("Also time the experts classes of this engine.")
]
BASELINE = "baseline"  # --model baseline selects all of BASELINE_SHAPES
_DEFAULT_TOKENS = (1, 16, 128)
_SHAPE_TOKENS = (1, 16, 128, 1024, 4096, 16384)
_LARGE_SHAPE_TOKENS = {"dsv3_256": (16, 128, 1024, 4096)}


@dataclass(frozen=True, kw_only=True)
class BenchMethod:
    """Options of the measurement and of the layers to compare with."""

    tokens_list: Annotated[
        tuple[int, ...] | None,
        option(
            "Token counts, such as 1,16,128.  [default: --tokens, or the shape's list]",
            type=TOKENS_LIST,
        ),
    ] = None
    routing: Annotated[
        str,
        option(
            "Routing patterns: uniform, zipf, zipfA (exponent A) or hotN (every token uses the "
            "same N experts)."
        ),
    ] = "uniform"
    eager: Annotated[bool, option("Time eager calls instead of CUDA graph replays.")] = False
    prepared: Prepared = False
    peer: Annotated[
        tuple[Path, ...],
        option(
            "A Python file whose layers() returns layers to compare with; may be repeated.",
            type=FilePath(FileUse.READ),
        ),
    ] = ()
    bandwidth: Annotated[
        float | None,
        option("Memory bandwidth of the roofline, in TB/s.  [default: measured]", type=POSITIVE),
    ] = None
    ms: Annotated[
        float, option("Device time to measure for each row, in milliseconds.", type=POSITIVE)
    ] = 20
    deadline: Annotated[
        float | None,
        option("End the run after this many seconds, even in the middle of a row.", type=POSITIVE),
    ] = None


@dataclass(frozen=True, kw_only=True)
class BenchFiles(ReportFiles):
    """Options of the output files, and a record to show instead of measuring."""

    load: Annotated[
        Path | None,
        option(
            "Show and plot this --json record instead of measuring.", type=FilePath(FileUse.READ)
        ),
    ] = None
    plot: Annotated[
        Path | None,
        option(
            "Write a plot of time over tokens to this .png file; requires matplotlib.",
            type=FilePath(FileUse.WRITE),
        ),
    ] = None


@dataclass(frozen=True)
class _PairOptions:
    """The names of a pairing, as an option group that `refuse_combination` accepts."""

    pf_type: str | None = None
    experts_type: str | None = None


def bench(
    *,
    options: MeasuredProblemOptions,
    method: BenchMethod,
    files: BenchFiles,
    model_options: ModelOptions,
    pf_type: PfType = None,
    experts_type: ExpertsType = None,
    engine: BenchEngine = None,
) -> None:
    """Time our pairings, torch._grouped_mm and your own layers; compare them with the roofline.

    --model takes names from `mk models`, separated by commas; `baseline` stands for mixtral,
    dsv3_ep8, qwen3_30b, gptoss and dsv3_256. --quant takes several schemes.

    Method: a call takes x, top-k ids and top-k weights, and returns y. A CUDA graph captures
    several calls. Each call has its own input. If the weights would otherwise stay in the L2 cache,
    each call also has its own copy of the weights. The reported time is the median time of a replay
    divided by the number of calls, after 25 ms of warm-up replays. The roofline ("floor") is
    max(flops / peak, bytes / bandwidth), where bytes counts x, y and the weights of the routed
    experts, and the peaks are measured in the same run. The output of a layer is first compared
    with a float64 reference; a layer that is WRONG is not timed. Without a GPU, wall-clock time is
    reported.

    A --peer file defines layers(), which returns modular_kernel.bench.candidates.Layer objects.
    Each has name, quant, setup(problem, weights) and call(x, routing); see that module and
    "Benchmarks" in the documentation.

    With --prepared, our pairings that can prepare weights are also timed with prepared weights.

    --load FILE.json shows and plots an existing record instead of measuring. It cannot be combined
    with options of the measurement.

    --hf CONFIG builds a whole transformers model with random weights instead and times it with
    eager experts, grouped_mm experts and ours, in tokens per second of prefill and of decoding with
    a static cache. An implementation is WRONG if the output of its first experts module differs
    from that of the eager one for the same routing. --hf can be combined with --dtype, --pf-type,
    --experts-type and --json.

    --engine vllm compares our pairings with the experts classes of the installed vLLM. The
    replays of both are interleaved. A GPU is required. --experts-type then names a class of vLLM.
    --model, --quant, --tokens-list, --routing, --bandwidth and --deadline can be combined with it.

    Exits with 1 if a row is wrong or failed, or if the pairing is refused, and with 2 on bad usage.
    """
    started = time.monotonic()
    if (options.world_size or 1) > 1:
        need = "1 rank; over ranks, mk compose and mk profile time pairings"
        raise ConfigurationError(
            "--world-size", got=options.world_size, need=f"{need}, and mk exchange times exchanges"
        )
    if resolve_world_size(None) > 1:
        got, need = f"a launcher with {resolve_world_size(None)} ranks", "one process"
        raise ConfigurationError(
            "mk bench", got=got, need=f"{need}; to measure over ranks, use mk exchange"
        )
    model_options.check_requires_hf()
    if model_options.hf is not None:
        refuse_combination("--hf", (options, method, files), ("dtype", "as_json"))
        bench_model(
            model_options,
            dtype=options.dtype,
            pf_type=pf_type,
            experts_type=experts_type,
            as_json=files.as_json,
        )
        return
    if files.load is not None:
        refuse_combination("--load", (options, method, _PairOptions(pf_type, experts_type)))
    if engine is not None:
        refuse_combination("--engine", (_PairOptions(pf_type), files), ("as_json", "markdown"))
        allowed = "tokens_list", "routing", "bandwidth", "deadline"
        refuse_combination("--engine", (method,), allowed)
        engine_options = options.with_default_sizes("cuda")
        bench_engine(engine, _BenchmarkCases(engine_options, method), files, experts_type)
        return
    benchmark_cases = _BenchmarkCases(options, method)
    _check_plot(files)
    if files.load is not None:
        _output_report(_load_report(files.load), files)
        return
    prepare_host()
    from modular_kernel.bench.run import BenchJob, run
    from modular_kernel.catalog import this_machine
    from modular_kernel.measure.records import FAILED, WRONG

    machine = this_machine()
    benchmark_cases.options = options.with_default_sizes(machine.device)
    cases = tuple(benchmark_cases.make_cases())
    with explain_defaults(options):
        candidates = _make_candidates(benchmark_cases, cases, machine, pf_type, experts_type)
    if not candidates:
        output.print_line(
            "nothing to measure: no pairing is valid on this machine, and no other layer was given"
        )
        raise Exit(1)
    job = BenchJob(
        cases=cases,
        candidates=tuple(candidates),
        machine=machine,
        graph=not method.eager,
        target_ms=method.ms,
        bandwidth=None if method.bandwidth is None else method.bandwidth * 1e12,
        deadline=method.deadline,
        started=started,
        command=shlex.join(["mk", *sys.argv[1:]]),
    )
    activity = ["measuring hardware peaks"]
    with output.show_activity(lambda: activity[0]):
        report = run(job, _make_row_reporter(files), lambda row: activity.__setitem__(0, row))
    _output_report(report, files)
    if report.stopped or any(row.status in (WRONG, FAILED) for row in report.rows):
        raise Exit(1)


def bench_engine(
    engine: str, benchmark_cases: "_BenchmarkCases", files: BenchFiles, experts: str | None
) -> None:
    """Time our pairings and the experts classes of an engine, and output the report.

    Raises UnsupportedError without a GPU, and Exit(1) if a row is wrong or failed.
    """
    from modular_kernel.bench.engine_classes import make_blocks, time_classes
    from modular_kernel.bench.interleaved import Comparison
    from modular_kernel.catalog import this_machine
    from modular_kernel.measure.records import FAILED, WRONG

    machine = this_machine()
    check_gpu(machine)
    cases = tuple(benchmark_cases.make_cases())
    schemes = benchmark_cases.parse_schemes()
    blocks = make_blocks(load_engine(engine), cases, schemes, machine, experts)
    method = benchmark_cases.method
    comparison = Comparison(
        tuple(blocks),
        machine,
        seconds=method.deadline,
        bandwidth=None if method.bandwidth is None else method.bandwidth * 1e12,
        command=shlex.join(["mk", *sys.argv[1:]]),
    )
    report = time_classes(comparison, output.print_note, files.save)
    _output_report(report, files)
    if report.stopped or any(row.status in (WRONG, FAILED) for row in report.rows):
        raise Exit(1)


def check_gpu(machine: "Machine") -> None:
    """Raise UnsupportedError if the machine has no GPU."""
    if machine.device != "cuda":
        raise UnsupportedError("mk bench --engine", got="no GPU", need="a GPU")


class _BenchmarkCases:
    """The benchmark cases that the options describe."""

    def __init__(self, options: ProblemOptions, method: BenchMethod) -> None:
        self.options, self.method = options, method
        if self.method.eager and self.options.graph:
            raise ConfigurationError("--graph", got="--eager too", need="only one of them")
        self.parse_models()
        self.get_token_counts("")  # checks --tokens and --tokens-list

    def parse_models(self) -> list[str]:
        """Return the names in --model, or [""] for a layer described by its sizes."""
        if self.options.model is None:
            return [""]
        names: list[str] = []
        for name in self.options.model.split(","):
            if name != BASELINE and not is_known_model(name) and not is_model_path(name):
                raise make_unknown_model_error(name, BASELINE)
            names += BASELINE_SHAPES if name == BASELINE else [name]
        return list(dict.fromkeys(names))

    def get_token_counts(self, name: str) -> tuple[int, ...]:
        """Return the token counts to time for a model, or for the sizes in the options for ""."""
        tokens_list = self.method.tokens_list
        if tokens_list is None:
            if self.options.tokens is not None:
                return (self.options.tokens,)
            return _LARGE_SHAPE_TOKENS.get(
                name, _SHAPE_TOKENS if name in SHAPES else _DEFAULT_TOKENS
            )
        if self.options.tokens is not None:
            raise ConfigurationError("--tokens", got="--tokens-list too", need="only one of them")
        return tokens_list

    def parse_schemes(self) -> list[str]:
        """Return the schemes in --quant. Without --quant, return the models' schemes."""
        if self.options.quant is not None:
            return parse_schemes(self.options.quant)
        schemes = [
            load_problem_fields(name).get("quant", "none") if name else "none"
            for name in self.parse_models()
        ]
        return list(dict.fromkeys(map(str, schemes)))

    def make_problem(self, name: str) -> "Problem":
        """Return the unquantized problem of a model, or of the sizes in the options for ""."""
        return replace(self.options, quant="none", model=name or None).problem()

    def make_cases(self) -> "Iterator[LayerCase]":
        """Yield a case for each model, routing pattern and token count."""
        from modular_kernel.measure.cases import LayerCase
        from modular_kernel.measure.routing_patterns import RoutingKind, check_top_k

        kinds = [RoutingKind.parse(name) for name in self.method.routing.split(",")]
        for name in self.parse_models():
            problem = self.make_problem(name)
            check_top_k(problem)
            sizes = problem.experts, problem.top_k, problem.hidden, problem.intermediate
            shape = format_model_name(name) if name else "E{}-K{}-H{}-I{}".format(*sizes)
            if problem.adapters is not None:
                shape += f" lora:{problem.lora}"
            for kind in dict.fromkeys(kinds):
                for tokens in self.get_token_counts(name):
                    yield LayerCase(shape, problem.with_tokens(tokens), kind)


def _make_candidates(
    benchmark_cases: _BenchmarkCases,
    cases: "tuple[LayerCase, ...]",
    machine: "Machine",
    pf_type: str | None,
    experts_type: str | None,
) -> "list[Candidate]":
    """Return the layers to time: our pairings, and other layers with the same operand dtypes.

    The other layers are the baseline layers and the layers in --peer files.
    """
    from modular_kernel.bench.candidates import (
        baseline_candidates,
        pairing_candidates,
        peer_candidates,
    )
    from modular_kernel.measure.cases import operand_types
    from modular_kernel.measure.records import PEER
    from modular_kernel.spec.quantization import QuantScheme

    schemes = benchmark_cases.parse_schemes()
    # If no part is named, require graph capture, which excludes parts that loop over experts.
    require_graph = (
        machine.device == "cuda"
        and not benchmark_cases.method.eager
        and pf_type is None
        and experts_type is None
    )
    problems = [
        replace(case.problem, quant=quant, graph=case.problem.graph or require_graph)
        for quant in schemes
        for case in cases
    ]
    other_layers = baseline_candidates()
    for path in benchmark_cases.method.peer:
        other_layers += peer_candidates(path)

    def format_operand_types(quant: str) -> str:
        return operand_types(cases[0].problem, QuantScheme.parse(quant))

    our_operand_types = {format_operand_types(quant) for quant in schemes}
    for candidate in other_layers:
        if (
            candidate.origin == PEER
            and format_operand_types(candidate.quant) not in our_operand_types
        ):
            need = f"--quant {candidate.quant} or a scheme with the same operand dtypes"
            output.print_note(
                f"skipped {candidate.name}: no --quant scheme has its operand dtypes, need {need}"
            )
    our_candidates = pairing_candidates(
        pf_type, experts_type, problems, machine, prepared=benchmark_cases.method.prepared
    )
    if benchmark_cases.method.prepared:
        _print_unprepared_pairings(our_candidates, schemes)
    return our_candidates + [
        candidate
        for candidate in other_layers
        if format_operand_types(candidate.quant) in our_operand_types
    ]


def _print_unprepared_pairings(candidates: "list[Candidate]", schemes: list[str]) -> None:
    """Print the pairings that are not timed with prepared weights.

    Raises ConfigurationError if no pairing is timed with prepared weights.
    """
    from modular_kernel.bench.candidates import make_prepared_name

    prepared_names = {
        (candidate.name, candidate.quant) for candidate in candidates if candidate.prepared
    }
    if not prepared_names:
        raise make_not_prepared_error(", ".join(schemes), "any pairing here")
    unprepared = [
        f"{candidate.name} {candidate.quant}"
        for candidate in candidates
        if not candidate.prepared
        and (make_prepared_name(candidate.name), candidate.quant) not in prepared_names
    ]
    if unprepared:
        output.print_note(f"not timed with prepared weights: {', '.join(unprepared)}")


def _check_plot(files: BenchFiles) -> None:
    """Raise ConfigurationError for --plot without matplotlib, before anything is measured."""
    if files.plot is not None and find_spec("matplotlib") is None:
        need = "matplotlib: pip install 'modular-kernel[bench]'"
        raise ConfigurationError("--plot", got="no matplotlib", need=need)


def _load_report(path: Path) -> "Report":
    from modular_kernel.measure.records import Report

    return load_record("--load", path, Report.from_json)


def _make_row_reporter(files: BenchFiles) -> Any:
    """Return a callback that prints each new row on stderr and updates the JSON file."""
    printed = 0

    def report_new_rows(report: "Report") -> None:
        from modular_kernel.bench.tables import format_row

        nonlocal printed
        for row in report.rows[printed:]:
            output.print_note(format_row(row))
        printed = len(report.rows)
        files.save(report)

    return report_new_rows


def _output_report(report: "Report", files: BenchFiles) -> None:
    from modular_kernel.bench import tables

    files.show(report, lambda: _print_text(report), lambda: tables.markdown(report))
    if files.plot is not None:
        from modular_kernel.bench.plot import plot

        with (
            output.report_write_errors(files.plot),
            json_files.atomic_write(files.plot) as temporary_path,
        ):
            plot(report, temporary_path)
    for path in (files.record, files.markdown, files.plot):
        if path is not None:
            output.print_note(f"written: {path}")


def _print_text(report: "Report") -> None:
    from modular_kernel.bench import tables
    from modular_kernel.measure.records import INTERPRETER

    columns, cells = tables.make_terminal_table(report.rows)
    # The column is optional unless there are several.
    routings = {row.routing for row in report.rows}
    required = {"routing"} if len(routings) > 1 else set[str]()
    output.print_table(
        columns, cells, optional=[c for c in tables.OPTIONAL_COLUMNS if c not in required]
    )
    output.print_interpreted_layers(row.layer for row in report.rows if row.mode == INTERPRETER)
    for line in tables.summary(report):
        output.print_line(line)
    if report.stopped:
        output.print_line(f"the run ended early: {report.stopped}")
