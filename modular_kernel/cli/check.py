"""`mk check`: checks whether pairings are valid for a problem and a machine, and if not, why.

The rules in `modular_kernel.compatibility` determine the verdicts. For one pairing, `mk check`
prints the whole verdict. For several pairings, it prints a list or a matrix.
"""

from dataclasses import replace
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase
from typing import TYPE_CHECKING, Any

from click.exceptions import Exit

from modular_kernel.cli import output
from modular_kernel.cli.file_options import is_directory
from modular_kernel.cli.machine_options import CheckedMachineOptions, apply_cluster
from modular_kernel.cli.options import (
    AsJson,
    DescribedProblemOptions,
    ExpertsType,
    PfType,
    ProblemOptions,
    split_by_scheme,
)
from modular_kernel.cli.ranks import apply_launcher
from modular_kernel.cli.refusals import (
    add_default_hints,
    describe_defaults,
    group_by_rule,
    print_pairings,
    print_reasons,
    print_rejections,
    print_valid_pairings,
)
from modular_kernel.cli.tables import fit_table
from modular_kernel.text import format_count, format_layers

if TYPE_CHECKING:
    from modular_kernel.catalog import Catalog
    from modular_kernel.checkpoints.inspection import InspectionReport
    from modular_kernel.compatibility.support import ExpertsRequirements, Verdict
    from modular_kernel.spec.problem import Machine, Problem

_SUFFIX = "PrepareAndFinalize"  # most names end with it, so the matrix shows it only in its header


def check(
    *,
    options: DescribedProblemOptions,
    machine_options: CheckedMachineOptions,
    pf_type: PfType = None,
    experts_type: ExpertsType = None,
    as_json: AsJson = None,
) -> None:
    """Check pairings of parts for a problem, on this machine or on a described one.

    With --pf-type and --experts-type, checks one pairing and lists every reason against it.
    Otherwise, checks all pairings, or all pairings with the given part, and lists the valid and the
    refused ones by reason; if the terminal is wide enough (COLUMNS), it prints a matrix instead. A
    pairing is also refused if its weights and buffers for one layer exceed the memory of the GPU.

    Without --model, sizes that are not given have default values. A described machine is assumed
    to have only the packages of --packages, which are printed above the verdicts.

    --model FOLDER also checks the headers of the tensor files in the folder of a checkpoint. If the
    layers of a model are quantized differently, there is a verdict for each scheme.

    Exits with 0 if the pairing, or any of several pairings, is valid. With several schemes, this
    must hold for each scheme. Exits with 1 otherwise, and with 2 on bad usage.
    """
    cluster = machine_options.parse_cluster()
    layer_options = apply_cluster(apply_launcher(options), cluster)
    checkpoint = _inspect_checkpoint(layer_options)
    problems = _make_problems(layer_options, checkpoint)
    _warn_about_sizes(problems[0][1])
    machine = machine_options.resolve(cluster)
    from modular_kernel.catalog import load_catalog
    from modular_kernel.perf_model.verdicts import judge_pairs_with_memory

    catalog = load_catalog()
    is_single = pf_type is not None and experts_type is not None
    verdicts_by_layers = [
        (layers, problem, judge_pairs_with_memory(catalog, pf_type, experts_type, problem, machine))
        for layers, problem in problems
    ]
    records = [
        _make_pairing_record(verdicts[0])
        if is_single
        else make_matrix_record(verdicts, problem, machine)
        for _, problem, verdicts in verdicts_by_layers
    ]
    record = records[0]
    if len(verdicts_by_layers) > 1:
        groups = zip(verdicts_by_layers, records, strict=True)
        record = {"groups": [{"layers": layers, **record} for (layers, *_), record in groups]}
    if checkpoint is not None:
        record |= {"checkpoint": _make_checkpoint_record(checkpoint)}

    def print_text() -> None:
        _print_assumptions(layer_options, machine_options, machine)
        if checkpoint is not None:
            source = f"according to its config.json{_describe_source(checkpoint)}"
            output.print_line(f"{options.model}: {checkpoint}, {source}")
        for layers, problem, verdicts in verdicts_by_layers:
            if layers is not None:
                output.print_line(f"{format_layers(layers)}: {problem.quant}")
            if is_single:
                _print_verdict(verdicts[0], layer_options)
            else:
                hinted = [
                    replace(v, rejections=add_default_hints(v.rejections, layer_options))
                    for v in verdicts
                ]
                print_matrix(hinted, problem, machine)
        if not is_single:
            _note_broken_parts(catalog)

    output.print_result(record, as_json, print_text)
    if not all(any(verdict.ok for verdict in verdicts) for _, _, verdicts in verdicts_by_layers):
        raise Exit(1)


