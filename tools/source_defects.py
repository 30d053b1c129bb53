#!/usr/bin/env python3
"""Put the defects of source_defects.json into the source, one at a time: does `mk test` notice?

    python tools/source_defects.py smoke            # or full; writes docs/source-defects.json

For each level a defect is killed, survives, or is met by no case on a CPU. The cases are those of
every pairing in one process. A level leaves the other's results in the file as they are.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from modular_kernel.cli.host import prepare_host
from modular_kernel.errors import ConfigurationError

prepare_host()

from modular_kernel.catalog import this_machine
from modular_kernel.testing import pairings
from modular_kernel.testing.mutation import attempt, cover
from modular_kernel.testing.mutation.attempt import Killers
from modular_kernel.testing.mutation.defects import read_defects

LIST = ROOT / "tools/source_defects.json"
RECORD = ROOT / "docs/source-defects.json"


def main(level: str, names: list[str]) -> None:
    """names: experts parts whose pairings run; none takes all."""
    if level not in ("smoke", "full"):
        raise ConfigurationError("level", got=level, need="smoke or full")
    defects = read_defects(LIST, ROOT)
    found = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    record = {d.what: found.get(d.what, {"file": d.mutant.module}) for d in defects}
    modules = {d.mutant.module: d.mutant.path for d in defects}
    killers = Killers()
    for pair in pairings(this_machine(), level):
        if names and pair[1] not in names:
            continue
        coverage = cover(modules, (pair,), level)
        print(" x ".join(pair), len(coverage.cases), "cases", coverage.ended, flush=True)
        for defect in defects:
            told = record[defect.what]
            before = told.get("smoke", "") if level == "full" else ""
            if before.startswith("killed"):  # not run again
                told[level] = before
            if told.get(level, "").startswith("killed"):
                continue
            fate = attempt(defect.mutant, coverage, (pair,), level, killers)
            if fate.killed:
                check = fate.by.partition(":")[0] if fate.how == "killed" else fate.how
                told[level] = f"killed by {check} in {' x '.join(pair)}"
            elif fate.how == "survived":
                told[level] = "survived"
            else:
                told.setdefault(level, "not executed")
            print(f"  {defect.what}: {told[level]}", flush=True)
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    fates = [told.get(level, "not run") for told in record.values()]
    killed = sum(fate.startswith("killed") for fate in fates)
    lived = fates.count("survived")
    print(f"{level}: {killed} killed, {lived} survived, {len(fates) - killed - lived} not executed")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
