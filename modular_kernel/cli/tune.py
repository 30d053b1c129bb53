"""`mk tune`: searches for the fastest launch configurations of a part on this GPU, and saves them.

A launch configuration has the tile sizes, warps and pipeline stages of a kernel. The search space
of an experts part (its `Tunable`) lists the configurations for a number of tokens.
`modular_kernel.tuning` performs the search. This module selects the layers, and divides the time
among them.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from click.exceptions import Exit

from modular_kernel.cli import output
from modular_kernel.cli.command import POSITIVE, IntegerRange, option
from modular_kernel.cli.file_options import FilePath, FileUse
from modular_kernel.cli.machine_setup import limit_workers, prepare_host
from modular_kernel.cli.options import (
    TOKENS_LIST,
    AsJson,
    DescribedProblemOptions,
    ExpertsType,
    PfType,
    Prepared,
    ProblemOptions,
    parse_schemes,
    print_default_layer,
)
from modular_kernel.cli.presets import SHAPES, format_model_name
from modular_kernel.cli.refusals import explain_defaults, make_refusal
from modular_kernel.cli.tune_output import (
    TunedLayer,
    TuneProgress,
    TuneRecorder,
    make_record,
    print_text,
)
from modular_kernel.errors import ConfigurationError, IncompatibleError
from modular_kernel.utils.optional_imports import describe_error

if TYPE_CHECKING:
    from modular_kernel.contracts import Tunable
    from modular_kernel.spec.problem import Machine, Problem
    from modular_kernel.tuning.compilation import Compiler, TunedPair
    from modular_kernel.tuning.search import TuneResult

ALL_SHAPES = "all"  # --model all: every shape in SHAPES
_DEFAULT_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
# A layer may use this multiple of an equal share of the remaining time. The first layers of a
# scheme need more time because they wait for the compiler.
_SHARE_FACTOR = 3.0
_NO_GPU_MESSAGE = (
    "mk tune: no CUDA device, so nothing was measured and no file was written; `mk tune --explain` "
    "works without one"
)


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """Options of the search."""

    tokens_list: Annotated[
        tuple[int, ...] | None,
        option(
            "Token counts, such as 1,16,128.  [default: --tokens, or 1,2,4,..,8192]",
            type=TOKENS_LIST,
        ),
    ] = None
    budget: Annotated[float, option("Total seconds, including compilation.", type=POSITIVE)] = 600
    out: Annotated[
        Path | None,
        option(
            "Folder for the tuned files.  [default: MK_CONFIG_DIR]",
            type=FilePath(FileUse.WRITE_FOLDER),
        ),
    ] = None
    ignore_saved: Annotated[
        bool, option("Measure again instead of continuing from existing files.")
    ] = False
    routing: Annotated[str, option("Routing pattern: uniform, zipf, zipfA or hotN (hot1).")] = (
        "uniform"
    )
    workers: Annotated[
        int | None,
        option(
            "Number of processes that compile.  [default: the number of CPUs minus 1]",
            type=IntegerRange(1),
        ),
    ] = None
    times: Annotated[
        Path | None,
        option(
            "Append the times of all configurations to this JSON Lines file.",
            type=FilePath(FileUse.WRITE),
        ),
    ] = None
    prepared: Prepared = False

    def resolve_token_counts(self, options: ProblemOptions) -> tuple[int, ...]:
        """Return the token counts of --tokens-list or --tokens, or else the default list."""
        if self.tokens_list is not None:
            return self.tokens_list
        return _DEFAULT_TOKENS if options.tokens is None else (options.tokens,)


def tune(
    *,
    options: DescribedProblemOptions,
    search: TuneOptions,
    pf_type: PfType = None,
    experts_type: ExpertsType = None,
    explain: Annotated[
        bool, option("Only explain which launch configurations are used; requires no GPU.")
    ] = False,
    device_name: Annotated[
        str | None, option("With --explain: explain for this GPU, such as 'NVIDIA H200'.")
    ] = None,
    as_json: AsJson = None,
) -> None:
    """Time the launch configurations of a part on this GPU; save the fastest, one file per layer.

    --model takes names from `mk models`, or paths of config.json files, separated by commas. `all`
    selects these plain SwiGLU layers: mixtral, dsv3_ep8, qwen3_30b, gptoss, dsv3_256, mixtral_tp2,
    mixtral_tp4, mixtral_tp8, mixtral_8x22b, qwen3_30b_tp2, qwen3_235b, qwen3_235b_tp8, dsv3_tp8,
    deepseek_v2_lite, gptoss_20b, glm_4_5_air, llama4_scout, kimi_k2_ep8, phi_3_5_moe. --quant takes
    several schemes. Without it, each layer uses the scheme of its config file, or none. If there
    are several layers, those that are refused are skipped.

    --prepared tunes calls with prepared weights, and saves the results in separate files. With
    --explain, it shows the launch configurations without and with prepared weights.

    The output of every configuration is compared with a float64 reference before it is timed.
    Results are saved after each token count. Running the same command again continues the search.

    Exits with 1 if there is no GPU, if every pairing is refused, if a configuration computes wrong
    results, or if none can run.
    """
    if search.workers is not None:
        search = replace(search, workers=limit_workers(search.workers))
    if device_name is not None and not explain:
        raise ConfigurationError(
            "--device-name", got=repr(device_name), need="--explain in addition"
        )
    problems = _make_problems(options)
    print_default_layer(options, options.defaults)
    given_options = options
    if explain:
        options = replace(options, tokens=options.tokens or problems[0][1].tokens)
    token_counts = search.resolve_token_counts(options)
    prepare_host(quiet=True)
    from modular_kernel.catalog import this_machine

    if explain:
        if search.prepared:
            problems = _select_preparable(problems, experts_type, device_name)
        layers = [problem for _, problem in problems]
        explanations = _explain_launches(
            layers, token_counts, experts_type, device_name, search.prepared
        )
        output.print_result(
            {"explanations": explanations},
            as_json,
            lambda: output.print_line("\n\n".join(explanations)),
        )
        return
    machine = this_machine()
    if machine.device != "cuda":
        output.print_note(_NO_GPU_MESSAGE)
        if as_json is not None:
            output.print_json({"ok": False, "reason": _NO_GPU_MESSAGE}, as_json)
        raise Exit(1)
    if search.prepared:
        problems = _select_preparable(problems, experts_type)
    largest_problems = [
        (name, problem.with_tokens(max(token_counts))) for name, problem in problems
    ]
    with explain_defaults(given_options):
        valid_problems = _select_valid(
            largest_problems, machine, pf_type, experts_type, search.prepared
        )
    _tune_layers(valid_problems, token_counts, search, as_json)


def _make_problems(options: ProblemOptions) -> "list[tuple[str, Problem]]":
    """Return (name, problem) for each layer in --model and each scheme in --quant.

    Without --model, there is one layer, with the sizes in the options and the name "".
    """
    names: list[str | None] = [None] if options.model is None else []
    if options.model is not None:
        for model_name in options.model.split(","):
            names += SHAPES if model_name == ALL_SHAPES else [model_name]
    problems = []
    # Without --quant, each layer uses the scheme of its config file, or none.
    for quant in [None] if options.quant is None else parse_schemes(options.quant):
        for name in dict.fromkeys(names):
            problem = replace(options, quant=quant, model=name).problem()
            problems.append((format_model_name(name) if name else "", problem))
    return problems


def _find_search_spaces(
    problem: "Problem",
    experts: str | None,
    *,
    prepared: bool = False,
    device_name: str | None = None,
) -> "dict[str, Tunable]":
    """Return the search spaces of the experts parts that can be tuned, by the name of the part.

    Raises ConfigurationError if no part can be tuned.

    experts: name of a part. None stands for all.
    prepared: whether to return the spaces of calls with prepared weights. The result is {} if no
        part prepares weights.
    device_name: GPU of calls with prepared weights. None stands for this one.
    """
    from modular_kernel.catalog import load_catalog

    catalog = load_catalog()
    names = catalog.names("experts") if experts is None else (experts,)
    spaces = {}
    for name in names:
        try:
            space = catalog.experts(name).tunable(problem)
        except Exception as error:
            if experts is not None:
                raise
            # For example, a part of another package is broken.
            output.print_note(f"not tuned: {name}: {describe_error(error)}")
        else:
            if space is not None:
                spaces[name] = space
    if not spaces:
        need = "an experts part whose launches can be tuned"
        raise ConfigurationError("--experts-type", got=experts or "no such part", need=need)
    if not prepared:
        return spaces
    prepared_spaces = {
        name: space.for_prepared_weights(device_name) for name, space in spaces.items()
    }
    return {name: space for name, space in prepared_spaces.items() if space is not None}


def _select_preparable(
    problems: "Sequence[tuple[str, Problem]]", experts: str | None, device_name: str | None = None
) -> "list[tuple[str, Problem]]":
    """Return the problems whose weights can be prepared by a tunable part, and print the others.

    Raises ConfigurationError if there is no such problem.
    """
    prepared_problems = []
    for name, problem in problems:
        if _find_search_spaces(problem, experts, prepared=True, device_name=device_name):
            prepared_problems.append((name, problem))
        elif len(problems) > 1:
            layer = f"{name} {problem.quant}".strip()
            output.print_note(f"skipped {layer}: no experts part prepares its weights")
    if not prepared_problems:
        quants = ", ".join(dict.fromkeys(problem.quant for _, problem in problems))
        location = f" on {device_name}" if device_name else " on this machine"
        example = "mxfp4_w4a16 in bfloat16 on an H200, without batch_invariant"
        need = f"a scheme whose weights a tunable part prepares, such as {example}"
        raise ConfigurationError("--prepared", got=f"{quants}{location}", need=need)
    return prepared_problems


def _select_valid(
    problems: "Sequence[tuple[str, Problem]]",
    machine: "Machine",
    pf_type: str | None,
    experts_type: str | None,
    prepared: bool = False,
) -> "list[tuple[str, Problem, TunedPair]]":
    """Return (name, problem, pairing) for each problem with a valid pairing; print the others.

    If there is no such problem, raises IncompatibleError for a single problem, and Exit(1) for
    several.
    """
    valid = []
    for name, problem in problems:
        try:
            valid.append(
                (name, problem, _find_valid_pair(problem, machine, pf_type, experts_type, prepared))
            )
        except IncompatibleError as refusal:
            if len(problems) == 1:
                raise
            output.print_note(f"skipped {name} {problem.quant}: {refusal.rejections[0]}")
    if not valid:
        output.print_note("nothing to tune: no pairing is valid for any layer")
        raise Exit(1)
    return valid


def _find_valid_pair(
    problem: "Problem",
    machine: "Machine",
    pf_type: str | None,
    experts: str | None,
    prepared: bool = False,
) -> "TunedPair":
    """Return the first valid pairing with these parts.

    pf_type, experts: names of parts. None stands for any part. Raises IncompatibleError with all
        reasons if there is no valid pairing.
    """
    from modular_kernel.catalog import check, load_catalog
    from modular_kernel.tuning.compilation import TunedPair

    pfs = load_catalog().names("prepare_finalize") if pf_type is None else (pf_type,)
    pairs = [(p, e) for e in _find_search_spaces(problem, experts, prepared=prepared) for p in pfs]
    verdicts = [check(*pair, problem, machine) for pair in pairs]
    for pair, verdict in zip(pairs, verdicts, strict=True):
        if verdict.ok:
            return TunedPair(*pair, machine, prepared)
    raise make_refusal(f"every pairing for {problem}", verdicts)


def _explain_launches(
    problems: "Sequence[Problem]",
    token_counts: Sequence[int],
    experts: str | None,
    device_name: str | None,
    prepared: bool,
) -> list[str]:
    """Return an explanation of the launch configurations for each problem and number of tokens.

    prepared: whether to add an explanation of calls with prepared weights.
    """
    explanations = []
    for problem in problems:
        unprepared_spaces = _find_search_spaces(problem, experts)
        spaces = [next(iter(unprepared_spaces.values()))]
        if prepared:
            prepared_spaces = _find_search_spaces(
                problem, experts, prepared=True, device_name=device_name
            )
            name = next(iter(prepared_spaces))
            spaces = [unprepared_spaces[name], prepared_spaces[name]]
        explanations += [
            space.explain(num_tokens, device_name)
            for num_tokens in token_counts
            for space in spaces
        ]
    return explanations


def _tune_layers(
    layers_to_tune: "Sequence[tuple[str, Problem, TunedPair]]",
    tokens: Sequence[int],
    search: TuneOptions,
    as_json: str | None,
) -> None:
    """Tune the layers one after another within the budget, and save and print the results."""
    from modular_kernel.settings import read_settings
    from modular_kernel.tuning.compilation import Compiler
    from modular_kernel.tuning.search import remaining_token_counts

    folder = search.out or read_settings().config_dir
    if folder is None:
        need = "a folder, or MK_CONFIG_DIR set"
        raise ConfigurationError("--out", got="nothing, and there is no home directory", need=need)
    deadline_s, records, ok = time.monotonic() + search.budget, list[dict[str, object]](), True
    with Compiler(search.workers or max(1, (os.cpu_count() or 2) - 1)) as compiler:
        layers = []
        for name, problem, pair in layers_to_tune:
            space = pair.make_search_space(problem)
            remaining = remaining_token_counts(
                space, tokens, folder, ignore_saved=search.ignore_saved
            )
            layers.append(
                TunedLayer(name or str(problem), problem, pair, space, tuple(remaining), folder)
            )
            for count in remaining:  # compile in the background, in the order of tuning
                candidates = space.candidates(count)
                compiler.submit(pair, space, problem.with_tokens(count), candidates)
        total = sum(len(layer.space.candidates(t)) for layer in layers for t in layer.tokens)
        with TuneProgress(total) as progress:
            for index, layer in enumerate(layers):
                share = _TimeShare(deadline_s, _SHARE_FACTOR / (len(layers) - index))
                results = _tune_layer(layer, search, share, compiler, progress)
                remaining_tokens = layer.tokens[len(results) :]
                records.append(make_record(layer, results, remaining_tokens))
                ok &= all(tuned.best is not None and not tuned.wrong_choices for tuned in results)
                if as_json != output.STDOUT:
                    print_text(layer, results, remaining_tokens)
    if as_json is not None:
        result = {"ok": ok, "machine": layers_to_tune[0][2].machine, "layers": records}
        output.print_json(result, as_json)
    if not ok:
        raise Exit(1)


@dataclass(frozen=True)
class _TimeShare:
    """A fraction of the time until `deadline_s`, for tuning one layer.

    deadline_s: seconds, as returned by time.monotonic().
    fraction: share of the remaining time, where more than 1 counts as 1.
    """

    deadline_s: float
    fraction: float

    def compute_seconds(self) -> float:
        """Return the time that is left for the layer, in seconds."""
        return (self.deadline_s - time.monotonic()) * min(self.fraction, 1.0)


def _tune_layer(
    layer: TunedLayer,
    search: TuneOptions,
    share: _TimeShare,
    compiler: "Compiler",
    progress: TuneProgress,
) -> "list[TuneResult]":
    """Tune the numbers of tokens of a layer in order, until its share of the time is spent."""
    from modular_kernel.tuning.measurement import DeviceBenchmarker
    from modular_kernel.tuning.search import TuneJob, tune

    if not layer.tokens or share.compute_seconds() <= 0:
        return []
    benchmarker = DeviceBenchmarker(
        layer.pair,
        layer.problem,
        compiler,
        tokens=layer.tokens,
        space=layer.space,
        routing=search.routing,
    )
    job = TuneJob(
        space=layer.space,
        benchmarker=benchmarker,
        tokens=layer.tokens,
        folder=layer.folder,
        budget=share.compute_seconds(),  # computed after the setup, whose time does not count
        ignore_saved=search.ignore_saved,
        on_measurement=progress.advance,
    )
    recorder, results = TuneRecorder(layer, search.times), list["TuneResult"]()
    for tuned in tune(job):
        progress.print_result(layer, tuned)
        recorder.append(tuned)
        results.append(tuned)
    return results
