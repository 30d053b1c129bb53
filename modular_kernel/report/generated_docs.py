"""The files under docs/ that are generated from the code and the records, and the HTML page.

`mk report --write` updates these files, and `mk report --check` lists files that are out of date.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from modular_kernel.bench.tables import ratios
from modular_kernel.catalog import Catalog
from modular_kernel.errors import ConfigurationError
from modular_kernel.report.benchmarks import (
    MAX_PANELS,
    BenchmarkRecord,
    build_benchmarks_document,
    describe_origin,
    get_date,
    read_records,
)
from modular_kernel.report.curves import draw_figure
from modular_kernel.report.errors_page import build_errors_document
from modular_kernel.report.judge_all import Matrix, judge_all, select_built_in_parts
from modular_kernel.report.markdown import render_markdown
from modular_kernel.report.matrix import build_interactive_matrix, build_matrix_document
from modular_kernel.report.mutation_page import (
    mutation_document,
    read_scores,
    read_second_sample,
    survivors_document,
)
from modular_kernel.report.pages.document import (
    Block,
    Document,
    Figure,
    Heading,
    TableOfContents,
    Text,
    Tiles,
)
from modular_kernel.report.pages.html import render_html
from modular_kernel.report.shipped_times import RECORD_NAME, load_shipped_report
from modular_kernel.utils import json_files

# Files and folders below docs/: the records to read, and the folder of generated figures.
_BENCHMARK_RECORDS = "benchmarks"
_SCORES = "mutation"
_FIRST_SCORES = "mutation/first"
_STUDIED_SCORES = "mutation/after_study"
_SECOND_SAMPLE = "second-fresh-sample.json"
_SOURCE_DEFECTS = "source-defects.json"
_MUTATION_NOTES = "mutation-notes.json"
_FIGURES = "plots"


@dataclass(frozen=True)
class StaleFile:
    """A generated file that is out of date.

    path: path below the docs folder.
    fault: "missing", "changed", or "without a record" for a figure whose record was deleted.
    """

    path: Path
    fault: str


def render_html_page(catalog: Catalog, docs: Path) -> str:
    """Render the HTML page: the matrix as a picture, a plot of times, the records, and all tables.

    The plot shows the newest record in `docs`. If there are no records, as in an installed wheel,
    it shows the times that ship with the package, and the section of benchmarks comes last.
    """
    matrix, records = judge_all(catalog), read_records(docs / _BENCHMARK_RECORDS)
    benchmark_blocks = _demote_headings(build_benchmarks_document(records, cells=True))
    matrix_blocks = _demote_headings(build_matrix_document(matrix))
    return render_html(
        "modular_kernel",
        [
            Heading(1, "Compatibility and performance of pairs"),
            _make_tiles(matrix, records),
            Heading(2, "Compatible pairs"),
            Text(_PICTURE_CAPTION),
            build_interactive_matrix(matrix),
            Heading(2, "Time of a layer"),
            *_make_plot(records),
            TableOfContents(),
            *(benchmark_blocks + matrix_blocks if records else matrix_blocks + benchmark_blocks),
        ],
    )


_PICTURE_CAPTION = (
    "Rows are `PrepareAndFinalize` parts, columns experts parts. The layer and the machine are "
    "those of the support matrix below; each pair has the packages that it requires."
)


def _make_plot(records: Sequence[BenchmarkRecord]) -> tuple[Text, Figure]:
    """Return the plot of the newest record that can be drawn, or of the shipped record."""
    reports = [(r.name, r.report) for r in sorted(records, key=get_date, reverse=True) if r.report]
    for name, report in (*reports, (RECORD_NAME, load_shipped_report())):
        plot = draw_figure(name, report)
        if plot is not None and len(plot.panels) <= MAX_PANELS:
            return Text(describe_origin(report)), plot
    raise AssertionError("the shipped record cannot be drawn")


def _make_tiles(matrix: Matrix, records: Sequence[BenchmarkRecord]) -> Tiles:
    parts = {name for pair in matrix.pairs for name in pair}
    valid = {cell.pair for cell in matrix.cells if cell.ok}
    plotted = [record for record in records if record.report is not None and record.report.rows]
    newest = max(plotted, key=get_date, default=None)
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


def render_files(catalog: Catalog, docs: Path) -> dict[Path, str]:
    """Return the text of every generated file, by its path below `docs`.

    Parts of other packages are omitted. Raises ConfigurationError if `docs` is not a folder.
    """
    _check_folder(docs)
    scores, first_scores, studied_scores = (
        read_scores(docs / folder) for folder in (_SCORES, _FIRST_SCORES, _STUDIED_SCORES)
    )
    documents: dict[str, Document] = {
        "support-matrix.md": build_matrix_document(judge_all(select_built_in_parts(catalog))),
        "errors.md": build_errors_document(),
        "benchmark-results.md": build_benchmarks_document(
            read_records(docs / _BENCHMARK_RECORDS), cells=False
        ),
        "mutation-scores.md": mutation_document(
            scores,
            docs / _SOURCE_DEFECTS,
            docs / _MUTATION_NOTES,
            sorted(part.name for part in select_built_in_parts(catalog).parts),
            first_scores,
            studied_scores,
            read_second_sample(docs / _SECOND_SAMPLE),
        ),
        "mutation-survivors.md": survivors_document(
            scores, docs / _MUTATION_NOTES, first_scores, studied_scores
        ),
    }
    text_by_path = {
        Path(name): render_markdown(document, figures=_FIGURES)
        for name, document in documents.items()
    }
    for document in documents.values():
        figures = [block for block in document if isinstance(block, Figure)]
        text_by_path |= {Path(_FIGURES, f"{figure.name}.svg"): figure.svg for figure in figures}
    return text_by_path


def find_stale_files(catalog: Catalog, docs: Path) -> list[StaleFile]:
    """Return the files that `update_files` would change, sorted by path."""
    return _compare_with_disk(render_files(catalog, docs), docs)


def _compare_with_disk(text_by_path: dict[Path, str], docs: Path) -> list[StaleFile]:
    stale_files = []
    for path, text in text_by_path.items():
        if not (docs / path).is_file():
            stale_files.append(StaleFile(path, "missing"))
        elif (docs / path).read_text(encoding="utf-8") != text:
            stale_files.append(StaleFile(path, "changed"))
    stale_files += [
        StaleFile(path, "without a record")
        for path in _find_figures_without_record(text_by_path, docs)
    ]
    return sorted(stale_files, key=lambda file: file.path)


def update_files(catalog: Catalog, docs: Path) -> list[StaleFile]:
    """Update the stale files, delete figures without a record, and return the changes."""
    text_by_path = render_files(catalog, docs)
    stale_files = _compare_with_disk(text_by_path, docs)
    for file in stale_files:
        path = docs / file.path
        if file.path in text_by_path:
            path.parent.mkdir(parents=True, exist_ok=True)
            json_files.write(path, text_by_path[file.path])
        else:
            path.unlink()
    return stale_files


def _find_figures_without_record(text_by_path: dict[Path, str], docs: Path) -> list[Path]:
    figures_on_disk = (path.relative_to(docs) for path in (docs / _FIGURES).glob("*.svg"))
    return [path for path in figures_on_disk if path not in text_by_path]


def _check_folder(docs: Path) -> None:
    if not docs.is_dir():
        raise ConfigurationError("--docs", got=str(docs), need="the docs folder of a checkout")
