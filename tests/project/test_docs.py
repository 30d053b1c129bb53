"""Code blocks of the documentation run as shown, or state why they are not run."""

import json
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from doc_blocks import LANGUAGES, Block, Mk, blocks_of, run_page
from run_mk import run_mk

import modular_kernel
from modular_kernel.replay.stages import STAGES

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
# tests/project/test_readme.py tests the README.
PAGES = sorted([ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")])
BLOCKS = [block for page in [ROOT / "README.md", *PAGES] for block in blocks_of(page)]
PAGES_WITH_CODE = sorted(
    {b.page for b in BLOCKS if b.reason is None and b.language in LANGUAGES} & set(PAGES)
)
# Pages whose purpose is their code, so some blocks must run.
PAGES_ABOUT_CODE = (
    "add-a-part.md",
    "choose.md",
    "compose.md",
    "concepts.md",
    "errors.md",
    "profiling.md",
)


@pytest.fixture
def mk(capsys: pytest.CaptureFixture[str]) -> Mk:
    """Return a function that runs `mk` in this process."""

    return lambda *arguments: run_mk(capsys, *arguments)[:2]


def test_pages_with_code_are_tested() -> None:
    assert {DOCS / name for name in PAGES_ABOUT_CODE} <= set(PAGES_WITH_CODE)


@pytest.mark.parametrize("page", PAGES_WITH_CODE, ids=lambda page: page.name)
def test_page_runs(page: Path, mk: Mk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page(page, mk)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_block_that_is_not_run_has_a_reason(block: Block) -> None:
    directive = block.language.startswith("{")
    is_known = directive or block.language in (*LANGUAGES, "diff", "toml", "json")
    assert is_known, "a fence is python, console, toml, json, diff or a directive"
    assert block.reason is None or len(block.reason.split()) >= 3, "no reason"
    if block.language == "python":
        compile(block.text, str(block), "exec")
    if block.language == "json":
        json.loads(block.text)


# ------------------------------------------------------------------------------ the runner itself


def write_page(folder: Path, text: str) -> Path:
    page = folder / "page.md"
    page.write_text(text, encoding="utf-8")
    return page


def make_printing_mk(text: str, code: int = 0) -> Mk:
    return lambda *_: (code, text)


def test_blocks_share_a_namespace_and_errors_have_page_lines(tmp_path: Path) -> None:
    text = "# T\n\n```python\na = 1\n```\n\n- item\n\n  ```python\n  b = a + 1\n  ```\n"
    assert run_page(write_page(tmp_path, text), make_printing_mk(""))["b"] == 2
    page = write_page(tmp_path, text + "\n```python\n\nassert b == 3\n```\n")
    with pytest.raises(AssertionError) as exc_info:
        run_page(page, make_printing_mk(""))
    failing_frame = exc_info.traceback[-1]
    assert (failing_frame.path, failing_frame.lineno + 1) == (page, 15)


def test_block_with_a_reason_is_not_run(tmp_path: Path) -> None:
    page = write_page(tmp_path, "```python\n# not run: needs a GPU\n1 / 0\n```\n")
    run_page(page, make_printing_mk(""))
    assert blocks_of(page)[0].reason == "needs a GPU"


@pytest.mark.parametrize(
    ("shown", "expected_error"),
    [
        ("one\nthree", None),
        ("...\ntwo   x\n...", None),
        ("two\none", "not printed: one"),
        ("four", "not printed: four"),
        ("one\n$ echo $?\n1", "exited with 0"),
    ],
)
def test_shown_output_must_be_printed_in_order(
    tmp_path: Path, shown: str, expected_error: str | None
) -> None:
    page = write_page(tmp_path, f"```console\n$ mk list\n{shown}\n```\n")

    def run_written_page() -> None:
        run_page(page, make_printing_mk("one\ntwo  x\nthree\n"))

    if expected_error is None:
        run_written_page()
        return
    with pytest.raises(AssertionError, match=expected_error):
        run_written_page()


def test_failing_command_needs_a_shown_exit_status(tmp_path: Path) -> None:
    page = write_page(tmp_path, "```console\n$ mk check\n```\n")
    with pytest.raises(AssertionError, match="exited with 1"):
        run_page(page, make_printing_mk("", code=1))
    page = write_page(tmp_path, "```console\n$ mk check\n$ echo $?\n1\n```\n")
    run_page(page, make_printing_mk("", code=1))


# ---------------------------------------------------------------------------------- other checks


def test_all_profiling_stages_are_documented() -> None:
    page_text = (DOCS / "profiling.md").read_text(encoding="utf-8")
    assert [name for name in STAGES if f"| `{name.removeprefix('mk::')}` |" not in page_text] == []


def test_packages_of_the_site_are_pinned() -> None:
    """They are installed without dependency resolution, so each package needs an exact version."""
    lines = (ROOT / "constraints-docs.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert {"Sphinx", "myst-parser", "furo"} <= set(pins)
    assert all(re.fullmatch(r"[0-9.]+(b[0-9]+)?", version) for version in pins.values())


def test_first_column_of_tables_is_sticky() -> None:
    """The support matrix has 22 columns, but a page shows only five."""
    style = (DOCS / "_static" / "custom.css").read_text(encoding="utf-8")
    rules = dict(re.findall(r"([^{}]+)\{([^{}]*)\}", style))
    (first_column,) = (
        body
        for selector, body in rules.items()
        if "th:first-child" in selector and "left: 0" in body
    )
    assert "position: sticky" in first_column
    # Without a background, scrolled cells would be visible behind the column.
    assert "background:" in first_column


def test_every_page_is_in_the_index() -> None:
    """Sphinx requires each page to be listed, by name or by pattern."""
    contents = [DOCS / "index.md", DOCS / "api.md"]
    lines = [line for page in contents for line in page.read_text("utf-8").splitlines()]
    indexed = {path for line in lines for path in DOCS.glob(f"{line}.md") if line}
    assert sorted(set(DOCS.rglob("*.md")) - indexed) == [DOCS / "index.md"]


def test_api_reference_contains_all_public_names() -> None:
    """The reference is generated from the source, so names must be listed with the module that
    defines them.
    """
    documented: set[str] = set()
    for block in (block for page in (DOCS / "api").glob("*.md") for block in blocks_of(page)):
        for line in block.text.splitlines():
            module, _, names = line.partition(":")
            for name in names.split(","):
                member = getattr(import_module(module), name.strip())
                assert member.__module__ == module, f"{name} is defined in {member.__module__}"
                assert member.__doc__, f"{module}.{name} has no docstring"
                documented.add(name.strip())
    assert set(modular_kernel.__all__) - documented == set()


# ---------------------------------------------------------------------------- the API reference


@pytest.fixture
def directive(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Return the module of the API directive, without Sphinx."""
    for name in ("docutils", "sphinx.application", "sphinx.pycode", "sphinx.util.docutils"):
        fake_module = ModuleType(name)
        fake_module.__dict__.update(
            nodes=SimpleNamespace(Node=object, Element=object, TextElement=object),
            Sphinx=object,
            SphinxDirective=object,
            ModuleAnalyzer=object,
        )
        monkeypatch.setitem(sys.modules, name, fake_module)
    monkeypatch.syspath_prepend(str(DOCS))
    yield import_module("api_directive")
    monkeypatch.delitem(sys.modules, "api_directive")


def test_docstring_example_is_fenced(directive: ModuleType) -> None:
    """Without a fence, Markdown would show `>>>` as nested quotations."""
    name = "modular_kernel.catalog"
    text = "\n\n".join(directive.described(name, directive.source_of(name), ["check"]))
    (example,) = re.findall(r"^```pycon\n(.*?)\n```$", text, re.MULTILINE | re.DOTALL)
    assert example.startswith(">>> problem = ")
    assert example.endswith("(False, ['format', 'reduce'])")
    assert text.count(">>> problem = ") == 1


def test_build_is_offline_and_nitpicky() -> None:
    text = (DOCS / "conf.py").read_text(encoding="utf-8")
    assert "\nnitpicky = True " in text
    inventories = re.findall(r'"(inventories/\w+\.inv)"', text)
    assert len(inventories) == text.count('("https://') == 2
    for name in inventories:  # Without a local inventory, Sphinx would download one.
        lines = (DOCS / name).read_text(encoding="utf-8").splitlines()
        assert lines[0] == "# Sphinx inventory version 1"
        assert lines[3:] == sorted(set(lines[3:]))
        assert all(len(line.split()) == 3 for line in lines[3:])


def test_published_site_lists_all_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    publish = import_module("publish")
    monkeypatch.delitem(sys.modules, "publish")
    built_docs, site = tmp_path / "docs", tmp_path / "site"
    with pytest.raises(SystemExit, match=r"no index\.html"):
        publish.publish(built_docs, site, "0.9.0")
    built_docs.mkdir()
    (built_docs / "index.html").write_text("new", encoding="utf-8")
    for version in ("0.9.0", "0.10.0", "0.9.0"):
        versions = publish.publish(built_docs, site, version)
    assert versions == ["0.10.0", "0.9.0"]
    assert '["0.10.0", "0.9.0"]' in (site / "versions.js").read_text(encoding="utf-8")
    assert (site / "0.9.0/index.html").read_text(encoding="utf-8") == "new"
    page = (site / "index.html").read_text(encoding="utf-8")
    assert page.index("0.10.0/index.html") < page.index("0.9.0/index.html")
    setup_text = (ROOT / "setup.py").read_text(encoding="utf-8")
    assert f'version="{publish.version_of_checkout()}"' in setup_text


def test_docstring_arguments_become_a_list(directive: ModuleType) -> None:
    name = "modular_kernel.select.autotune"
    (text,) = directive.described(name, directive.source_of(name), ["MeasurementOptions"])
    assert "\n- `budget`: seconds" in text
    assert "budget: float = BUDGET_S" in text
    assert "pathlib.Path | None" in text  # types are qualified, so that they can be linked


def test_smart_quotes_are_off() -> None:
    """With smart quotes, Sphinx would curl quotes and turn `--` of options into dashes."""
    assert "\nsmartquotes = False\n" in (DOCS / "conf.py").read_text(encoding="utf-8")
