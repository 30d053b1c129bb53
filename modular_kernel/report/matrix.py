"""The support matrix as a document (docs/support-matrix.md) and as an interactive HTML diagram.

A row of the matrix is a PrepareAndFinalize part, and a column is an experts part. For each
quantization scheme and number of ranks, a cell is "yes" or lists the rules that reject the pair.
"""

from collections.abc import Iterable

from modular_kernel.catalog import Part
from modular_kernel.compatibility.rules import judge_part
from modular_kernel.compatibility.support import (
    ALL_ACTIVATIONS,
    ALL_DTYPES,
    Requirements,
    format_archs,
    format_sorted,
)
from modular_kernel.quant.quantized_weights import ACTIVATION_SCHEMES
from modular_kernel.report.judge_all import (
    Matrix,
    PairVerdict,
    RefusalReason,
    collect_refusal_reasons,
    set_required_packages,
)
from modular_kernel.report.pages.document import (
    Block,
    BulletList,
    Document,
    Heading,
    InteractiveMatrix,
    Table,
    Text,
)
from modular_kernel.spec.problem import Machine, dtype_name
from modular_kernel.spec.quantization import QUANT_SCHEMES
from modular_kernel.text import format_count

_YES = "yes"
# Fields of Requirements that declare optional capabilities.
_OPTIONAL_CAPABILITIES = (
    "bias", "interleaved", "up_first", "expert_map", "localizes_ids", "weight_on_input",
    "keep_topk", "chunking", "inplace", "tf32", "graph_capturable", "deterministic",
    "batch_invariant", "asynchronous", "lora",
)  # fmt: skip


def build_matrix_document(matrix: Matrix) -> Document:
    """Build the document: parts, machines, pairs by number of ranks, and reasons of refusals."""
    return (
        *_build_introduction(matrix),
        Heading(2, "Parts"),
        *_build_parts_section(matrix),
        Heading(2, "Machines"),
        *_build_machines_section(matrix),
        *(
            block
            for sizes in _group_world_sizes(matrix)
            for block in _build_pairs_section(matrix, sizes)
        ),
        Heading(2, "Reasons"),
        *_build_reasons_section(matrix),
    )


def _build_introduction(matrix: Matrix) -> tuple[Block, ...]:
    problem, machine = matrix.problem, matrix.machine
    arch = f" of compute capability {machine.arch[0]}.{machine.arch[1]}" if machine.arch else ""
    machine_text = (
        f"Machine: {machine.device}{arch}, described rather than detected, with the packages that "
        "the two parts require."
    )
    layer_text = (
        f"Layer: {format_count(problem.tokens, 'token')}, hidden size {problem.hidden}, "
        f"intermediate size {problem.intermediate}, {problem.experts} experts, "
        f"top-{problem.top_k}, {dtype_name(problem.dtype)}, {problem.act}; "
        "consecutive experts on each rank."
    )
    hint = "For other layers and machines run `mk check`, or see [choose a pairing](choose.md)."
    return (
        Heading(1, "Support matrix"),
        Text(
            "Compatibility of every `PrepareAndFinalize` with every experts part, for every "
            f"quantization scheme and on {_format_list(matrix.world_sizes)} ranks, as determined "
            "by `mk check`. `yes` means that no rule rejects the pair. `tests/must_run.txt` in the "
            "source tree lists the pairs that the test suite verifies, and on which machines."
        ),
        BulletList([machine_text, layer_text, hint]),
    )


def _get_requirements(part: Part) -> Requirements:
    requires: Requirements = part.cls.requires  # type: ignore[attr-defined]
    return requires


def _list_paired_parts(matrix: Matrix) -> list[Part]:
    parts = matrix.catalog.parts
    return [p for kind in ("prepare_finalize", "experts") for p in parts if p.kind == kind]


def _build_parts_section(matrix: Matrix) -> tuple[Block, ...]:
    rows = [
        (
            f"`{p.name}`",
            r.activation_format.value,
            _format_required(r),
            _format_accepted(r),
            _format_supported(r),
        )
        for p in _list_paired_parts(matrix)
        for r in [_get_requirements(p)]
    ]
    columns = ("part", "format", "requires", "accepts", "supports")
    return (
        Text("The requirements and capabilities that each part declares."),
        Table(columns, rows),
    )


def _format_required(requires: Requirements) -> str:
    texts = [" or ".join(sorted(requires.devices))]
    if requires.min_arch is not None:
        texts.append("compute capability {}.{} or more".format(*requires.min_arch))
    if requires.archs is not None:
        texts.append(f"compute capability {format_archs(requires.archs)}")
    texts += requires.packages
    sizes = getattr(requires, "world_sizes", None)
    if sizes is not None:
        texts.append(_format_rank_range(*sizes))
    return ", ".join(texts)


