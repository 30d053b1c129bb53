"""Add the commit and the versions to what `mk test --level full --json` says, for `make verify`.

mk test --level full --json | python tools/verify_record.py COMMIT > docs/verified.json
"""

import json
import sys
from importlib.metadata import version


def record(commit: str, proven: dict[str, object]) -> dict[str, object]:
    """What is checked in. commit: that the proofs were made of."""
    versions = {name: version(name) for name in ("torch", "triton")}
    return {"commit": commit, "versions": versions, **proven}


if __name__ == "__main__":
    (given,) = sys.argv[1:]
    sys.stdout.write(json.dumps(record(given, json.load(sys.stdin)), indent=1) + "\n")
