"""Compare our layers with public ones in one run, for the README's table and plot.

    make bench                                            # all layers and schemes
    make bench ARGS="--schemes bf16,fp8 --minutes 8"      # some schemes, with a time limit
    make bench ARGS="--load A.json --load B.json"         # merge and render earlier records
    make bench ARGS="--tiny"                              # small layers, on any machine

Layer sizes are random, with a committed seed (modular_kernel/bench/sampled_layers.py). A case is a
layer with a routing and a number of tokens. A block has all cases of a layer, with one scheme. In
each case of a block, these layers are timed interleaved in one process
(modular_kernel/bench/interleaved.py): `FusedMoE` with default arguments, the layer that
`mk.compose` builds, every part, torch._grouped_mm, and the layers in tools/bench_peers.py.
Libraries that are not installed are listed.
"""

import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import bench_peers
import click
import in_checkout  # adds the checkout to sys.path
import torch

from modular_kernel.bench.candidates import (
    Candidate,
    ComposedLayer,
    DefaultLayer,
    baseline_candidates,
    pairing_candidates,
    peer_candidates,
)
from modular_kernel.bench.interleaved import ROUNDS, CaseBlock, Comparison, run_interleaved
from modular_kernel.bench.sampled_layers import COUNT, SEED, SampledLayer, sample_layers
from modular_kernel.bench.speedups import (
    layers_table,
    list_days,
    merge_reports,
    plot_speedups,
    render_markdown,
    replace_section,
    speedups_table,
    unmeasured_list,
)
from modular_kernel.catalog import load_catalog, this_machine
from modular_kernel.measure.cases import LayerCase, operand_types
from modular_kernel.measure.prepared_weights import prepared_specs_of
from modular_kernel.measure.records import OURS, Report
from modular_kernel.measure.routing_patterns import RoutingKind
from modular_kernel.operators.kernel_cache import select_default_experts
from modular_kernel.spec.quantization import QuantScheme

PEERS = Path(bench_peers.__file__)
README = in_checkout.ROOT / "README.md"
README_PLOT = "docs/benchmarks/bench.svg"
PREPARE_FINALIZE = "MoEPrepareAndFinalizeNoEP"
# Name of a scheme on the command line -> quantization scheme of our layers.
SCHEMES = {
    "bf16": "none",
    "fp8": "fp8_w8a8_block",
    "int4": "int4_w4a16_group",
    "mxfp4": "mxfp4_w4a16",
}
TOKENS = (1, 16, 64, 256, 1024, 4096)
ROUTINGS = ("uniform", "zipf1.2")
TINY_LAYERS = (SampledLayer(8, 2, 256, 128), SampledLayer(4, 2, 128, 256))
TINY_TOKENS = (1, 16)
TINY_COMPOSE_SECONDS = 0.0  # with this budget, compose times nothing


def split_list(text):
    """Split a comma-separated list."""
    return [item for item in text.split(",") if item]


def parse_schemes(text):
    """Return the schemes in a comma-separated list of short or full names."""
    scheme_by_name = {**SCHEMES, **{scheme: scheme for scheme in SCHEMES.values()}}
    unknown = [name for name in split_list(text) if name not in scheme_by_name]
    if unknown or not split_list(text):
        got = ", ".join(unknown) or "no scheme"
        raise click.BadParameter(f"got {got}, need some of {', '.join(SCHEMES)}")
    return list(dict.fromkeys(scheme_by_name[name] for name in split_list(text)))


def parse_token_counts(text):
    try:
        tokens = tuple(dict.fromkeys(int(number) for number in split_list(text)))
    except ValueError:
        tokens = ()
    if not tokens or min(tokens) < 1:
        raise click.BadParameter(f"got {text!r}, need positive integers, such as 1,16,64")
    return tokens


def select_layers(text, seed, *, tiny):
    """Return the sampled layers whose indices `text` lists, or all layers if `text` is empty."""
    layers = TINY_LAYERS if tiny else sample_layers(seed)
    try:
        indices = [int(number) for number in split_list(text)] or range(len(layers))
        return [layers[index] for index in indices if index >= 0 or layers[len(layers)]]
    except (ValueError, IndexError):
        need = f"numbers from 0 to {len(layers) - 1}"
        raise click.BadParameter(f"got {text!r}, need {need}") from None


