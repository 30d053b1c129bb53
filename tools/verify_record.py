"""Merge records of `mk test --level full --json FILE` into one record, for `make verify`.

python tools/verify_record.py COMMIT FILE [FILE ...] > docs/verified.json
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any


def merge_records(commit: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the merged record.

    commit: the verified commit.
    runs: records of the run in one process and of runs over ranks.
    """
    versions = {name: version(name) for name in ("torch", "triton", "numpy")}
    ok = bool(runs) and all(run["ok"] for run in runs)
    return {"commit": commit, "ok": ok, "versions": versions, "runs": runs}


if __name__ == "__main__":
    commit, *files = sys.argv[1:]
    runs = [json.loads(Path(file).read_text(encoding="utf-8")) for file in files]
    sys.stdout.write(json.dumps(merge_records(commit, runs), indent=1) + "\n")
