"""Run the experts and exchange classes of this project on test cases of other projects.

    python tools/peer_suites.py --vllm ~/vllm --sglang ~/sglang --flashinfer ~/flashinfer
    python tools/peer_suites.py --vllm ~/vllm --only block_fp8 --max-cases 10 --out record.json

--vllm, --sglang and --flashinfer are checkouts; at least one is needed. Parameter grids and torch
references are extracted from their files (`tools/peer_suites_lib/checkout.py`). Nothing is imported
or copied. Kernels run in the interpreter on the CPU, so large cases are shrunk, which means that
they run at smaller sizes. A case is compared with the reference at the tolerance of the original
test. Both results are also compared with float64, to find out which one a mismatch is due to.

Exits with 1 if this project causes a mismatch, or raises an exception that is not one of its own
error classes.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from modular_kernel.settings import enable_interpreter

enable_interpreter()  # before triton is imported

import torch
import triton
from peer_suites_lib.flashinfer_tests import list_suites as list_flashinfer_suites
from peer_suites_lib.outcomes import OUTCOMES, Suite, Tally, run_suite
from peer_suites_lib.sglang_tests import list_suites as list_sglang_suites
from peer_suites_lib.vllm_tests import list_suites as list_vllm_suites

PROJECTS = {
    "vllm": list_vllm_suites,
    "sglang": list_sglang_suites,
    "flashinfer": list_flashinfer_suites,
}


def main(argv: list[str] | None = None) -> int:
    """Run the suites of the given checkouts, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in PROJECTS:
        parser.add_argument(f"--{name}", type=Path, help=f"a checkout of {name}")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="run the suites whose names contain one of these"
    )
    parser.add_argument(
        "--max-cases",
        type=int,
        default=100,
        help="maximum number of cases per suite, sampled at random",
    )
    parser.add_argument("--out", type=Path, help="JSON record to add the counts to")
    parser.add_argument(
        "--add", nargs="*", type=Path, default=[], help="records whose suites are added to --out"
    )
    parser.add_argument(
        "--commits", nargs="*", default=[], help="PROJECT=COMMIT of each checkout, for the record"
    )
    arguments = parser.parse_args(argv)
    suites: list[Suite] = []
    for name, list_suites in PROJECTS.items():
        root = getattr(arguments, name)
        suites += list_suites(root) if root is not None else []
    suite_names = [f"{suite.group} {suite.name}" for suite in suites]
    is_selected = [any(substring in name for substring in arguments.only) for name in suite_names]
    suites = [suite for suite, matched in zip(suites, is_selected, strict=True) if matched]
    if not suites and not arguments.add:
        parser.error("need a checkout with a suite that matches --only, or --add")
    tallies = []
    for suite in suites:
        started = time.monotonic()
        tallies.append(run_suite(suite, arguments.max_cases))
        print(_format_tally(tallies[-1]), f"({time.monotonic() - started:.0f} s)", flush=True)
        for (outcome, why), count in tallies[-1].reasons.most_common():
            print(f"  {count} {outcome}: {why}", flush=True)
        if arguments.out is not None:
            _write_record(
                arguments.out,
                {tallies[-1].suite: _make_tally_record(tallies[-1])},
                arguments.commits,
            )
    for path in arguments.add if arguments.out is not None else []:
        _write_record(arguments.out, json.loads(path.read_text())["suites"], arguments.commits)
    print(_format_tally(_sum_tallies(tallies)))
    return int(any(tally.failed for tally in tallies))


def _format_tally(tally: Tally) -> str:
    counts = ", ".join(
        f"{tally.outcomes[name]} {name}" for name in OUTCOMES if tally.outcomes[name]
    )
    return f"{tally.suite}: {tally.cases} cases, {tally.shrunk} shrunk: {counts}"


def _sum_tallies(tallies: Iterable[Tally]) -> Tally:
    total = Tally("all")
    for tally in tallies:
        total.cases += tally.cases
        total.shrunk += tally.shrunk
        total.outcomes += tally.outcomes
        total.reasons += tally.reasons
        total.compared += tally.compared
    assert total.cases == sum(total.outcomes.values())
    return total


def _make_tally_record(tally: Tally) -> dict[str, object]:
    return {
        "cases": tally.cases,
        "shrunk": tally.shrunk,
        "outcomes": dict(tally.outcomes),
        "comparisons": dict(tally.compared),
        "reasons": {f"{name}: {why}": n for (name, why), n in tally.reasons.most_common(12)},
    }


def _write_record(path: Path, new_suites: Mapping[str, Any], commits: list[str]) -> None:
    """Add suites to the record, replacing earlier results of the same suites."""
    record = json.loads(path.read_text()) if path.exists() else {}
    suites = record.get("suites", {}) | new_suites
    outcomes: Counter[str] = Counter()
    comparisons: Counter[str] = Counter()
    for suite_record in suites.values():
        outcomes.update(suite_record["outcomes"])
        comparisons.update(suite_record["comparisons"])
    checkouts = record.get("checkouts", {}) | dict(commit.split("=", 1) for commit in commits)
    record = {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "checkouts": checkouts,
        "cases": sum(outcomes.values()),
        "shrunk": sum(suite_record["shrunk"] for suite_record in suites.values()),
        "outcomes": dict(outcomes),
        "comparisons": dict(comparisons),
        "suites": suites,
    }
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