def make_our_candidates(scheme, cases, machine, *, compose_seconds, prepare):
    """Return FusedMoE, the composed layer, and every part that can run these cases.

    prepare: whether to use prepared weights in parts that support them, instead of plain weights.
    """
    problems = [
        replace(case.problem, quant=scheme, graph=machine.device == "cuda") for case in cases
    ]
    pairs = pairing_candidates(PREPARE_FINALIZE, None, problems, machine, prepared=prepare)
    prepared_names = {
        candidate.name.removesuffix(" prepared") for candidate in pairs if candidate.prepared
    }
    pairs = [
        candidate
        for candidate in pairs
        if candidate.prepared or candidate.name not in prepared_names
    ]
    device = torch.device(machine.device)
    default = select_default_experts(PREPARE_FINALIZE, problems[0], device)
    prepared = prepare and bool(prepared_specs_of(default, problems[0]))
    tokens = tuple(dict.fromkeys(case.problem.tokens for case in cases))
    make_composed = partial(
        ComposedLayer, scheme, machine, tokens, compose_seconds, prepared=prepare
    )
    return [
        Candidate(
            DefaultLayer.name, scheme, OURS, partial(DefaultLayer, scheme, prepared), prepared
        ),
        Candidate(ComposedLayer.name, scheme, OURS, make_composed, prepare),
        *pairs,
    ]


def find_peers(scheme, case, prefixes):
    """Return torch._grouped_mm and the public layers whose operand types are those of `scheme`.

    prefixes: name prefixes of the peers to include. If it is empty, all are included.
    """
    our_types = operand_types(case.problem, QuantScheme.parse(scheme))
    return [
        candidate
        for candidate in [*baseline_candidates(), *peer_candidates(PEERS)]
        if operand_types(case.problem, QuantScheme.parse(candidate.quant)) == our_types
        and (not prefixes or any(candidate.name.startswith(prefix) for prefix in prefixes))
    ]


def list_missing_layers(machine, prefixes):
    """Return the names of peers, and of our parts, whose packages are not installed."""
    peers = [
        name
        for name in bench_peers.list_missing()
        if not prefixes or any(name.startswith(prefix) for prefix in prefixes)
    ]
    parts = []
    catalog = load_catalog()
    for name in catalog.names("experts"):
        absent_packages = set(catalog.experts(name).requires.packages) - machine.packages
        if absent_packages:
            parts.append(f"{name} (needs {', '.join(sorted(absent_packages))})")
    return (*peers, *parts)


def make_blocks(  # noqa: PLR0913  options of the command line
    layers, schemes, tokens, routings, machine, *, peers, compose_seconds, prepare
):
    """Return a block for each layer and scheme.

    Routings alternate within a block, so that a time limit affects all routings equally.
    """
    blocks = []
    kinds = [RoutingKind.parse(routing) for routing in routings]
    for layer in layers:
        cases = tuple(
            LayerCase(layer.name, layer.problem(count), kind) for count in tokens for kind in kinds
        )
        for scheme in schemes:
            candidates = make_our_candidates(
                scheme, cases, machine, compose_seconds=compose_seconds, prepare=prepare
            )
            candidates += find_peers(scheme, cases[0], peers)
            blocks.append(CaseBlock(cases, tuple(candidates)))
    return blocks


def compile_in_advance(blocks, workers, seconds):
    """Compile the kernels of all blocks in parallel processes, which fill the cache on disk.

    Failures are printed. A kernel that does not compile fails again in this process.

    seconds: time limit of a process.
    """

    def compile_block(number):
        command = [sys.executable, __file__, *sys.argv[1:], "--compile-block", str(number)]
        try:
            result = subprocess.run(
                command, capture_output=True, text=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired:
            click.echo(f"compiling {blocks[number].name}: ended after {seconds:.0f} s", err=True)
            return
        if result.returncode:
            click.echo(f"compiling {blocks[number].name}: {result.stderr[-300:]}", err=True)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(compile_block, range(len(blocks))))


def render(report, out):
    """Write bench.md and bench.svg to the folder `out`, and print the tables."""
    (out / "bench.md").write_text(render_markdown(report), encoding="utf-8")
    if find_spec("matplotlib") is None:
        click.echo("no plot: matplotlib is not installed", err=True)
    elif any(row.is_timed for row in report.rows):
        plot_speedups(report, out / "bench.svg")
    lines = [*speedups_table(report), "", *layers_table(report), "", *unmeasured_list(report)]
    click.echo("\n".join(lines))


def update_readme(report):
    """Replace the README's section between its markers with a sentence, a table and a plot."""
    plot_speedups(report, in_checkout.ROOT / README_PLOT)
    text = README.read_text(encoding="utf-8")
    env = report.environment
    shapes = len(dict.fromkeys(row.shape for row in report.rows))
    versions = ", ".join(f"{name} {env[name]}" for name in ("torch", "triton") if env.get(name))
    lines = [
        "",
        f"{shapes} layers with random sizes, timed on {env.get('device')}, {versions},",
        f"{' and '.join(list_days(env))}. *Speedup* is the time of the best public layer",
        "divided by ours: a value above 1 means that ours is faster, unlike in the other tables.",
        "",
        *speedups_table(report),
        "",
        f"![Speedup over the best public layer by number of tokens]({README_PLOT})",
        "",
    ]
    text = replace_section(text, "bench", lines, filename="README.md")
    README.write_text(text, encoding="utf-8")


