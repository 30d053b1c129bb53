"""`python -m modular_kernel.testing.stress.fuzz`: exits with 1 if anything was found."""

import argparse
import secrets
import sys
from collections import Counter

from modular_kernel.testing.stress.fuzz.isolated_runs import FuzzReport, run
from modular_kernel.testing.stress.fuzz.outcome import BAD, GOOD
from modular_kernel.testing.stress.fuzz.targets import NAMES

_INTERPRETED = 20  # of these, one configuration is run with interpreted kernels


def main(argv: list[str] | None = None) -> int:
    """Run what the words ask for; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m modular_kernel.testing.stress.fuzz")
    parser.add_argument("--count", type=int, default=2000, help="configurations")
    parser.add_argument("--seed", default=secrets.token_hex(4), help="fresh if not given")
    parser.add_argument("--only", type=int, help="run this configuration alone")
    parser.add_argument("--interpreted", action="store_true", help="all with interpreted kernels")
    parser.add_argument("--target", choices=NAMES, default="", help="this one alone")
    given = parser.parse_args(argv)
    if given.only is not None:
        one = range(given.only, given.only + 1)
        reports = [run(given.seed, one, interpreted=given.interpreted, only=given.target)]
    elif given.interpreted or given.target:
        numbers = range(given.count)
        reports = [run(given.seed, numbers, interpreted=given.interpreted, only=given.target)]
    else:
        few = given.count // _INTERPRETED
        reports = [
            run(given.seed, range(given.count - few)),
            run(given.seed, range(few), interpreted=True),
        ]
    sys.stdout.write("\n".join(summary(reports)) + "\n")
    return int(any(report.findings for report in reports))


def summary(reports: list[FuzzReport]) -> list[str]:
    """Every finding, the classes of each target, and the classes of all."""
    lines = [line for report in reports for line in report.lines()]
    total: Counter[tuple[str, str]] = sum((r.by_target for r in reports), Counter())
    for target in sorted({target for target, _ in total}):
        counts = ", ".join(f"{total[target, kind]} {kind}" for kind in (*GOOD, *BAD))
        lines.append(f"{target}: {counts}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
