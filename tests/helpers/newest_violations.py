"""Check that only known regressions of the newest triton break limits of `mk compile --check`.

    python tests/helpers/newest_violations.py out/compile-newest.json

docs/versions.md lists these regressions. One that is gone is an error, too, so that the list stays
true.
"""

import json
import sys
from pathlib import Path
from typing import Any

# Kernel, and the values of its launch that break a limit with triton 3.9.
KNOWN = ({"kernel": "gemv_gate_up_kernel", "QUANT": "group", "num_warps": 2},)


def is_known(record: dict[str, Any], known: dict[str, Any]) -> bool:
    values = {**record, **record["config"]}
    return all(values.get(name) == value for name, value in known.items())


def errors(compiled: dict[str, Any]) -> list[str]:
    """Return the violations that are not known, and the known ones that did not occur."""
    broken = [entry for entry in compiled["kernels"] if entry["violations"]]
    found = [
        text
        for entry in broken
        for text in entry["violations"]
        if not any(is_known(entry["record"], known) for known in KNOWN)
    ]
    found += [
        f"no case launches {each['kernel']}" for each in compiled["left_out"] if not each["reason"]
    ]
    if not compiled["kernels"]:
        found.append("no kernel was compiled")
    for known in KNOWN:
        if not any(is_known(entry["record"], known) for entry in broken):
            found.append(f"no longer broken, remove it here and in docs/versions.md: {known}")
    return found


if __name__ == "__main__":
    found = errors(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    sys.exit("\n".join(found) or 0)
