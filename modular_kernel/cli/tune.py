"""`mk tune`: find the fastest launches of a part on this GPU, and keep them in a file."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from modular_kernel.cli import output
from modular_kernel.cli.host import prepare_host
from modular_kernel.cli.options import AsJson, ExpertsType, PfType, ProblemOptions
from modular_kernel.cli.presets import SHAPES
from modular_kernel.cli.tune_output import Layer, print_text, progress, record
from modular_kernel.errors import ConfigurationError, IncompatibleError

if TYPE_CHECKING:
    from modular_kernel.tuning.compiled import Compiler, Pair
    from modular_kernel.tuning.search import Tuned
    from modular_kernel.types import Machine, Problem

_TOKENS = tuple(1 << power for power in range(14))
_EXTRA = 10  # measurements of one number of tokens beyond those that are compiled ahead
_NO_GPU = (
    "mk tune: no CUDA device here, so nothing can be measured, and nothing was written; "
    "`mk tune --explain` works without one"
)


@dataclass(frozen=True, kw_only=True)
class Search:
    """What is tuned for, and within what."""

    tokens_list: Annotated[
        str | None,
        typer.Option(
            help="Tokens of a call, such as 1,16,128.  [default: --tokens, or 1,2,4,..,8192]",
            show_default=False,
        ),
    ] = None
    budget: Annotated[float, typer.Option(help="Seconds in all, compiling included.")] = 600
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the files.  [default: MK_CONFIG_DIR, where they are found]",
            show_default=False,
        ),
    ] = None
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start afresh instead of continuing a file.")
    ] = False
    routing: Annotated[str, typer.Option(help="uniform, zipf, zipfA or hotN (hot1).")] = "uniform"
    workers: Annotated[
        int | None,
        typer.Option(
            help="Processes that compile.  [default: one less than the CPUs]", show_default=False
        ),
    ] = None

    def tokens(self, options: ProblemOptions) -> tuple[int, ...]:
        """The numbers of tokens asked for, or all."""
        if self.tokens_list is None:
            return _TOKENS if options.tokens is None else (options.tokens,)
        words = self.tokens_list.split(",")
        if not all(
            word.isdecimal() and word.isascii() and 0 < int(word) < 1 << 20 for word in words
        ):
            need = "numbers from 1 to 1048575, such as 1,16,128"
            raise ConfigurationError("--tokens-list", got=repr(self.tokens_list[:80]), need=need)
        return tuple(dict.fromkeys(map(int, words)))


def tune(
    *,
    options: ProblemOptions,
    search: Search,
    pf_type: PfType = None,
    experts_type: ExpertsType = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Only say what is launched, and why; needs no GPU.")
    ] = False,
    device_name: Annotated[
        str | None,
        typer.Option(help="With --explain: as if on this GPU, such as 'NVIDIA H200'."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the launches of a part on this GPU and keep the fastest, a file for each layer.

    --model takes several names, separated by commas: those below, and mixtral, dsv3_ep8,
    qwen3_30b, gptoss, dsv3_256. Every choice is checked against a float64 oracle before it is
    timed. Results are saved after each number of tokens; the same command continues.

    Exits with 1 without a GPU, or if the pair is refused, computes wrong numbers or cannot run.
    """
    if not search.budget > 0:
        raise ConfigurationError("--budget", got=search.budget, need="> 0")
    if search.workers is not None and search.workers < 1:
        raise ConfigurationError("--workers", got=search.workers, need=">= 1")
    if device_name is not None and not explain:
        raise ConfigurationError("--device-name", got=repr(device_name), need="--explain beside it")
    layers = _layers(options)
    if explain:
        options = replace(options, tokens=options.tokens or layers[0][1].tokens)
    tokens = search.tokens(options)
    prepare_host(quiet=True)
    from modular_kernel.catalog import this_machine

    if explain:
        _explain([problem for _, problem in layers], tokens, experts_type, device_name, as_json)
        return
    machine = this_machine()
    if machine.device != "cuda":
        output.note(_NO_GPU)
        if as_json:
            output.print_json({"ok": False, "reason": _NO_GPU})
        raise typer.Exit(1)
    most = [(name, problem.with_tokens(max(tokens))) for name, problem in layers]
    chosen = [(name, p, _pair(p, machine, pf_type, experts_type)) for name, p in most]
    _run(chosen, tokens, search, as_json)


