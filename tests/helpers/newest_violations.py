"""Checks that only known regressions of the newest triton violate `mk compile --check`.

    python tests/helpers/newest_violations.py out/compile-newest.json

docs/versions.md lists these regressions. A listed regression that no longer occurs is also an
error.
"""

import json
import sys
from pathlib import Path
from typing import Any

# Kernels and launch options that violate a limit with triton 3.9.
KNOWN = ({"kernel": "gemv_gate_up_kernel", "INPUT_QUANT": "group", "num_warps": 2},)


def is_known(record: dict[str, Any], regression: dict[str, Any]) -> bool:
    values = {**record, **record["config"]}
    return all(values.get(name) == value for name, value in regression.items())


def errors(compiled: dict[str, Any]) -> list[str]:
    """Describe the violations that are not known, and the known violations that did not occur."""
    violating = [kernel for kernel in compiled["kernels"] if kernel["violations"]]
    messages = [
        violation
        for kernel in violating
        for violation in kernel["violations"]
        if not any(is_known(kernel["record"], regression) for regression in KNOWN)
    ]
    messages += [
        f"no case launches {skipped['kernel']}"
        for skipped in compiled["left_out"]
        if not skipped["reason"]
    ]
    if not compiled["kernels"]:
        messages.append("no kernel was compiled")
    for regression in KNOWN:
        if not any(is_known(kernel["record"], regression) for kernel in violating):
            messages.append(
                f"no longer violated, remove it here and in docs/versions.md: {regression}"
            )
    return messages


if __name__ == "__main__":
    messages = errors(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    sys.exit("\n".join(messages) or 0)
