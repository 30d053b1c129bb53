"""Execute the notebooks of examples/ in place, and store what their cells print and return.

    python tools/run_notebook.py

Jupyter is not needed. Cells are plain Python that runs in order in one namespace. --check writes
nothing, and exits with 1 if a notebook's outputs differ from the stored ones in more than numbers.
"""

import argparse
import ast
import contextlib
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

Notebook = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    differ = False
    for path in sorted((ROOT / "examples").glob("*.ipynb")):
        stored = json.loads(path.read_text(encoding="utf-8"))
        executed = execute(stored)
        differ |= normalize_outputs(executed) != normalize_outputs(stored)
        if not check:
            path.write_text(format_notebook(executed), encoding="utf-8")
    return int(differ and check)


def execute(notebook: Notebook) -> Notebook:
    """Return the notebook with the outputs of its code cells, run in order in one namespace."""
    names: dict[str, Any] = {"__name__": "notebook"}
    cells, count = [], 0
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            cells.append(cell)
            continue
        count += 1
        outputs = _run_cell("".join(cell["source"]), names, count)
        cells.append(cell | {"execution_count": count, "outputs": outputs})
    return notebook | {"cells": cells}


def _run_cell(source: str, names: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Run a cell. Returns its outputs: printed text, and the value of its last expression."""
    body = ast.parse(source).body
    last_expression = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    stdout, value = io.StringIO(), None
    with contextlib.redirect_stdout(stdout):
        exec(compile(ast.Module(body, []), f"cell {count}", "exec"), names)
        if last_expression is not None:
            value = eval(
                compile(ast.Expression(last_expression.value), f"cell {count}", "eval"), names
            )
    outputs: list[dict[str, Any]] = []
    if stdout.getvalue():
        lines = stdout.getvalue().splitlines(keepends=True)
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines})
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        result = {"data": data, "execution_count": count, "metadata": {}}
        outputs.append(result | {"output_type": "execute_result"})
    return outputs


def normalize_outputs(notebook: Notebook) -> list[str]:
    """Return the text of each output, without numbers and column widths."""
    texts = []
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            text = "".join(output.get("text") or output["data"]["text/plain"])
            texts.append(" ".join(re.sub(r"\d+(\.\d+)?(e[+-]\d+)?", "#", text).split()))
    return texts


def format_notebook(notebook: Notebook) -> str:
    """Return the text of the file in the form that Jupyter writes."""
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


if __name__ == "__main__":
    sys.exit(main())
