"""The document of the support matrix (docs/support-matrix.md)."""

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
from modular_kernel.report.judge_all import Matrix, RefusalReason, reasons, with_required_packages
from modular_kernel.report.pages.document import Block, Document, Heading, Items, Table, Text
from modular_kernel.spec.problem import Machine, dtype_name
from modular_kernel.spec.quantization import QUANT_SCHEMES
from modular_kernel.text import format_count

YES = "yes"
# Fields of Requirements that declare an optional capability.
_OPTIONS = (
    "bias", "interleaved", "up_first", "expert_map", "localizes_ids", "weight_on_input",
    "keep_topk", "chunking", "inplace", "tf32", "graph_capturable", "deterministic",
    "batch_invariant", "asynchronous", "lora",
)  # fmt: skip


def matrix_document(matrix: Matrix) -> Document:
    """Build the document: parts, machines, pairs by world size, and all reasons of refusals."""
    return (
        *_introduction(matrix),
        Heading(2, "Parts"),
        *_parts(matrix),
        Heading(2, "Machines"),
        *_machines(matrix),
        *(block for sizes in _group_world_sizes(matrix) for block in _pairs(matrix, sizes)),
        Heading(2, "Reasons"),
        *_reasons(matrix),
    )


def _introduction(matrix: Matrix) -> tuple[Block, ...]:
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
    other = "For other layers and machines run `mk check`, or see [choose a pairing](choose.md)."
    return (
        Heading(1, "Support matrix"),
        Text(
            "Compatibility of every `PrepareAndFinalize` with every experts part, for every "
            f"quantization scheme and on {_format_list(matrix.world_sizes)} ranks, as determined "
            "by `mk check`. `yes` means that no rule rejects the pair. `tests/must_run.txt` in the "
            "source tree lists the pairs that the test suite verifies, and on which machines."
        ),
        Items([machine_text, layer_text, other]),
    )


def _requirements_of(part: Part) -> Requirements:
    requires: Requirements = part.cls.requires  # type: ignore[attr-defined]
    return requires


def _paired_parts(matrix: Matrix) -> list[Part]:
    parts = matrix.catalog.parts
    return [p for kind in ("prepare_finalize", "experts") for p in parts if p.kind == kind]


def _parts(matrix: Matrix) -> tuple[Block, ...]:
    rows = [
        (
            f"`{p.name}`",
            r.activation_format.value,
            _required_text(r),
            _accepted_text(r),
            _supported_text(r),
        )
        for p in _paired_parts(matrix)
        for r in [_requirements_of(p)]
    ]
    columns = ("part", "format", "requires", "accepts", "supports")
    return (
        Text("The requirements and capabilities that each part declares."),
        Table(columns, rows),
    )


def _required_text(requires: Requirements) -> str:
    texts = [" or ".join(sorted(requires.devices))]
    if requires.min_arch is not None:
        texts.append("compute capability {}.{} or more".format(*requires.min_arch))
    if requires.archs is not None:
        texts.append(f"compute capability {format_archs(requires.archs)}")
    texts += requires.packages
    sizes = getattr(requires, "world_sizes", None)
    if sizes is not None:
        texts.append(_ranks_text(*sizes))
    return ", ".join(texts)


def _ranks_text(low: int, high: int | None) -> str:
    if high is None:
        return f"{low} ranks or more"
    if low == high:
        return f"{low} rank" if low == 1 else f"{low} ranks"
    return f"{low} to {high} ranks"


def _accepted_text(requires: Requirements) -> str:
    texts = []
    if requires.dtypes != ALL_DTYPES:
        texts.append(format_sorted(requires.dtypes))
    for name, prefix in (("schemes", ""), ("dispatch_schemes", "quantizes ")):
        if hasattr(requires, name):
            texts.append(f"{prefix}{_schemes(getattr(requires, name))}")
    activations = getattr(requires, "activations", ALL_ACTIVATIONS)
    if activations != ALL_ACTIVATIONS:
        texts.append(f"activations {format_sorted(activations)}")
    hidden: frozenset[str] = getattr(requires, "nan_clamping_activations", frozenset())
    if hidden:
        texts.append(f"may hide a NaN in weights with {format_sorted(hidden)}")
    return "; ".join(texts)


def _schemes(names: frozenset[str]) -> str:
    if names == ACTIVATION_SCHEMES:
        return "every w8a8 scheme"
    others = frozenset(QUANT_SCHEMES) - names
    if len(others) < len(names):
        return f"all schemes but {format_sorted(others)}" if others else "all schemes"
    return format_sorted(names) or "nothing"


