"""`mk check`: whether a pair is valid for a problem and a machine, with every reason if not."""

from dataclasses import replace
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase
from typing import TYPE_CHECKING, Annotated, Any, Literal

from click.exceptions import Exit

from modular_kernel.cli import output
from modular_kernel.cli.command import option
from modular_kernel.cli.file_options import is_directory
from modular_kernel.cli.machine_options import MachineOptions, on_cluster
from modular_kernel.cli.options import (
    AsJson,
    ExpertsType,
    PfType,
    ProblemOptions,
    options_by_scheme,
)
from modular_kernel.cli.ranks import with_launcher
from modular_kernel.cli.tables import fit_table
from modular_kernel.text import format_count, format_layers

if TYPE_CHECKING:
    from modular_kernel.catalog import Catalog
    from modular_kernel.checkpoints.inspection import InspectionReport
    from modular_kernel.compatibility.support import ExpertsRequirements, Rejection, Verdict
    from modular_kernel.spec.problem import Machine, Problem

_SUFFIX = "PrepareAndFinalize"  # common to most names; the matrix shows it only in its header


def check(
    *,
    options: ProblemOptions,
    machine_options: MachineOptions,
    pf_type: PfType = None,
    experts_type: ExpertsType = None,
    arch: Annotated[
        str | None, option("Check for a GPU of this compute capability, such as 9.0.")
    ] = None,
    device: Annotated[
        Literal["cuda", "cpu"] | None, option("Check for a machine with this device.")
    ] = None,
    as_json: AsJson = None,
) -> None:
    """Check one pair, or every pair, for a problem on this machine or on a described one.

    For a checkpoint folder (--model FOLDER) the headers of its tensor files are checked too. If the
    layers of a model are quantized differently, there is a verdict for each scheme. A pair whose
    weights and buffers for one layer exceed the memory of the machine's GPU is refused.

    Exits with 0 if the pair is valid (without a pair: if any pair is), with 1 if it is refused,
    listing every reason, and with 2 on bad usage. With several schemes, all must be valid.
    """
    cluster = machine_options.cluster()
    options = on_cluster(with_launcher(options), cluster)
    checkpoint = _checkpoint(options)
    problems = _problems_by_layers(options, checkpoint)
    _warn_of_sizes(problems[0][1])
    machine = machine_options.select(cluster, arch, device)
    from modular_kernel.catalog import load_catalog
    from modular_kernel.perf_model.verdicts import judge_pairs_with_memory

    catalog = load_catalog()
    single = pf_type is not None and experts_type is not None
    judged = [
        (layers, problem, judge_pairs_with_memory(catalog, pf_type, experts_type, problem, machine))
        for layers, problem in problems
    ]
    records = [
        _record(verdicts[0]) if single else matrix_record(verdicts, problem, machine)
        for _, problem, verdicts in judged
    ]
    record = records[0]
    if len(judged) > 1:
        groups = zip(judged, records, strict=True)
        record = {"groups": [{"layers": layers, **record} for (layers, *_), record in groups]}
    if checkpoint is not None:
        record |= {"checkpoint": _checkpoint_record(checkpoint)}

    def show() -> None:
        if checkpoint is not None:
            source = f"according to its config.json{_describe_source(checkpoint)}"
            output.line(f"{options.model}: {checkpoint}, {source}")
        for layers, problem, verdicts in judged:
            if layers is not None:
                output.line(f"{format_layers(layers)}: {problem.quant}")
            if single:
                _print_verdict(verdicts[0])
            else:
                print_matrix(verdicts, problem, machine)
        if not single:
            _note_unchecked(catalog)

    output.print_result(record, as_json, show)
    if not all(any(verdict.ok for verdict in verdicts) for _, _, verdicts in judged):
        raise Exit(1)


def _note_unchecked(catalog: "Catalog") -> None:
    for broken in catalog.broken:
        output.note(f"not checked: {broken.name} from {broken.origin}: {broken.error}")
    for name, origins in catalog.duplicates().items():
        output.note(f"not checked: {name} is registered by {' and '.join(origins)}")


