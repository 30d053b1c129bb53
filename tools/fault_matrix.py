"""Inject faults over ranks: `python tools/fault_matrix.py --world-size 2 --backend nccl`.

Rank 1 is killed, stopped or delayed, raises an exception, passes too many tokens, or uses another
layer. Every other rank must raise CommunicationError in time and name rank 1. Prints a table of the
results, and exits with 1 if there is a finding.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from modular_kernel.testing.stress import fault_matrix as faults

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo")
    parser.add_argument("--ranks-per-host", type=int, help="simulate hosts with this many ranks")
    parser.add_argument("--parts", help="names, separated by commas; default: all that can run")
    parser.add_argument("--kinds", default="", help="only these, such as killed,late")
    parser.add_argument("--lanes", type=int, default=4, help="number of scenarios run at once")
    parser.add_argument("--seconds", type=float, default=300, help="time limit to start scenarios")
    parser.add_argument(
        "--unchecked",
        dest="checked",
        action="store_false",
        help="let ranks agree on the host in the first call only",
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    parts = args.parts.split(",") if args.parts else None
    parts = parts or faults.list_supported_parts(args.world_size, args.backend)
    selected = [
        scenario
        for part in parts
        for scenario in faults.list_scenarios(part, args.backend, checked=args.checked)
    ]
    selected = [s for s in selected if not args.kinds or s.kind in args.kinds.split(",")]

    def print_result(result):
        findings = "; ".join(result.findings()) or "as expected"
        print(f"{result.seconds:5.1f} s  {result.scenario.part}: {result.scenario}: {findings}",
              file=sys.stderr, flush=True)  # fmt: skip

    results = faults.run_matrix(
        selected,
        args.world_size,
        args.backend,
        num_pools=args.lanes,
        ranks_per_host=args.ranks_per_host,
        on_result=print_result,
        start_limit_s=args.seconds,
    )
    table = faults.format_markdown(results)
    if args.json:
        args.json.write_text(json.dumps(faults.to_json(results), indent=1))
    if args.markdown:
        args.markdown.write_text(table)
    print(table + "\n" + faults.format_summary(results))
    sys.exit(any(result.findings() for result in results))