def _print_assumptions(
    options: ProblemOptions, machine_options: CheckedMachineOptions, machine: "Machine"
) -> None:
    """Print the layer that is used without --model, and the packages of a described machine."""
    is_described = machine_options.is_described
    if options.is_default_layer or (options.model is None and is_described):
        output.print_line(f"layer: {options.describe_layer()}")
    if is_described:
        cluster = machine_options.parse_cluster()
        gpus = "" if cluster is None else f"machine {machine_options.machine}: {cluster}; "
        output.print_line(f"{gpus}{machine_options.describe_packages(cluster, machine)}")


def _note_broken_parts(catalog: "Catalog") -> None:
    """Print the parts that could not be loaded and are therefore missing from the matrix."""
    for entry in catalog.broken:
        output.print_note(f"not checked: {entry.name} from {entry.origin}: {entry.error}")
    for name, origins in catalog.duplicates().items():
        output.print_note(f"not checked: {name} is registered by {' and '.join(origins)}")


def _make_problems(
    options: ProblemOptions, checkpoint: "InspectionReport | None"
) -> "list[tuple[tuple[int, ...] | None, Problem]]":
    if checkpoint is None:
        problems = split_by_scheme(options)
        first_problem = problems[0][1].problem()
        return [
            (
                layers,
                first_problem
                if layers is None
                else replace(first_problem, quant=str(scheme_options.quant)),
            )
            for layers, scheme_options in problems
        ]
    groups = checkpoint.groups if options.quant is None else checkpoint.groups[:1]
    first_group_fields = groups[0].problem_fields
    quant = options.quant or str(first_group_fields["quant"])
    activation = options.activation or str(first_group_fields["activation"])
    problem = replace(options, quant=quant, activation=activation).problem()
    return [
        (
            group.layers if len(groups) > 1 else None,
            _with_checkpoint_fields(problem, options, group.problem_fields),
        )
        for group in groups
    ]


def _inspect_checkpoint(options: ProblemOptions) -> "InspectionReport | None":
    """Read the headers of the tensor files of --model.

    Returns None unless --model is a GGUF file or a folder with a config.json and tensor files.
    """
    from modular_kernel.models.config_file import is_model_path

    if options.model is None or not is_model_path(options.model):
        return None
    if not is_directory(options.model) and not options.model.endswith(".gguf"):
        return None
    from modular_kernel.checkpoints.checkpoint_files import has_tensors
    from modular_kernel.checkpoints.inspection import inspect

    has_files = has_tensors(Path(options.model))
    return inspect(options.model, options.dtype) if has_files else None


def _describe_source(checkpoint: "InspectionReport") -> str:
    """Describe the dtype of the tensor files if it is not the dtype in config.json."""
    dtypes = (group.problem_fields.get("dtype") for group in checkpoint.groups)
    dtype = next(filter(None, dtypes), None)  # quantized layers have no dtype
    if checkpoint.converted_dtypes:
        stored_dtypes = " and ".join(checkpoint.converted_dtypes)
        return f"; the files have {stored_dtypes}, loaded as {dtype}"
    if not checkpoint.is_dtype_from_files:
        return ""
    return f"; it has no dtype, using {dtype} of the files"


def _with_checkpoint_fields(
    problem: "Problem", options: ProblemOptions, file_fields: "dict[str, Any]"
) -> "Problem":
    """Return the problem with the quant and activation of the files, unless options set them."""
    fields = {name: file_fields[name] for name in ("quant", "activation")}
    user_fields = {name for name in fields if getattr(options, name) is not None}
    return replace(problem, **{n: value for n, value in fields.items() if n not in user_fields})


def _make_checkpoint_record(checkpoint: "InspectionReport") -> dict[str, object]:
    groups = [
        {
            "layers": group.layers,
            "format": str(group.format),
            "quant": group.problem_fields["quant"],
            "bytes": group.nbytes,
        }
        for group in checkpoint.groups
    ]
    common_fields = groups[0] if len(groups) == 1 else {"format": None, "quant": None}
    return {
        "layers": checkpoint.layers,
        "format": common_fields["format"],
        "bytes": checkpoint.nbytes,
        "quant": common_fields["quant"],
        "groups": groups,
        "mtp_layers": dict(checkpoint.mtp_layers),
        "dtype_of_files": checkpoint.is_dtype_from_files,
        "converted": checkpoint.converted_dtypes,
    }


