"""The files under docs/ that are made from the code and the records: what they must hold."""

from dataclasses import dataclass
from pathlib import Path

from modular_kernel.catalog import Catalog
from modular_kernel.errors import ConfigurationError
from modular_kernel.report.benchmarks import benchmarks_document
from modular_kernel.report.document import Document, Figure
from modular_kernel.report.errors_page import errors_document
from modular_kernel.report.judged import built_in, judged_matrix
from modular_kernel.report.markdown import markdown
from modular_kernel.report.matrix import matrix_document
from modular_kernel.report.mutation_page import mutation_document, read_scores
from modular_kernel.report.page import page
from modular_kernel.report.records import read_records

RECORDS = "benchmarks"
SCORES = "mutation"
DEFECTS = "source-defects.json"
NOTES = "mutation-notes.json"
_FIGURES = "plots"


@dataclass(frozen=True)
class Stale:
    """A generated file that is not what it must be."""

    path: Path
    fault: str  # missing, changed, or made from nothing


def html_page(catalog: Catalog, docs: Path) -> str:
    """All parts of `catalog` and all records of `docs` on one page."""
    matrix = matrix_document(judged_matrix(catalog))
    return page(
        "modular_kernel", (*matrix, *benchmarks_document(read_records(docs / RECORDS), cells=True))
    )


def generated(catalog: Catalog, docs: Path) -> dict[Path, str]:
    """Path below `docs` -> text, of every file that is made; built-in parts alone count."""
    _check_folder(docs)
    documents: dict[str, Document] = {
        "support-matrix.md": matrix_document(judged_matrix(built_in(catalog))),
        "errors.md": errors_document(),
        "benchmark-results.md": benchmarks_document(read_records(docs / RECORDS), cells=False),
        "mutation-scores.md": mutation_document(
            read_scores(docs / SCORES), docs / DEFECTS, docs / NOTES, _parts(built_in(catalog))
        ),
    }
    texts = {Path(n): markdown(document, figures=_FIGURES) for n, document in documents.items()}
    for document in documents.values():
        figures = [block for block in document if isinstance(block, Figure)]
        texts |= {Path(_FIGURES, f"{figure.name}.svg"): figure.svg for figure in figures}
    return texts


def _parts(catalog: Catalog) -> list[str]:
    return sorted(part.name for part in catalog.parts)


def stale(catalog: Catalog, docs: Path) -> list[Stale]:
    """List what `write` would change, by path."""
    return _compared(generated(catalog, docs), docs)


def _compared(texts: dict[Path, str], docs: Path) -> list[Stale]:
    found = []
    for path, text in texts.items():
        if not (docs / path).is_file():
            found.append(Stale(path, "missing"))
        elif (docs / path).read_text(encoding="utf-8") != text:
            found.append(Stale(path, "changed"))
    found += [Stale(path, "made from nothing") for path in _orphans(texts, docs)]
    return sorted(found, key=lambda one: one.path)


def write(catalog: Catalog, docs: Path) -> list[Stale]:
    """Write what is stale, and remove drawings whose record is gone; returns what was stale."""
    texts = generated(catalog, docs)
    found = _compared(texts, docs)
    for one in found:
        path = docs / one.path
        if one.path in texts:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(texts[one.path], encoding="utf-8")
        else:
            path.unlink()
    return found


def _orphans(texts: dict[Path, str], docs: Path) -> list[Path]:
    drawings = (path.relative_to(docs) for path in (docs / _FIGURES).glob("*.svg"))
    return [path for path in drawings if path not in texts]


def _check_folder(docs: Path) -> None:
    if not docs.is_dir():
        raise ConfigurationError("--docs", got=str(docs), need="the docs folder of a checkout")