def _layers(options: ProblemOptions) -> "list[tuple[str, Problem]]":
    """The layers that --model names, or the one of the other options."""
    names = [None] if options.model is None else options.model.split(",")
    layers = []
    for name in names:
        if name in SHAPES:
            given = {k: v for k, v in SHAPES[name].items() if getattr(options, k) is None}
            layers.append((name, replace(options, model=None, **given).problem()))  # type: ignore[arg-type]
        else:
            layers.append((name or "", replace(options, model=name).problem()))
    return layers


def _tunable_parts(problem: "Problem", experts: str | None) -> list[str]:
    """Names of the experts parts that can be tuned: the one named, or all."""
    from modular_kernel.catalog import load_catalog

    catalog = load_catalog()
    names = catalog.names("experts") if experts is None else (experts,)
    found = [name for name in names if catalog.experts(name).tunable(problem) is not None]
    if not found:
        need = "an experts part whose launches can be tuned"
        raise ConfigurationError("--experts-type", got=experts or "no such part", need=need)
    return found


def _pair(problem: "Problem", machine: "Machine", pf: str | None, experts: str | None) -> "Pair":
    """The first valid pair that the names leave; IncompatibleError with all reasons if none is."""
    from modular_kernel.catalog import check, load_catalog
    from modular_kernel.tuning.compiled import Pair

    pfs = load_catalog().names("prepare_finalize") if pf is None else (pf,)
    names = [(p, e) for e in _tunable_parts(problem, experts) for p in pfs]
    verdicts = [check(*pair, problem, machine) for pair in names]
    for pair, verdict in zip(names, verdicts, strict=True):
        if verdict.ok:
            return Pair(*pair, machine)
    reasons = [r for verdict in verdicts for r in verdict.rejections]
    title = verdicts[0].pairing if len(verdicts) == 1 else f"every pairing for {problem}"
    raise IncompatibleError(title, reasons)


def _explain(
    problems: "Sequence[Problem]",
    tokens: Sequence[int],
    experts: str | None,
    device_name: str | None,
    as_json: bool,
) -> None:
    from modular_kernel.catalog import load_catalog

    texts = []
    for problem in problems:
        part = _tunable_parts(problem, experts)[0]
        space = load_catalog().experts(part).tunable(problem)
        assert space is not None
        texts += [space.explain(number, device_name) for number in tokens]
    if as_json:
        output.print_json({"explanations": texts})
    else:
        output.line("\n\n".join(texts))


def _run(
    chosen: "Sequence[tuple[str, Problem, Pair]]",
    tokens: Sequence[int],
    search: Search,
    as_json: bool,
) -> None:
    """Tune layer by layer, each with its share of what is left of the budget."""
    import time

    from modular_kernel.settings import read_settings
    from modular_kernel.tuning.compiled import Compiler

    folder = search.out or read_settings().config_dir
    end, records, ok = time.monotonic() + search.budget, list[dict[str, object]](), True
    with Compiler(search.workers or max(1, (os.cpu_count() or 2) - 1)) as compiler:
        for index, (name, problem, pair) in enumerate(chosen):
            budget = (end - time.monotonic()) / (len(chosen) - index)
            layer = Layer(name or str(problem), problem, pair, tuple(tokens), folder)
            done, left = _tune_layer(layer, search, max(budget, 0.0), compiler)
            records.append(record(layer, done, left))
            ok &= all(tuned.best is not None and not tuned.wrong for tuned in done)
            if not as_json:
                print_text(layer, done, left)
    if as_json:
        output.print_json({"ok": ok, "machine": chosen[0][2].machine, "layers": records})
    if not ok:
        raise typer.Exit(1)


def _tune_layer(
    layer: Layer, search: Search, budget: float, compiler: "Compiler"
) -> "tuple[list[Tuned], list[int]]":
    """What was tuned, and the numbers of tokens that are left."""
    import time

    from modular_kernel.tuning.measured import Measured
    from modular_kernel.tuning.search import Job, remaining, tune

    start, space = time.monotonic(), layer.pair.space(layer.problem)
    with progress(layer, sum(len(space.likely(t)) + _EXTRA for t in layer.tokens)) as (tick, tell):
        for number in layer.tokens[:2]:  # while the weights are made
            problem = layer.problem.with_tokens(number)
            compiler.begin(layer.pair, problem, space.likely(number))
        bench = Measured(layer.pair, layer.problem, compiler, space=space, routing=search.routing)
        job = Job(
            space=space,
            bench=bench,
            tokens=layer.tokens,
            folder=layer.folder,
            budget=budget - (time.monotonic() - start),
            fresh=search.fresh,
            tick=tick,
        )
        todo, done = remaining(job), list["Tuned"]()
        for tuned in tune(job):
            tell(tuned)
            done.append(tuned)
    return done, [number for number in todo if number not in {tuned.tokens for tuned in done}]
