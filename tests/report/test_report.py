"""`mk report`: generated docs are current, complete, and identical on every machine."""

import json
import shutil
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from run_mk import run_mk

from experts import TorchExperts
from modular_kernel import catalog as catalogs
from modular_kernel import errors, machine
from modular_kernel.catalog import Catalog, Part, check, load_catalog
from modular_kernel.compatibility.support import Rejection
from modular_kernel.measure.records import OK, OURS, PEER, Report, Row, add_peer_ratios
from modular_kernel.report.benchmarks import read_records
from modular_kernel.report.curves import draw_figure
from modular_kernel.report.errors_page import build_errors_document
from modular_kernel.report.generated_docs import find_stale_files, render_files, render_html_page
from modular_kernel.report.judge_all import (
    PROBLEM,
    Matrix,
    collect_refusal_reasons,
    judge_all,
    select_built_in_parts,
)
from modular_kernel.report.markdown import render_markdown
from modular_kernel.report.matrix import build_interactive_matrix, build_matrix_document
from modular_kernel.report.pages.document import BulletList, Heading, InteractiveMatrix, Table, Text
from modular_kernel.report.pages.html import render_html
from modular_kernel.report.shipped_times import RECORD_NAME, load_shipped_report
from modular_kernel.spec.problem import Machine, Parallel
from modular_kernel.spec.quantization import QUANT_SCHEMES

