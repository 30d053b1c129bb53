"""transformers' own tests of its models with experts, with our implementation switched in.

Every case runs twice, without ours and with it, by a checkout's own tests on the same checkout's
source. Only a case that passes without ours and fails with it counts against us.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .outcomes import Case, Outcome

SUITE = "transformers' own tests"
# Cases in which experts compute: forwards, generation, batches, padding, implementations. Left out
# are those that take a compiler, several processes, or read and write checkpoints alone.
WANTED = (
    *("eager_matches_batched", "generate", "batching_equivalence", "left_padding", "greedy"),
    *("sample", "beam", "assisted", "outputs_equivalence", "forward", "hidden_states_output"),
    *("retain_grad", "determinism", "logits_to_keep", "prompt_lookup", "inputs_embeds", "load_balanc"),
    *("feed_forward_chunking", "expert", "moe", "cache", "continue"),
)
UNWANTED = (
    *("fsdp", "tp_", "ep_", "parallel", "deepspeed", "compile", "compilation", "sdpa", "flash"),
    *("export", "inherits", "integration"),
)
_LIBRARY = Path(__file__).resolve().parents[2]


def models(checkout: Path) -> list[str]:
    """Return the models of a checkout whose experts transformers can dispatch, and that have tests."""
    found = []
    for path in sorted((checkout / "src/transformers/models").glob("*/modeling_*.py")):
        name = path.parent.name
        tests = checkout / "tests/models" / name / f"test_{path.stem}.py"
        if "@use_experts_implementation" in path.read_text() and tests.exists():
            found.append(str(tests.relative_to(checkout)))
    return found


def run(checkout: Path, site: Path, side: str, files: Iterable[str], into: Path) -> int:
    """Run upstream's tests on one side; the file `into` gets a line for each case."""
    into.unlink(missing_ok=True)
    paths = [checkout / "src", site, _LIBRARY, _LIBRARY / "tools"]
    more = {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "HF_SUITES_SIDE": side,
        "HF_SUITES_INTO": str(into),
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    wanted = f"({' or '.join(WANTED)}) and not ({' or '.join(UNWANTED)})"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-p", "hf_suites.upstream_plugin", "-k", wanted, *files]
    return subprocess.run(command, cwd=checkout, env=os.environ | more, check=False).returncode


def read(into: Path) -> dict[str, dict[str, Any]]:
    """Return what `run` wrote, by case."""
    lines = map(json.loads, into.read_text().splitlines())
    return {line["case"]: line for line in lines}


def judge(
    theirs: Mapping[str, Mapping[str, Any]], ours: Mapping[str, Mapping[str, Any]]
) -> list[Case]:
    """Judge every case of either side."""
    return [_case(name, theirs.get(name), ours.get(name)) for name in dict.fromkeys((*theirs, *ours))]


def _case(name: str, theirs: Mapping[str, Any] | None, ours: Mapping[str, Any] | None) -> Case:
    shown = name.removeprefix("tests/models/")
    if theirs is None or theirs["outcome"] != "passed":
        why = "not run without ours" if theirs is None else theirs["outcome"]
        return Case(SUITE, shown, Outcome.NOT_USABLE, why)
    if ours is None or ours["outcome"] == "lost":
        return Case(SUITE, shown, Outcome.RAW, "no end with ours")
    if ours["outcome"] == "passed":
        return Case(SUITE, shown, Outcome.AGREE if ours["ran"] else Outcome.NOT_REACHED)
    if "modular_kernel.errors." in ours["why"]:
        return Case(SUITE, shown, Outcome.REFUSED, ours["why"].partition("modular_kernel.errors.")[2])
    return Case(SUITE, shown, Outcome.OURS, ours["why"])