def _problems_by_layers(
    options: ProblemOptions, checkpoint: "InspectionReport | None"
) -> "list[tuple[tuple[int, ...] | None, Problem]]":
    """Return the problem of each quantization scheme of the model, with the layers that have it.

    The layers are None if all layers have the same scheme.
    """
    if checkpoint is None:
        problems = options_by_scheme(options)
        first = problems[0][1].problem()
        return [
            (layers, first if layers is None else replace(first, quant=str(scheme_options.quant)))
            for layers, scheme_options in problems
        ]
    groups = checkpoint.groups if options.quant is None else checkpoint.groups[:1]
    first_fields = groups[0].problem_fields
    quant = options.quant or str(first_fields["quant"])
    activation = options.activation or str(first_fields["activation"])
    problem = replace(options, quant=quant, activation=activation).problem()
    return [
        (
            group.layers if len(groups) > 1 else None,
            _with_checkpoint_fields(problem, options, group.problem_fields),
        )
        for group in groups
    ]


def _checkpoint(options: ProblemOptions) -> "InspectionReport | None":
    """Inspect the headers of the safetensors files in the --model folder.

    Returns None if --model is not a folder with a config.json and tensors.
    """
    from modular_kernel.models.config_file import is_file

    if options.model is None or not is_file(options.model):
        return None
    if not is_directory(options.model) and not options.model.endswith(".gguf"):
        return None
    from modular_kernel.checkpoints.checkpoint_files import has_tensors
    from modular_kernel.checkpoints.inspection import inspect

    has_files = has_tensors(Path(options.model))
    return inspect(options.model, options.dtype) if has_files else None


def _describe_source(checkpoint: "InspectionReport") -> str:
    """Describe what the tensor files add to config.json: converted dtypes, or a missing dtype."""
    dtypes = (group.problem_fields.get("dtype") for group in checkpoint.groups)
    dtype = next(filter(None, dtypes), None)  # quantized layers have none
    if checkpoint.converted:
        stored = " and ".join(checkpoint.converted)
        return f"; the files have {stored}, loaded as {dtype}"
    if not checkpoint.dtype_of_files:
        return ""
    return f"; it has no dtype, using {dtype} of the files"


def _with_checkpoint_fields(
    problem: "Problem", options: ProblemOptions, from_files: "dict[str, Any]"
) -> "Problem":
    """Return the problem with the checkpoint's quant and activation, unless options set them."""
    fields = {name: from_files[name] for name in ("quant", "activation")}
    set_by_user = {name for name in fields if getattr(options, name) is not None}
    return replace(problem, **{n: value for n, value in fields.items() if n not in set_by_user})


def _checkpoint_record(checkpoint: "InspectionReport") -> dict[str, object]:
    groups = [
        {
            "layers": group.layers,
            "format": str(group.format),
            "quant": group.problem_fields["quant"],
            "bytes": group.nbytes,
        }
        for group in checkpoint.groups
    ]
    only = groups[0] if len(groups) == 1 else {"format": None, "quant": None}
    return {
        "layers": checkpoint.layers,
        "format": only["format"],
        "bytes": checkpoint.nbytes,
        "quant": only["quant"],
        "groups": groups,
        "mtp_layers": dict(checkpoint.extra),
        "dtype_of_files": checkpoint.dtype_of_files,
        "converted": checkpoint.converted,
    }


def _warn_of_sizes(problem: "Problem") -> None:
    """Warn of sizes that are valid, but probably a mistake."""
    if problem.top_k > problem.experts:
        output.note(f"warning: top_k={problem.top_k} of {problem.experts} experts: ids will repeat")
    if problem.tokens == 0:
        output.note("warning: tokens=0: every call is empty")


def explain_pair(verdict: "Verdict") -> tuple[str, ...]:
    """Return notes on a valid pair: the path that its calls take, and NaN that it may hide."""
    from modular_kernel.catalog import load_catalog

    experts = load_catalog().experts(verdict.experts)
    return (*experts.explained(verdict.problem), *_hidden_nan(experts.requires, verdict.problem))


def _hidden_nan(requires: "ExpertsRequirements", problem: "Problem") -> tuple[str, ...]:
    """Return a note if a NaN in the weights may become a finite value, as the experts declare."""
    kind = problem.act.kind
    if kind not in requires.nan_clamping_activations:
        return ()
    return (f"a NaN in weights, scales or biases is clamped to the limit of {kind}",)


