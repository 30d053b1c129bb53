"""Checks that only known regressions of the newest triton violate `mk compile --check`.

    python tests/helpers/newest_violations.py out/compile-newest.json

docs/versions.md lists these regressions. It is also an error if a listed one no longer occurs.
"""

import json
import sys
from pathlib import Path
from typing import Any

# Kernels and launch options that violate a limit with triton 3.9.
KNOWN = ({"kernel": "gemv_gate_up_kernel", "INPUT_QUANT": "group", "num_warps": 2},)


def is_known(record: dict[str, Any], known: dict[str, Any]) -> bool:
    values = {**record, **record["config"]}
    return all(values.get(name) == value for name, value in known.items())


def errors(compiled: dict[str, Any]) -> list[str]:
    """Return the violations that are not known, and the known ones that did not occur."""
    violating = [entry for entry in compiled["kernels"] if entry["violations"]]
    messages = [
        text
        for entry in violating
        for text in entry["violations"]
        if not any(is_known(entry["record"], known) for known in KNOWN)
    ]
    messages += [
        f"no case launches {each['kernel']}" for each in compiled["left_out"] if not each["reason"]
    ]
    if not compiled["kernels"]:
        messages.append("no kernel was compiled")
    for known in KNOWN:
        if not any(is_known(entry["record"], known) for entry in violating):
            messages.append(f"no longer violated, remove it here and in docs/versions.md: {known}")
    return messages


if __name__ == "__main__":
    messages = errors(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    sys.exit("\n".join(messages) or 0)
