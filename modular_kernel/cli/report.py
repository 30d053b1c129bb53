"""`mk report`: writes the support matrix and the benchmarks as an HTML page, or updates the docs.

The support matrix contains the verdict on every pairing, scheme and number of ranks.
`modular_kernel.report` renders the content.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from click.exceptions import Exit

from modular_kernel.cli import output
from modular_kernel.cli.command import option
from modular_kernel.cli.file_options import FilePath, FileUse, check_path
from modular_kernel.cli.machine_setup import prepare_host
from modular_kernel.cli.options import AsJson
from modular_kernel.errors import ConfigurationError
from modular_kernel.text import format_count

if TYPE_CHECKING:
    from modular_kernel.catalog import Catalog

_DEFAULT_DOCS, _DEFAULT_PAGE = Path("docs"), Path("out/report.html")


def report(
    *,
    html: Annotated[
        Path | None,
        option(
            "Write the page to this file.  [default: out/report.html]", type=FilePath(FileUse.WRITE)
        ),
    ] = None,
    docs: Annotated[
        Path,
        option(
            "The docs folder of a checkout of the repository, from which benchmark records are "
            "read.",
            type=FilePath(FileUse.READ_FOLDER),
        ),
    ] = _DEFAULT_DOCS,
    write: Annotated[bool, option("Update the generated files in the docs folder.")] = False,
    check: Annotated[
        bool, option("Write nothing; exit with 1 if a generated file is out of date.")
    ] = False,
    as_json: AsJson = None,
) -> None:
    """Write the support matrix and the benchmark records as one self-contained HTML file.

    The matrix shows which pairings support which schemes on 1, 2 and 4 ranks, and every reason why
    a pairing does not. It is always computed for a GPU of compute capability 9.0 with all optional
    packages. The page starts with a picture of the matrix and a plot of measured times. The picture
    can be filtered by scheme and number of ranks.

    In a checkout of the repository, --write updates the files under docs/ that are generated from
    the same data, and --check checks that they are up to date. --json prints the matrix instead of
    writing a page.

    Exits with 1 if --check finds a file that is out of date, and with 2 on bad usage.
    """
    if sum((write, check, as_json is not None)) > 1 or (html is not None and (check or as_json)):
        need = "one of --html, --write, --check and --json, or --html with --write"
        raise ConfigurationError("mk report", got="several", need=need)
    # The default folder may be missing: outside a checkout, the page has no benchmark records.
    if docs != _DEFAULT_DOCS and not docs.is_dir():
        raise ConfigurationError("--docs", got=str(docs), need="the docs folder of a checkout")
    if write or check:
        _check_checkout(docs, "--write" if write else "--check")
    prepare_host(quiet=True)
    from modular_kernel.catalog import load_catalog

    catalog = load_catalog()
    if as_json is not None:
        _print_matrix(catalog, as_json)
    elif check:
        _check_docs(catalog, docs)
    else:
        if write:
            _write_docs(catalog, docs)
        if html is not None or not write:
            _write_page(catalog, docs, html or _DEFAULT_PAGE)


def _check_checkout(docs: Path, option: str) -> None:
    """Raise ConfigurationError unless `docs` has the records from which files are generated."""
    if not (docs / "benchmarks").is_dir():
        got = f"no benchmark records in {docs.absolute()}"
        need = "a checkout of the repository as the working folder, or --docs with its docs folder"
        raise ConfigurationError(option, got=got, need=need)


def _print_matrix(catalog: "Catalog", json_path: str) -> None:
    from modular_kernel.report.judge_all import judge_all

    matrix = judge_all(catalog)
    header = {"problem": matrix.problem, "machine": matrix.machine}
    cells = [output.to_json_types(cell) for cell in matrix.cells]
    output.print_json({**header, "cells": cells}, json_path)


def _check_docs(catalog: "Catalog", docs: Path) -> None:
    from modular_kernel.report.generated_docs import find_stale_files

    stale_files = find_stale_files(catalog, docs)
    for file in stale_files:
        output.print_line(f"{docs / file.path}: {file.fault}")
    if stale_files:
        output.print_note(
            f"{format_count(len(stale_files), 'generated file')} stale; run `mk report --write`"
        )
        raise Exit(1)
    output.print_line("every generated file is up to date")


def _write_docs(catalog: "Catalog", docs: Path) -> None:
    from modular_kernel.report.generated_docs import update_files

    check_path("--docs", docs, FileUse.WRITE_FOLDER)
    with output.report_write_errors(docs / "support-matrix.md"):
        updated = update_files(catalog, docs)
    for file in updated:
        output.print_line(f"{docs / file.path}: updated (was {file.fault})")
    if not updated:
        output.print_line("every generated file was up to date")


def _write_page(catalog: "Catalog", docs: Path, path: Path) -> None:
    from modular_kernel.report.generated_docs import render_html_page

    check_path("--html", path, FileUse.WRITE)
    output.write_file(path, render_html_page(catalog, docs))
    output.print_line(f"written: {path}")
