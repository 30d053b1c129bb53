"""Write the tables of the estimates' errors into docs/sizing.md, from the shipped records.

    python tools/plan_errors.py

--check writes nothing and exits with 1 if the page is out of date.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from modular_kernel.perf_model.error_tables import markdown

PAGE = ROOT / "docs" / "sizing.md"
BEGIN, END = "<!-- errors:begin -->", "<!-- errors:end -->"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    text = PAGE.read_text(encoding="utf-8")
    renewed = renew(text)
    if parser.parse_args().check:
        return int(renewed != text)
    PAGE.write_text(renewed, encoding="utf-8")
    return 0


def renew(text: str) -> str:
    """Return the page with new tables between the two marks."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{markdown()}\n\n{END}{after}"


if __name__ == "__main__":
    sys.exit(main())
