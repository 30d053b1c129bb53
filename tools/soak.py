"""Run the soak test of a part: `python tools/soak.py PART --world-size 2 --backend nccl`.

Calls the kernel, a plan and a CUDA graph many times with random sizes and skew, verifies every
100th output, and monitors memory. Ends after --steps or --seconds, prints the number of steps, and
exits with 1 if there is a finding.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from modular_kernel.testing.ranks.pool import RankError, RankPool
from modular_kernel.testing.stress.soak import Soak, run_soak

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo")
    parser.add_argument("--experts")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--hosts", type=int, default=1, help="number of simulated hosts")
    parser.add_argument(
        "--unchecked",
        dest="checked",
        action="store_false",
        help="let ranks agree on the host in the first call only",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = vars(parser.parse_args())
    world_size, backend, path = (args.pop(name) for name in ("world_size", "backend", "json"))
    soak = Soak(**args)
    ranks_per_host = world_size // soak.hosts if soak.hosts > 1 else None
    with RankPool(world_size, backend, ranks_per_host=ranks_per_host) as pool:
        try:
            reports = pool.run(run_soak, soak, timeout=soak.seconds + 120)
        except RankError as error:
            sys.exit(f"{soak.part}: failed\n{error}")
    if path:
        path.write_text(json.dumps([asdict(report) for report in reports], indent=1))
    for rank, report in enumerate(reports):
        print(f"{soak.part}, rank {rank} of {world_size}: {report}")
        print(f"  {report.format_resources()}")
        for finding in report.findings:
            print(f"  FOUND: {finding}")
    sys.exit(any(report.findings for report in reports))
