"""Command `python -m modular_kernel.testing.stress.fuzz`; exits with 1 if there are findings."""

import argparse
import secrets
import sys
from collections import Counter

from modular_kernel.testing.stress.fuzz.isolated_runs import FuzzReport, run
from modular_kernel.testing.stress.fuzz.outcome import FAILURE_KINDS, SUCCESS_KINDS
from modular_kernel.testing.stress.fuzz.targets import NAMES

_INTERPRETED_INTERVAL = 20  # one of 20 configurations runs with interpreted kernels


def main(argv: list[str] | None = None) -> int:
    """Run the requested configurations, print a summary, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m modular_kernel.testing.stress.fuzz")
    parser.add_argument("--count", type=int, default=2000, help="configurations")
    parser.add_argument("--seed", default=secrets.token_hex(4), help="random if omitted")
    parser.add_argument("--only", type=int, help="run this configuration only")
    parser.add_argument("--interpreted", action="store_true", help="all with interpreted kernels")
    parser.add_argument("--target", choices=NAMES, default="", help="run this target only")
    args = parser.parse_args(argv)
    if args.only is not None:
        numbers = range(args.only, args.only + 1)
        reports = [run(args.seed, numbers, interpreted=args.interpreted, only=args.target)]
    elif args.interpreted or args.target:
        numbers = range(-1, args.count)
        reports = [run(args.seed, numbers, interpreted=args.interpreted, only=args.target)]
    else:
        num_interpreted = args.count // _INTERPRETED_INTERVAL
        reports = [
            run(args.seed, range(-1, args.count - num_interpreted)),
            run(args.seed, range(-1, num_interpreted), interpreted=True),
        ]
    sys.stdout.write("\n".join(format_summary(reports)) + "\n")
    return int(any(report.findings for report in reports))


def format_summary(reports: list[FuzzReport]) -> list[str]:
    """Return lines with every finding, the totals, and the counts by target and kind of outcome."""
    lines = [line for report in reports for line in report.lines()]
    total: Counter[tuple[str, str]] = sum((r.by_target for r in reports), Counter())
    for target in sorted({target for target, _ in total}):
        counts = ", ".join(
            f"{total[target, kind]} {kind}" for kind in (*SUCCESS_KINDS, *FAILURE_KINDS)
        )
        lines.append(f"{target}: {counts}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