def _supported_text(requires: Requirements) -> str:
    return ", ".join(name for name in _OPTIONS if getattr(requires, name, False))


def _machines(matrix: Matrix) -> tuple[Block, ...]:
    """Build the table of parts that can run on four kinds of machines."""
    machines = {
        "compute capability 8.0": Machine("cuda", (8, 0)),
        "compute capability 9.0": Machine("cuda", (9, 0)),
        "CPU, Triton interpreted": Machine("cpu", interpreter=True),
        "CPU alone": Machine("cpu"),
    }
    rows = [
        (f"`{p.name}`", *(_availability(p, machine) for machine in machines.values()))
        for p in _paired_parts(matrix)
    ]
    text = "Whether a part can run on a machine with the packages that it requires."
    return (Text(text), Table(("part", *machines), rows))


def _availability(part: Part, machine: Machine) -> str:
    with_packages = with_required_packages(machine, part.cls)
    return _format_rules(
        r.rule for r in judge_part(part.name, _requirements_of(part), with_packages)
    )


def _format_rules(rules: Iterable[str]) -> str:
    text = ", ".join(dict.fromkeys(rules))
    return f"no: {text}" if text else YES


def _group_world_sizes(matrix: Matrix) -> list[tuple[int, ...]]:
    """Group the world sizes for which every pair violates the same rules."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for size in matrix.world_sizes:
        cells = [cell for cell in matrix.cells if cell.world_size == size]
        groups.setdefault(tuple(cell.rules for cell in cells), []).append(size)
    return list(map(tuple, groups.values()))


def _pairs(matrix: Matrix, sizes: tuple[int, ...]) -> tuple[Block, ...]:
    """Build the section on these world sizes, which have equal verdicts.

    A first table has the number of schemes that each pair supports, a second one the schemes.
    """
    size = sizes[0]
    pfs = list(dict.fromkeys(pf for pf, _ in matrix.pairs))
    experts = list(dict.fromkeys(ex for _, ex in matrix.pairs))
    counts = [(f"`{pf}`", *(_count(matrix, (pf, ex), size) for ex in experts)) for pf in pfs]
    supported = [pair for pair in matrix.pairs if _valid(matrix, pair, size)]
    verdicts = [
        (f"`{pair[0]}`", f"`{pair[1]}`", *(_verdict(matrix, pair, q, size) for q in matrix.quants))
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
        Table(("", *(f"`{ex}`" for ex in experts)), counts),
        *details,
    )


def _valid(matrix: Matrix, pair: tuple[str, str], size: int) -> int:
    return sum(matrix.by_key[*pair, quant, size].ok for quant in matrix.quants)


def _count(matrix: Matrix, pair: tuple[str, str], size: int) -> str:
    valid = _valid(matrix, pair, size)
    if valid:
        return f"{YES}: {valid}"
    violated = [matrix.by_key[*pair, quant, size].rules for quant in matrix.quants]
    common = [rule for rule in violated[0] if all(rule in other for other in violated)]
    return f"no: {', '.join(common or ['differs by scheme'])}"


def _verdict(matrix: Matrix, pair: tuple[str, str], quant: str, size: int) -> str:
    return _format_rules(matrix.by_key[*pair, quant, size].rules)


def _reasons(matrix: Matrix) -> tuple[Block, ...]:
    """Build the table of rejections, with one row for those that differ only in their parties."""
    parties: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for reason in reasons(matrix):
        r = reason.rejection
        key = (f"`{r.rule}`", r.got, r.need, r.hint, _scope_of(matrix, reason))
        parties.setdefault(key, []).append(r.parties)
    rows = [
        (rule, _format_parties(matrix, parts), *rest) for (rule, *rest), parts in parties.items()
    ]
    return (
        Text(
            "A reason applies to every pair that contains its parties, for every scheme and number "
            "of ranks, unless the last column restricts it."
        ),
        Table(("rule", "parties", "got", "need", "hint", "applies to"), rows),
    )


def _format_parties(matrix: Matrix, parties_of_rejections: list[tuple[str, ...]]) -> str:
    if set(matrix.pairs) <= set(parties_of_rejections):
        return "every pair"
    return ", ".join(" / ".join(parties) for parties in parties_of_rejections)


def _scope_of(matrix: Matrix, reason: RefusalReason) -> str:
    """Describe the cells that a reason applies to; "" if it applies to all cells of its parties."""
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