def _warn_about_sizes(problem: "Problem") -> None:
    """Print a warning about sizes that are valid but probably mistakes."""
    if problem.top_k > problem.experts:
        output.print_note(
            f"warning: top_k={problem.top_k} of {problem.experts} experts: ids will repeat"
        )
    if problem.tokens == 0:
        output.print_note("warning: tokens=0: every call is empty")


def explain_pairing(verdict: "Verdict") -> tuple[str, ...]:
    """Return notes on a valid pairing: the path of its calls, and whether it may hide a NaN."""
    from modular_kernel.catalog import load_catalog

    experts = load_catalog().experts(verdict.experts)
    return (
        *experts.explained(verdict.problem),
        *_explain_nan_clamping(experts.requires, verdict.problem),
    )


def _explain_nan_clamping(requires: "ExpertsRequirements", problem: "Problem") -> tuple[str, ...]:
    """Return a note if the experts declare that an activation turns NaN into a finite value."""
    kind = problem.act.kind
    if kind not in requires.nan_clamping_activations:
        return ()
    return (f"a NaN in weights, scales or biases is clamped to the limit of {kind}",)


def _make_pairing_record(verdict: "Verdict") -> dict[str, object]:
    return {
        "prepare_finalize": verdict.prepare_finalize,
        "experts": verdict.experts,
        "ok": verdict.ok,
        "rejections": verdict.rejections,
        "explained": explain_pairing(verdict) if verdict.ok else (),
        "problem": verdict.problem,
        "machine": verdict.machine,
    }


def make_matrix_record(
    verdicts: "list[Verdict]", problem: "Problem", machine: "Machine"
) -> dict[str, object]:
    """Return the JSON record of a matrix of pairings."""
    pairs = []
    for verdict in verdicts:
        record = _make_pairing_record(verdict)
        pairs.append({key: record[key] for key in record if key not in ("problem", "machine")})
    return {"problem": problem, "machine": machine, "pairs": pairs}


def _print_verdict(verdict: "Verdict", options: ProblemOptions) -> None:
    subject = f"{verdict.problem} on {verdict.machine}"
    if verdict.ok:
        output.print_line(f"{verdict.pairing}: valid for {subject}")
        for note in explain_pairing(verdict):
            output.print_line(f"  {note}")
        return
    count = format_count(len(verdict.rejections), "reason")
    output.print_line(f"{verdict.pairing}: refused for {subject}, {count}")
    rejections = add_default_hints(verdict.rejections, options)
    print_rejections(rejections)
    if summary := describe_defaults(rejections):
        output.print_line(summary)


def print_matrix(verdicts: "list[Verdict]", problem: "Problem", machine: "Machine") -> None:
    """Print the valid and the refused pairings, and the first rejection by each violated rule.

    If the terminal is wide enough, prints a matrix with a column for each experts part, in which a
    letter stands for each violated rule. Otherwise, prints a list of the pairings by reason.
    """
    valid = sum(verdict.ok for verdict in verdicts)
    output.print_line(f"{problem} on {machine}: {valid} of {len(verdicts)} pairings are valid")
    rejections_by_rule = group_by_rule(verdicts)
    letters = dict(zip(rejections_by_rule, make_rule_letters(len(rejections_by_rule)), strict=True))
    names = dict.fromkeys(verdict.experts for verdict in verdicts)
    cells = {(v.prepare_finalize, v.experts): _format_cell(v, letters) for v in verdicts}
    rows = [
        (pf.removesuffix(_SUFFIX), *(cells[pf, experts] for experts in names))
        for pf in dict.fromkeys(verdict.prepare_finalize for verdict in verdicts)
    ]
    columns = (f"..{_SUFFIX}", *names)
    if fit_table(columns, rows, output.get_line_width()) is None:
        print_pairings(verdicts)
    else:
        if 0 < valid < len(verdicts):
            print_valid_pairings(verdicts)
        output.print_table(columns, rows)
        print_reasons(verdicts, letters)
    if valid < len(verdicts):
        output.print_line("For all reasons of one pairing: mk check --pf-type X --experts-type Y")


def _format_cell(verdict: "Verdict", letters: dict[str, str]) -> str:
    """Return "ok", or the letters of the violated rules."""
    return "ok" if verdict.ok else "".join(sorted({letters[r.rule] for r in verdict.rejections}))


def make_rule_letters(count: int) -> list[str]:
    """Return labels for `count` rules: a to z, then A to Z, then numbers in parentheses."""
    letters = [*ascii_lowercase, *ascii_uppercase]
    return letters[:count] + [f"({index})" for index in range(len(letters), count)]
