"""Pages: required sections in the notebook, targets of links, and the glossary."""

import re
from pathlib import Path

import pytest

from modular_kernel.cli.parts import _OPTIONS
from modular_kernel.spec.problem import ActivationFormat, Reduce

ROOT = Path(__file__).resolve().parents[2]
DOCS, NOTEBOOK = ROOT / "docs", ROOT / "notebook"
MADE = "<!-- Made by `mk report --write`"  # no page for users: what it holds is generated
USERS = [
    page
    for page in sorted(DOCS.rglob("*.md"))
    if not page.read_text(encoding="utf-8").lstrip().startswith(MADE)
]
JOURNALS = sorted(path for path in NOTEBOOK.glob("*.md") if path.name != "README.md")
LINKED = [*sorted(ROOT.glob("*.md")), *USERS, *sorted(NOTEBOOK.rglob("*.md"))]
DECISIONS = sorted((NOTEBOOK / "decisions").glob("*.md"))
FORM = ["Question", "Setup", "Result", "Decision"]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    kept = (re.sub(r"[^\w\- ]", "", title.lower()) for title in titles)
    return {title.replace(" ", "-") for title in kept}


@pytest.mark.parametrize("page", JOURNALS, ids=lambda page: page.name)
def test_experiments_have_the_required_sections(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert re.fullmatch(r"\d{4}-\d{2}-[a-z0-9-]+\.md", page.name)
    assert re.findall(r"^## (.*)$", text, re.M) == FORM
    listed = (NOTEBOOK / "README.md").read_text(encoding="utf-8")
    assert f"({page.name})" in listed.partition("## Decisions")[0]


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.name)
def test_decisions_have_the_required_sections(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    heads = re.findall(r"^\*\*(\w+)\.\*\*", text, re.M)
    assert heads == ["Status", "Context", "Decision", "Consequences"]
    assert f"(decisions/{page.name})" in (NOTEBOOK / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_targets(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"https?:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_glossary_has_each_word_of_mk_list() -> None:
    text = (DOCS / "glossary.md").read_text(encoding="utf-8")
    formats = [member.value for kind in (ActivationFormat, Reduce) for member in kind]
    assert [word for word in (*_OPTIONS, *formats) if f"`{word}`" not in text] == []
