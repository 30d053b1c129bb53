"""Write the tables that follow from `mk plan` and the shipped records into the pages of docs/.

    python tools/plan_tables.py

--check writes nothing and exits with 1 if a page is out of date.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from modular_kernel.perf_model import error_tables, questions

# Recipes of models whose layer was measured.
RECIPES = ("deepseek-v3", "qwen3-30b-a3b", "gpt-oss-120b", "mixtral-8x7b")
# A page below docs/ with a mark, and the text between the mark's begin and end.
TABLES: tuple[tuple[str, str, Callable[[], str]], ...] = (
    ("sizing.md", "errors", error_tables.markdown),
    ("sizing.md", "records", questions.records_markdown),
    ("recipes/selection.md", "selection", questions.selection_markdown),
    *(
        (f"recipes/{model}.md", "times", partial(questions.layer_times_markdown, model))
        for model in RECIPES
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = False
    for name, mark, table in TABLES:
        page = ROOT / "docs" / name
        text = page.read_text(encoding="utf-8")
        renewed = renew(text, mark, table())
        stale |= renewed != text
        if renewed != text:
            print(f"{'stale' if check else 'renewed'}: docs/{name}, {mark}")
        if not check:
            page.write_text(renewed, encoding="utf-8")
    return int(stale and check)


def renew(text: str, mark: str, table: str) -> str:
    """Return the page with a new table between the begin and end of a mark."""
    begin, end = f"<!-- {mark}:begin -->", f"<!-- {mark}:end -->"
    before, rest = text.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n\n{table}\n\n{end}{after}"


if __name__ == "__main__":
    sys.exit(main())
