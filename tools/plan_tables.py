"""Write the tables that are computed from `mk plan` and the shipped records into pages of docs/.

    python tools/plan_tables.py

--check writes nothing, and exits with 1 if a page is out of date.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from modular_kernel.perf_model import error_tables, selection_table

# Models whose recipe pages have measured layer times.
RECIPES = ("deepseek-v3", "qwen3-30b-a3b", "gpt-oss-120b", "mixtral-8x7b")
# (page below docs/, name of a table in it, function that returns the table).
TABLES: tuple[tuple[str, str, Callable[[], str]], ...] = (
    ("sizing.md", "errors", error_tables.format_error_tables),
    ("sizing.md", "records", selection_table.format_record_errors),
    ("recipes/selection.md", "selection", selection_table.format_selection_tables),
    *(
        (f"recipes/{model}.md", "times", partial(selection_table.format_layer_times, model))
        for model in RECIPES
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = False
    for file, name, make_table in TABLES:
        page = ROOT / "docs" / file
        old_text = page.read_text(encoding="utf-8")
        new_text = replace_table(old_text, name, make_table())
        stale |= new_text != old_text
        if new_text != old_text:
            print(f"{'stale' if check else 'updated'}: docs/{file}, {name}")
        if not check:
            page.write_text(new_text, encoding="utf-8")
    return int(stale and check)


def replace_table(text: str, name: str, table: str) -> str:
    """Return the page with `table` between its begin and end comments."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, remainder = text.split(begin)
    _, after = remainder.split(end)
    return f"{before}{begin}\n\n{table}\n\n{end}{after}"


if __name__ == "__main__":
    sys.exit(main())