def _record(verdict: "Verdict") -> dict[str, object]:
    return {
        "prepare_finalize": verdict.prepare_finalize,
        "experts": verdict.experts,
        "ok": verdict.ok,
        "rejections": verdict.rejections,
        "explained": explain_pair(verdict) if verdict.ok else (),
        "problem": verdict.problem,
        "machine": verdict.machine,
    }


def matrix_record(
    verdicts: "list[Verdict]", problem: "Problem", machine: "Machine"
) -> dict[str, object]:
    pairs = []
    for verdict in verdicts:
        record = _record(verdict)
        pairs.append({key: record[key] for key in record if key not in ("problem", "machine")})
    return {"problem": problem, "machine": machine, "pairs": pairs}


def _print_verdict(verdict: "Verdict") -> None:
    subject = f"{verdict.problem} on {verdict.machine}"
    if verdict.ok:
        output.line(f"{verdict.pairing}: valid for {subject}")
        for line in explain_pair(verdict):
            output.line(f"  {line}")
        return
    count = format_count(len(verdict.rejections), "reason")
    output.line(f"{verdict.pairing}: refused for {subject}, {count}")
    output.print_rejections(verdict.rejections)


def print_matrix(verdicts: "list[Verdict]", problem: "Problem", machine: "Machine") -> None:
    """Print the matrix of pairs, and the first rejection by each rule."""
    valid = sum(verdict.ok for verdict in verdicts)
    output.line(f"{problem} on {machine}: {valid} of {len(verdicts)} pairs are valid")
    by_rule: dict[str, list[Rejection]] = {}
    for verdict in verdicts:
        for rule, first in {r.rule: r for r in reversed(verdict.rejections)}.items():
            by_rule.setdefault(rule, []).append(first)
    letters = dict(zip(by_rule, letters_for(len(by_rule)), strict=True))
    names = dict.fromkeys(verdict.experts for verdict in verdicts)
    cells = {(v.prepare_finalize, v.experts): _format_cell(v, letters) for v in verdicts}
    rows = [
        (pf.removesuffix(_SUFFIX), *(cells[pf, experts] for experts in names))
        for pf in dict.fromkeys(verdict.prepare_finalize for verdict in verdicts)
    ]
    _print_grid(rows, tuple(names))
    if valid == len(verdicts):
        return
    reasons = [
        (letters[rule], rule, len(refusals), f"got {refusals[0].got}, need {refusals[0].need}")
        for rule, refusals in by_rule.items()
    ]
    output.table(("", "rule", "pairs", "first rejection"), reasons)
    output.line("For all reasons of one pair: mk check --pf-type X --experts-type Y")


def _print_grid(rows: list[tuple[str, ...]], names: tuple[str, ...]) -> None:
    """Print the matrix with a column per experts part.

    If the names of the columns do not fit the terminal, the columns are numbered. If the numbered
    columns do not fit either, the matrix is split into several tables.
    """
    head = f"..{_SUFFIX}"
    if fit_table((head, *names), rows, output.width()) is not None:
        output.table((head, *names), rows)
        return
    numbers, start = tuple(f"[{number}]" for number, _ in enumerate(names, 1)), 0
    while start < len(names):
        for end in range(len(names), start, -1):
            part = [(row[0], *row[1 + start : 1 + end]) for row in rows]
            columns = (head, *numbers[start:end])
            if end == start + 1 or fit_table(columns, part, output.width()) is not None:
                output.table(columns, part)
                break
        start = end
    output.line(", ".join(f"{short}={name}" for short, name in zip(numbers, names, strict=True)))


def _format_cell(verdict: "Verdict", letters: dict[str, str]) -> str:
    """Format a verdict as "ok", or as the letters of the violated rules."""
    return "ok" if verdict.ok else "".join(sorted({letters[r.rule] for r in verdict.rejections}))


def letters_for(number: int) -> list[str]:
    """Return labels for `number` rules: a to z, then A to Z, then numbers in parentheses."""
    letters = [*ascii_lowercase, *ascii_uppercase]
    return letters[:number] + [f"({index})" for index in range(len(letters), number)]