@click.command(context_settings={"show_default": True})
@click.option("--layers", default="", help="Indices of the sampled layers, such as 0,2.")
@click.option("--seed", default=SEED, help=f"Seed of the sizes of {COUNT} layers.")
@click.option("--schemes", default=",".join(SCHEMES), help="Schemes.")
@click.option("--tokens", default="", help="Numbers of tokens.")
@click.option("--routing", default=",".join(ROUTINGS), help="Distributions of the routing.")
@click.option("--peers", default="", help="Name prefixes of the peers to include.  [default: all]")
@click.option(
    "--minutes",
    type=float,
    help="No case starts after this time, which is divided among layers and schemes.",
)
@click.option("--rounds", default=ROUNDS, help="Timed replays of each layer in a case.")
@click.option("--workers", default=0, help="Number of processes that compile kernels in advance.")
@click.option("--compile-minutes", default=4.0, help="Time limit of each of these processes.")
@click.option("--compose-seconds", default=8.0, help="Budget of compose per layer and scheme.")
@click.option("--prepare/--no-prepare", default=True, help="Prepare weights if the experts can.")
@click.option("--bandwidth", type=float, help="TB/s of the roofline.  [default: as measured]")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default="out/bench",
    help="Folder of bench.json, bench.md, bench.svg.",
)
@click.option(
    "--load",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Render this record instead of timing; can be repeated.",
)
@click.option("--readme", is_flag=True, help="Replace the section of the README.")
@click.option("--tiny", is_flag=True, help="Use small layers, which run on any machine.")
@click.option("--dry-run", is_flag=True, help="List the layers that would be timed.")
@click.option("--compile-block", type=int, hidden=True)
def bench(  # noqa: PLR0913  options of the command line
    *,
    layers,
    seed,
    schemes,
    tokens,
    routing,
    peers,
    minutes,
    rounds,
    workers,
    compile_minutes,
    compose_seconds,
    prepare,
    bandwidth,
    out,
    load,
    readme,
    tiny,
    dry_run,
    compile_block,
):
    """Time our layers interleaved with public ones, and render the README's table and plot."""
    started = time.monotonic()
    report = load_reports(load) if load else None
    if report is None:
        schemes_to_time, peer_prefixes = parse_schemes(schemes), split_list(peers)
        machine = this_machine()
        if machine.device != "cuda" and not (tiny or dry_run):
            raise click.BadParameter("got no GPU, need one, or --tiny, or --dry-run")
        blocks = make_blocks(
            select_layers(layers, seed, tiny=tiny),
            schemes_to_time,
            parse_token_counts(tokens) if tokens else TINY_TOKENS if tiny else TOKENS,
            split_list(routing),
            machine,
            peers=peer_prefixes,
            compose_seconds=TINY_COMPOSE_SECONDS if tiny else compose_seconds,
            prepare=prepare,
        )
        missing = list_missing_layers(machine, peer_prefixes)
        if dry_run:
            print_blocks(blocks, missing)
            return
        comparison = Comparison(
            tuple(blocks),
            machine,
            rounds=rounds,
            bandwidth=None if bandwidth is None else bandwidth * 1e12,
            missing=missing,
            command=shlex.join(["make bench", *sys.argv[1:]]),
        )
        if compile_block is not None:
            block = (blocks[compile_block],)
            run_interleaved(replace(comparison, blocks=block, compile_only=True))
            return
        if workers:
            compile_in_advance(blocks, workers, compile_minutes * 60)
            click.echo(f"compiled in {time.monotonic() - started:.0f} s", err=True)
        seconds = None if minutes is None else minutes * 60 - (time.monotonic() - started)
        out.mkdir(parents=True, exist_ok=True)
        report = run_interleaved(
            replace(comparison, seconds=seconds),
            lambda line: click.echo(line, err=True),
            lambda unfinished: unfinished.write(out / "bench.json"),
        )
    out.mkdir(parents=True, exist_ok=True)
    report.write(out / "bench.json")
    render(report, out)
    if readme:
        update_readme(report)


def print_blocks(blocks, missing):
    for block in blocks:
        case = block.cases[0]
        num_weights = case.problem.experts * case.problem.hidden * case.problem.intermediate
        click.echo(f"{block.name}: E*H*I {num_weights:.3g}, {len(block.cases)} cases")
        for candidate in block.candidates:
            library = f", products of {candidate.library}" if candidate.library else ""
            click.echo(f"  {candidate.name} {candidate.quant} ({candidate.origin}{library})")
    for name in missing:
        click.echo(f"not installed: {name}")


def load_reports(paths):
    return merge_reports([Report.from_json(path.read_text(encoding="utf-8")) for path in paths])


if __name__ == "__main__":
    bench()