def _format_rank_range(low: int, high: int | None) -> str:
    if high is None:
        return f"{low} ranks or more"
    if low == high:
        return f"{low} rank" if low == 1 else f"{low} ranks"
    return f"{low} to {high} ranks"


def _format_accepted(requires: Requirements) -> str:
    texts = []
    if requires.dtypes != ALL_DTYPES:
        texts.append(format_sorted(requires.dtypes))
    for name, prefix in (("schemes", ""), ("dispatch_schemes", "quantizes ")):
        if hasattr(requires, name):
            texts.append(f"{prefix}{_format_schemes(getattr(requires, name))}")
    activations = getattr(requires, "activations", ALL_ACTIVATIONS)
    if activations != ALL_ACTIVATIONS:
        texts.append(f"activations {format_sorted(activations)}")
    clamping: frozenset[str] = getattr(requires, "nan_clamping_activations", frozenset())
    if clamping:
        texts.append(f"activations that may hide a NaN in weights: {format_sorted(clamping)}")
    return "; ".join(texts)


def _format_schemes(names: frozenset[str]) -> str:
    if names == ACTIVATION_SCHEMES:
        return "every w8a8 scheme"
    missing = frozenset(QUANT_SCHEMES) - names
    if len(missing) < len(names):
        return f"all schemes but {format_sorted(missing)}" if missing else "all schemes"
    return format_sorted(names) or "nothing"


def _format_supported(requires: Requirements) -> str:
    return ", ".join(name for name in _OPTIONAL_CAPABILITIES if getattr(requires, name, False))


def _build_machines_section(matrix: Matrix) -> tuple[Block, ...]:
    """Build the table of parts that can run on four kinds of machines."""
    machines = {
        "compute capability 8.0": Machine("cuda", (8, 0)),
        "compute capability 9.0": Machine("cuda", (9, 0)),
        "CPU, Triton interpreted": Machine("cpu", interpreter=True),
        "CPU alone": Machine("cpu"),
    }
    rows = [
        (f"`{p.name}`", *(_format_availability(p, machine) for machine in machines.values()))
        for p in _list_paired_parts(matrix)
    ]
    text = "Whether a part can run on a machine with the packages that it requires."
    return (Text(text), Table(("part", *machines), rows))


def _format_availability(part: Part, machine: Machine) -> str:
    with_packages = set_required_packages(machine, part.cls)
    return _format_rules(
        r.rule for r in judge_part(part.name, _get_requirements(part), with_packages)
    )


def _format_rules(rules: Iterable[str]) -> str:
    text = ", ".join(dict.fromkeys(rules))
    return f"no: {text}" if text else _YES