DOCS = Path(__file__).resolve().parents[2] / "docs"
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def mk(capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs `mk report` and returns its exit code and stdout."""

    return lambda *arguments: run_mk(capsys, "report", *arguments)[:2]


@pytest.fixture(scope="module")
def matrix() -> Matrix:
    return judge_all(select_built_in_parts(load_catalog()))


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """A copy of the generated docs and their records."""
    shutil.copytree(DOCS, tmp_path / "docs")
    return tmp_path / "docs"


# ---------------------------------------------------------------------------------- stale files


def test_generated_docs_are_current() -> None:
    assert find_stale_files(load_catalog(), DOCS) == [], "run `mk report --write`"


def test_check_finds_stale_files_and_write_updates_them(mk: Run, docs: Path) -> None:
    docs_option = ("--docs", str(docs))
    assert mk("--check", *docs_option)[0] == 0
    matrix_path = docs / "support-matrix.md"
    matrix_path.write_text(matrix_path.read_text(encoding="utf-8").replace("yes: ", "yes: 9", 1))
    (docs / "errors.md").unlink()
    (docs / "plots").mkdir(exist_ok=True)
    (docs / "plots/gone.svg").write_text("<svg/>")
    code, output = mk("--check", *docs_option)
    assert code == 1
    assert [line.removeprefix(f"{docs}/") for line in output.splitlines()] == [
        "errors.md: missing",
        "plots/gone.svg: without a record",
        "support-matrix.md: changed",
    ]
    assert not (docs / "errors.md").exists()  # --check writes nothing
    assert mk("--write", *docs_option)[0] == 0
    assert mk("--check", *docs_option)[0] == 0
    assert not (docs / "plots/gone.svg").exists()


def test_a_new_record_makes_the_docs_stale(docs: Path) -> None:
    _make_report().write(docs / "benchmarks/new.json")
    faults = {str(file.path): file.fault for file in find_stale_files(load_catalog(), docs)}
    assert faults == {"benchmark-results.md": "changed", "plots/new.svg": "missing"}


@pytest.mark.parametrize(
    "words", [("--write", "--check"), ("--json", "--write"), ("--html", "x", "--check")]
)
def test_contradicting_options_are_bad_usage(mk: Run, words: tuple[str, ...]) -> None:
    assert mk(*words)[0] == 2


def test_no_docs_folder_is_bad_usage(mk: Run, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    for arguments in (("--check",), ("--write",), ("--html", str(page))):
        assert mk(*arguments, "--docs", str(tmp_path / "none"))[0] == 2
    assert not page.exists()


@pytest.mark.parametrize("option", ["--write", "--check"])
def test_docs_are_not_generated_outside_a_checkout(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    option: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run_mk(capsys, "report", option)
    assert (result.code, result.out) == (2, "")
    got = f"error: {option}: got no benchmark records in {tmp_path / 'docs'}, need a checkout"
    assert result.err.startswith(got)
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------- the same on any machine


def test_documents_do_not_depend_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = load_catalog()

    def raise_error(*_: object, **__: object) -> None:
        raise AssertionError("looked at the machine at hand")

    monkeypatch.setattr(machine, "find_importable", raise_error)
    monkeypatch.setattr(machine, "current_machine", raise_error)
    monkeypatch.setattr(catalogs, "current_machine", raise_error)
    assert render_files(catalog, DOCS)


def test_other_packages_parts_are_on_the_page_and_not_in_the_docs() -> None:
    theirs = type("SomebodysExperts", (TorchExperts,), {})
    ours = load_catalog()
    catalog_with_theirs = Catalog(
        (*ours.parts, Part("SomebodysExperts", "experts", theirs, "other (o:PARTS)"))
    )
    assert render_files(catalog_with_theirs, DOCS) == render_files(ours, DOCS)
    assert "SomebodysExperts" in render_html_page(catalog_with_theirs, DOCS)


def test_page_is_reproducible(mk: Run, tmp_path: Path) -> None:
    pages = [tmp_path / "a/one.html", tmp_path / "two.html"]
    for path in pages:
        code, output = mk("--html", str(path), "--docs", str(DOCS))
        assert (code, output) == (0, f"written: {path}\n")
    assert pages[0].read_bytes() == pages[1].read_bytes()


# ----------------------------------------------------------------------------------- the matrix


def test_every_combination_is_judged(matrix: Matrix) -> None:
    names = matrix.catalog.names
    pairs = len(names("prepare_finalize")) * len(names("experts"))
    assert len(matrix.cells) == pairs * len(QUANT_SCHEMES) * 3
    assert matrix.machine.arch == (9, 0)
    assert {cell.ok for cell in matrix.cells} == {True, False}


def test_cells_equal_the_verdicts_of_check(matrix: Matrix) -> None:
    catalog = matrix.catalog
    packages = {
        (pf, ex): frozenset(
            catalog.prepare_finalize(pf).requires.packages + catalog.experts(ex).requires.packages
        )
        for pf, ex in matrix.pairs
    }
    for cell in matrix.cells[::7]:
        ranks = Parallel(cell.world_size, rank=cell.world_size - 1)
        problem = replace(PROBLEM, quant=cell.quant, parallel=ranks)
        verdict = check(*cell.pair, problem, Machine("cuda", (9, 0), packages[cell.pair]))
        assert cell.rejections == verdict.rejections, cell


def test_reasons_cover_the_rejections_of_all_cells(matrix: Matrix) -> None:
    covered = {
        (*pair, quant, size, reason.rejection)
        for reason in collect_refusal_reasons(matrix)
        for pair in reason.pairs
        for quant in reason.quants
        for size in reason.world_sizes
    }
    assert covered == {
        (*cell.pair, cell.quant, cell.world_size, rejection)
        for cell in matrix.cells
        for rejection in cell.rejections
    }


def test_the_page_has_every_verdict_and_every_reason(matrix: Matrix) -> None:
    tables = [block for block in build_matrix_document(matrix) if isinstance(block, Table)]
    details = [table for table in tables if table.columns[1:2] == ("experts",)]
    verdicts_on_page = {
        (row[0], row[1], column): cell
        for table in details[:1]
        for row in table.rows
        for column, cell in zip(table.columns[2:], row[2:], strict=True)
    }
    cells = [cell for cell in matrix.cells if cell.world_size == 1]
    valid = {cell.pair for cell in cells if cell.ok}
    assert verdicts_on_page == {
        (f"`{cell.prepare_finalize}`", f"`{cell.experts}`", f"`{cell.quant}`"): (
            "yes" if cell.ok else f"no: {', '.join(cell.rules)}"
        )
        for cell in cells
        if cell.pair in valid
    }
    rows = {(row[0], *row[2:5]) for row in tables[-1].rows}
    rejections = {r for cell in matrix.cells for r in cell.rejections}
    assert {(f"`{r.rule}`", r.got, r.need, r.hint) for r in rejections} == rows


def test_reason_names_its_pairs_unless_it_applies_to_all(matrix: Matrix) -> None:
    """The parties of this rejection name only one part of the pair, so the row must name both."""
    rejection = Rejection("odd", ("TorchExperts", "problem"), "a", "b")
    pair = ("MoEPrepareAndFinalizeNoEP", "TorchExperts")
    cells = [replace(cell, rejections=()) for cell in matrix.cells]
    cells = [replace(c, rejections=(rejection,)) if c.pair == pair else c for c in cells]
    document = build_matrix_document(replace(matrix, cells=tuple(cells)))
    last_table = [block for block in document if isinstance(block, Table)][-1]
    parties_text = "TorchExperts / problem"
    assert list(last_table.rows) == [("`odd`", parties_text, "a", "b", "", " x ".join(pair))]


def test_json(mk: Run) -> None:
    code, output = mk("--json")
    record = json.loads(output)
    assert code == 0
    assert record["machine"]["arch"] == [9, 0]
    refused_cells = [cell for cell in record["cells"] if cell["rejections"]]
    assert {"rule", "parties", "got", "need", "hint"} == set(refused_cells[0]["rejections"][0])


# ----------------------------------------------------------------------------------- the records


def test_unknown_formats_are_listed_and_broken_files_refused(docs: Path) -> None:
    (docs / "benchmarks/other.json").write_text('{"rows": [{"ms": 1}]}')
    (record,) = (r for r in read_records(docs / "benchmarks") if r.name == "other")
    assert record.report is None
    assert "- `other.json`" in render_files(load_catalog(), docs)[Path("benchmark-results.md")]
    (docs / "benchmarks/other.json").write_text("{")
    with pytest.raises(errors.ConfigurationError, match=r"other\.json"):
        read_records(docs / "benchmarks")


def _make_row(layer: str, origin: str, tokens: int, us: float) -> Row:
    return Row(
        shape="s", experts=4, top_k=2, hidden=8, intermediate=8, tokens=tokens, dtype="bfloat16",
        problem="", routing="uniform", layer=layer, origin=origin, quant="none", operands="bf16",
        status=OK, us=us, floor_us=10.0, mode="graph",
    )  # fmt: skip


def _make_report() -> Report:
    rows = [_make_row("mine <1>", OURS, t, t * 20.0) for t in (1, 8)] + [
        _make_row("peer", PEER, 1, 40.0)
    ]
    return Report({"device": "GPU", "date": "2026-01-02T03:04:05"}, {}, add_peer_ratios(rows))


def test_bench_record_is_read_and_plotted(tmp_path: Path) -> None:
    report = _make_report()
    report.write(tmp_path / "new.json")
    (record,) = read_records(tmp_path)
    assert record.report == report
    figure = draw_figure("new", report)
    assert figure is not None
    assert len(figure.panels) == 2  # the legend and one cell
    svg = ET.fromstring(figure.svg)
    texts = [node.text for node in svg.iter() if (node.tag or "").endswith("text")]
    assert {"mine <1>", "peer", "floor", "1", "8", "time / floor"} <= set(texts)
    curves = [node for node in svg.iter() if node.tag.endswith("polyline")]
    assert [len(node.attrib["points"].split()) for node in curves] == [2, 2, 1]
    heights = [float(point.split(",")[1]) for point in curves[1].attrib["points"].split()]
    assert heights[0] > heights[1]  # y points down: 2 x floor is drawn below 16 x floor


def test_a_record_with_many_panels_is_summarized_and_not_drawn(docs: Path) -> None:
    rows = [replace(row, shape=f"s{n}") for n in range(30) for row in _make_report().rows]
    replace(_make_report(), rows=tuple(rows)).write(docs / "benchmarks/many.json")
    texts = render_files(load_catalog(), docs)
    assert Path("plots/many.svg") not in texts
    assert "## many" in texts[Path("benchmark-results.md")]


def test_a_report_without_times_has_no_drawing() -> None:
    assert draw_figure("none", Report({}, {}, ())) is None


# -------------------------------------------------------------------------------- output formats


class _PageParser(HTMLParser):
    """A parser that collects the open tags, and the resources that a browser would load."""

    void = ("meta", "line", "polyline")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.anchors: set[str] = set()
        self.count: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        if tag not in self.void:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "data", "srcset") and not (value or "").startswith("#"):
                self.fetched.append(value or "")
            if name == "id":
                self.anchors.add(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.void:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_is_well_formed_and_self_contained(docs: Path) -> None:
    for record in (docs / "benchmarks").glob("*.json"):
        record.unlink()
    _make_report().write(docs / "benchmarks/new.json")
    page = render_html_page(load_catalog(), docs)
    parser = _PageParser()
    parser.feed(page)
    assert parser.open == []
    assert parser.fetched == []
    assert parser.count["script"] == 2  # the filters of the matrix, and their data
    assert "@import" not in page
    assert "url(" not in page
    records = [r for r in read_records(docs / "benchmarks") if r.report]
    figures = [f for r in records if r.report and (f := draw_figure(r.name, r.report))]
    assert len(figures) == 1, "need one figure, for the only record"
    # Each panel is drawn at the top of the page and in the section of the record.
    assert parser.count["svg"] == 1 + 2 * len(figures[0].panels)
    for part in load_catalog().parts:
        assert part.kind == "topk_reduce" or part.name in page
    link_targets = {link.partition('"')[0] for link in page.split('href="#')[1:]}
    assert link_targets
    assert link_targets <= parser.anchors


def test_a_page_without_records(tmp_path: Path) -> None:
    page = render_html_page(load_catalog(), tmp_path)
    assert page.index('id="support-matrix"') < page.index("No records were found.")
    assert "TorchExperts" in page
    figure = draw_figure(RECORD_NAME, load_shipped_report())
    assert figure is not None
    assert page.count("<svg") == 1 + len(figure.panels)


def test_the_page_opens_with_the_interactive_matrix_and_the_plot(tmp_path: Path) -> None:
    page = render_html_page(load_catalog(), tmp_path)
    positions = [
        page.index(marker)
        for marker in ('class="matrix"', "NVIDIA H200, 2026-11-20", "<nav>", "<table>")
    ]
    assert positions == sorted(positions)


class _SquaresParser(HTMLParser):
    """A parser that collects the class and tooltip of each square, and the data of the script."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: dict[str, str] = {}
        self.titles: dict[str, str] = {}
        self.data = ""
        self.reading = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if "data-pair" in values:
            self.kinds[values["data-pair"]] = values["class"]
        self.reading = "data" if values.get("type") == "application/json" else tag

    def handle_data(self, data: str) -> None:
        if self.reading == "data":
            self.data += data
        elif self.reading == "title" and self.kinds:
            self.titles[list(self.kinds)[-1]] = data
        self.reading = ""


def test_the_interactive_matrix_has_every_verdict_and_every_reason(matrix: Matrix) -> None:
    parser = _SquaresParser()
    parser.feed(render_html("picture", [build_interactive_matrix(matrix)]))
    data = json.loads(parser.data)
    for size in matrix.world_sizes:
        for quant in matrix.quants:
            set_indices = data["cells"][f"{quant} {size}"]
            for pair, set_index in zip(matrix.pairs, set_indices, strict=True):
                texts = [data["reasons"][index] for index in data["reason_sets"][set_index]]
                cell = matrix.by_key[*pair, quant, size]
                assert len(texts) == len(set(cell.rejections))
                for text, rejection in zip(texts, dict.fromkeys(cell.rejections), strict=True):
                    assert text.startswith(f"{rejection.rule}: ")
                    assert f"got {rejection.got}, need {rejection.need}" in text
                if (quant, size) == (matrix.quants[0], matrix.world_sizes[0]):
                    name = " x ".join(pair)
                    assert parser.kinds[name] == ("valid" if cell.ok else "refused")
                    assert parser.titles[name] == "\n".join([name, *(texts or ["valid"])])
    assert list(parser.kinds) == [" x ".join(pair) for pair in matrix.pairs]


def test_interactive_matrix_texts_cannot_end_the_script() -> None:
    text = "<b>&</script>"
    block = InteractiveMatrix(["p"], ["e"], ["none"], [1], [text], [(), (0,)], {"none 1": [1]})
    parser = _SquaresParser()
    html = render_html("picture", [block])
    parser.feed(html)
    assert json.loads(parser.data)["reasons"] == [text]
    assert text not in html
    assert parser.titles["p x e"] == f"p x e\n{text}"


def test_the_shipped_times_are_those_of_the_record() -> None:
    rows = {(r.shape, r.tokens, r.layer, r.quant): r for r in load_shipped_report().rows}
    assert len(rows) == 204
    ours = rows["qwen3_30b", 128, "TritonExperts", "none"]
    peer = rows["qwen3_30b", 128, "vLLM Triton", "none"]
    assert (ours.us, peer.us, ours.hidden, ours.experts) == (288.57, 300.07, 2048, 128)
    assert (ours.origin, peer.origin) == (OURS, PEER)


def test_markdown_escapes_and_wraps() -> None:
    document = (
        Heading(2, "Head"),
        Text("word " * 40),
        BulletList(["x" * 30 + " " + "y" * 90]),
        Table(("a", "n"), [("p|q", "1")], frozenset({"n"})),
    )
    lines = render_markdown(document, figures="plots").splitlines()
    assert "## Head" in lines
    assert max(map(len, lines)) <= 100
    assert lines[-6:-4] == ["- " + "x" * 30, "  " + "y" * 90]
    assert lines[-2:] == ["| --- | ---: |", "| p\\|q | 1 |"]


def _error_names() -> Iterator[str]:
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, errors.ModularKernelError):
            yield name


def test_every_error_is_documented() -> None:
    headings = [block.text for block in build_errors_document() if isinstance(block, Heading)]
    assert headings == ["Errors", *(f"`{name}`" for name in _error_names())]
    text = render_markdown(build_errors_document(), figures="")
    assert all(
        " ".join((getattr(errors, n).__doc__ or "").split())[:40] in text for n in _error_names()
    )


def test_another_machine_has_another_matrix(matrix: Matrix) -> None:
    cpu_matrix = judge_all(matrix.catalog, machine=Machine("cpu"), world_sizes=(1,))
    pair = ("MoEPrepareAndFinalizeNoEP", "TritonExperts")
    assert cpu_matrix.by_key[*pair, "none", 1].rules == ("device",)
    assert matrix.by_key[*pair, "none", 1].ok
