"""Contents of the files under docs/ that are generated from the code and the records."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from modular_kernel.bench.tables import ratios
from modular_kernel.catalog import Catalog
from modular_kernel.errors import ConfigurationError
from modular_kernel.report.benchmarks import MAX_PANELS, benchmarks_document, date_of, origin
from modular_kernel.report.curves import figure
from modular_kernel.report.errors_page import errors_document
from modular_kernel.report.judge_all import Matrix, built_in, judge_all
from modular_kernel.report.markdown import markdown
from modular_kernel.report.matrix import matrix_document
from modular_kernel.report.matrix_picture import matrix_picture
from modular_kernel.report.mutation_page import mutation_document, read_scores
from modular_kernel.report.pages.document import (
    Block,
    Contents,
    Document,
    Figure,
    Heading,
    Text,
    Tiles,
)
from modular_kernel.report.pages.html import page
from modular_kernel.report.records import BenchmarkRecord, read_records
from modular_kernel.report.shipped_times import NAME, shipped_report
from modular_kernel.utils import json_files

RECORDS = "benchmarks"
SCORES = "mutation"
FIRST_SCORES = "mutation/first"
STUDIED_SCORES = "mutation/after_study"
DEFECTS = "source-defects.json"
NOTES = "mutation-notes.json"
_FIGURES = "plots"


@dataclass(frozen=True)
class StaleFile:
    """A generated file that is out of date.

    path: relative to the docs folder. fault: "missing", "changed", or "without a record" for a
    figure whose record was deleted.
    """

    path: Path
    fault: str


def html_page(catalog: Catalog, docs: Path) -> str:
    """Render a page with the matrix as a picture, a plot of times, the records, and all tables.

    The plot is that of the newest record in `docs`. Without records, as in an installed wheel, it
    is that of the times that ship with the package, and the benchmark section comes last.
    """
    matrix, records = judge_all(catalog), read_records(docs / RECORDS)
    benchmark_blocks = _demote_headings(benchmarks_document(records, cells=True))
    matrix_blocks = _demote_headings(matrix_document(matrix))
    return page(
        "modular_kernel",
        [
            Heading(1, "Compatibility and performance of pairs"),
            _tiles(matrix, records),
            Heading(2, "Compatible pairs"),
            Text(_PICTURE),
            matrix_picture(matrix),
            Heading(2, "Time of a layer"),
            *_plot(records),
            Contents(),
            *(benchmark_blocks + matrix_blocks if records else matrix_blocks + benchmark_blocks),
        ],
    )


_PICTURE = (
    "Rows are `PrepareAndFinalize` parts, columns experts parts. The layer and the machine are "
    "those of the support matrix below; each pair has the packages that it requires."
)


def _plot(records: Sequence[BenchmarkRecord]) -> tuple[Text, Figure]:
    """Return the plot of the newest record that can be drawn, else of the shipped one."""
    reports = [(r.name, r.report) for r in sorted(records, key=date_of, reverse=True) if r.report]
    for name, report in (*reports, (NAME, shipped_report())):
        plot = figure(name, report)
        if plot is not None and len(plot.panels) <= MAX_PANELS:
            return Text(origin(report)), plot
    raise AssertionError("the shipped record cannot be drawn")


def _tiles(matrix: Matrix, records: Sequence[BenchmarkRecord]) -> Tiles:
    parts = {name for pair in matrix.pairs for name in pair}
    valid = {cell.pair for cell in matrix.cells if cell.ok}
    plotted = [record for record in records if record.report is not None and record.report.rows]
    newest = max(plotted, key=date_of, default=None)
    tiles = [
        (str(len(parts)), "parts"),
        (f"{len(valid)} of {len(matrix.pairs)}", f"pairs valid on {matrix.machine}"),
        (str(len(matrix.quants)), "quantization schemes"),
        *([(str(len(plotted)), "benchmark records")] if plotted else []),
    ]
    if newest is not None and newest.report is not None:
        tiles += [(mean, f"{label} ({newest.name})") for mean, label in ratios(newest.report)]
    return Tiles(tiles)


def _demote_headings(document: Document) -> list[Block]:
    """Return the document's blocks with each heading one level lower."""
    return [
        Heading(block.level + 1, block.text) if isinstance(block, Heading) else block
        for block in document
    ]


def generate(catalog: Catalog, docs: Path) -> dict[Path, str]:
    """Return the text of every generated file, by its path below `docs`.

    Parts of other packages are left out. Raises ConfigurationError if `docs` is not a folder.
    """
    _check_folder(docs)
    documents: dict[str, Document] = {
        "support-matrix.md": matrix_document(judge_all(built_in(catalog))),
        "errors.md": errors_document(),
        "benchmark-results.md": benchmarks_document(read_records(docs / RECORDS), cells=False),
        "mutation-scores.md": mutation_document(
            read_scores(docs / SCORES),
            docs / DEFECTS,
            docs / NOTES,
            _parts(built_in(catalog)),
            read_scores(docs / FIRST_SCORES),
            read_scores(docs / STUDIED_SCORES),
        ),
    }
    texts = {Path(n): markdown(document, figures=_FIGURES) for n, document in documents.items()}
    for document in documents.values():
        figures = [block for block in document if isinstance(block, Figure)]
        texts |= {Path(_FIGURES, f"{figure.name}.svg"): figure.svg for figure in figures}
    return texts


def _parts(catalog: Catalog) -> list[str]:
    return sorted(part.name for part in catalog.parts)


def stale(catalog: Catalog, docs: Path) -> list[StaleFile]:
    """Return the files that `write` would change, sorted by path."""
    return _stale_files(generate(catalog, docs), docs)


def _stale_files(texts: dict[Path, str], docs: Path) -> list[StaleFile]:
    stale_files = []
    for path, text in texts.items():
        if not (docs / path).is_file():
            stale_files.append(StaleFile(path, "missing"))
        elif (docs / path).read_text(encoding="utf-8") != text:
            stale_files.append(StaleFile(path, "changed"))
    stale_files += [StaleFile(path, "without a record") for path in _orphans(texts, docs)]
    return sorted(stale_files, key=lambda file: file.path)


def write(catalog: Catalog, docs: Path) -> list[StaleFile]:
    """Update the stale files, delete figures without a record, and return the files changed."""
    texts = generate(catalog, docs)
    stale_files = _stale_files(texts, docs)
    for file in stale_files:
        path = docs / file.path
        if file.path in texts:
            path.parent.mkdir(parents=True, exist_ok=True)
            json_files.write(path, texts[file.path])
        else:
            path.unlink()
    return stale_files


def _orphans(texts: dict[Path, str], docs: Path) -> list[Path]:
    figures_on_disk = (path.relative_to(docs) for path in (docs / _FIGURES).glob("*.svg"))
    return [path for path in figures_on_disk if path not in texts]


def _check_folder(docs: Path) -> None:
    if not docs.is_dir():
        raise ConfigurationError("--docs", got=str(docs), need="the docs folder of a checkout")