def _group_world_sizes(matrix: Matrix) -> list[tuple[int, ...]]:
    """Group the world sizes for which each pair violates the same rules."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for size in matrix.world_sizes:
        cells = [cell for cell in matrix.cells if cell.world_size == size]
        groups.setdefault(tuple(cell.rules for cell in cells), []).append(size)
    return list(map(tuple, groups.values()))


def _build_pairs_section(matrix: Matrix, sizes: tuple[int, ...]) -> tuple[Block, ...]:
    """Build the section of world sizes with the same verdicts.

    The first table has the number of schemes that each pair supports, and the second table lists
    the schemes.
    """
    size = sizes[0]
    pf_names = list(dict.fromkeys(pf_name for pf_name, _ in matrix.pairs))
    experts_names = list(dict.fromkeys(experts_name for _, experts_name in matrix.pairs))
    counts = [
        (
            f"`{pf_name}`",
            *(
                _format_count_or_rules(matrix, (pf_name, experts_name), size)
                for experts_name in experts_names
            ),
        )
        for pf_name in pf_names
    ]
    supported = [pair for pair in matrix.pairs if _count_valid(matrix, pair, size)]
    verdicts = [
        (
            f"`{pair[0]}`",
            f"`{pair[1]}`",
            *(_format_verdict(matrix, pair, q, size) for q in matrix.quants),
        )
        for pair in supported
    ]
    columns = ("PrepareAndFinalize", "experts", *(f"`{quant}`" for quant in matrix.quants))
    details: tuple[Block, ...] = ()
    if supported:
        details = (
            Text("Supported schemes of each pair, and the rules that reject the others."),
            Table(columns, verdicts),
        )
    return (
        Heading(2, f"On {_format_ranks(sizes)}"),
        Text(
            f"Number of schemes, of {len(matrix.quants)}, that each pair supports, or the rules "
            "that reject all of them."
        ),
        Table(("", *(f"`{experts_name}`" for experts_name in experts_names)), counts),
        *details,
    )


def _count_valid(matrix: Matrix, pair: tuple[str, str], size: int) -> int:
    return sum(matrix.by_key[*pair, quant, size].ok for quant in matrix.quants)


def _format_count_or_rules(matrix: Matrix, pair: tuple[str, str], size: int) -> str:
    count = _count_valid(matrix, pair, size)
    if count:
        return f"{_YES}: {count}"
    violated_rules = [matrix.by_key[*pair, quant, size].rules for quant in matrix.quants]
    common_rules = [
        rule for rule in violated_rules[0] if all(rule in rules for rules in violated_rules)
    ]
    return f"no: {', '.join(common_rules or ['differs by scheme'])}"


def _format_verdict(matrix: Matrix, pair: tuple[str, str], quant: str, size: int) -> str:
    return _format_rules(matrix.by_key[*pair, quant, size].rules)


def _build_reasons_section(matrix: Matrix) -> tuple[Block, ...]:
    """Build the table of rejections. Rejections that differ only in their parties share a row."""
    parties_by_row: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for reason in collect_refusal_reasons(matrix):
        r = reason.rejection
        key = (f"`{r.rule}`", r.got, r.need, r.hint, _format_scope(matrix, reason))
        parties_by_row.setdefault(key, []).append(r.parties)
    rows = [
        (rule, _format_parties(matrix, parties), *cells)
        for (rule, *cells), parties in parties_by_row.items()
    ]
    return (
        Text(
            "The parties of a reason are the conflicting inputs: one or two parts, and the problem "
            "or the machine. The reason applies to every pair with these parts, for every scheme "
            "and number of ranks, unless the last column restricts it."
        ),
        Table(("rule", "parties", "got", "need", "hint", "applies to"), rows),
    )


def _format_parties(matrix: Matrix, parties_of_rejections: list[tuple[str, ...]]) -> str:
    if set(matrix.pairs) <= set(parties_of_rejections):
        return "every pair"
    return ", ".join(" / ".join(parties) for parties in parties_of_rejections)


def _format_scope(matrix: Matrix, reason: RefusalReason) -> str:
    """Describe the cells that a reason applies to. Returns "" for all cells with its parts."""
    parts = {name for pair in matrix.pairs for name in pair}
    part_names = parts & set(reason.rejection.parties)
    texts = []
    if set(reason.pairs) != {pair for pair in matrix.pairs if part_names <= set(pair)}:
        texts.append(", ".join(" x ".join(pair) for pair in reason.pairs))
    if reason.quants != matrix.quants:
        texts.append(", ".join(reason.quants))
    if reason.world_sizes != matrix.world_sizes:
        texts.append(_format_ranks(reason.world_sizes))
    return "; ".join(texts)


def _format_ranks(sizes: tuple[int, ...]) -> str:
    return f"{_format_list(sizes)} rank{'' if sizes == (1,) else 's'}"


def _format_list(numbers: Iterable[int]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} and {last}" if others else last


def build_interactive_matrix(matrix: Matrix) -> InteractiveMatrix:
    """Build the data of the interactive diagram. It stores shared reasons only once."""
    reasons: dict[str, int] = {}
    reason_sets: dict[tuple[int, ...], int] = {(): 0}
    cells: dict[str, list[int]] = {}
    for size in matrix.world_sizes:
        for quant in matrix.quants:
            cells[f"{quant} {size}"] = [
                reason_sets.setdefault(
                    _index_reasons(matrix.by_key[*pair, quant, size], reasons), len(reason_sets)
                )
                for pair in matrix.pairs
            ]
    return InteractiveMatrix(
        rows=tuple(dict.fromkeys(pf for pf, _ in matrix.pairs)),
        columns=tuple(dict.fromkeys(experts for _, experts in matrix.pairs)),
        schemes=matrix.quants,
        world_sizes=matrix.world_sizes,
        reasons=tuple(reasons),
        reason_sets=tuple(reason_sets),
        cells={key: tuple(indices) for key, indices in cells.items()},
    )


def _index_reasons(cell: PairVerdict, reasons: dict[str, int]) -> tuple[int, ...]:
    """Return the index of each of the cell's reasons. New reasons are added to `reasons`."""
    texts = []
    for r in cell.rejections:
        hint = f" ({r.hint})" if r.hint else ""
        texts.append(f"{r.rule}: {' / '.join(r.parties)}: got {r.got}, need {r.need}{hint}")
    return tuple(reasons.setdefault(text, len(reasons)) for text in dict.fromkeys(texts))
