"""Users without a home folder: HOME is not set and passwd has no entry, as in some containers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from modular_kernel.select.cache import NO_CACHE_FOLDER

ROOT = Path(__file__).resolve().parents[2]
PREPARE = "MoEPrepareAndFinalizeNoEP"
# Path.home() asks getpwuid if HOME is not set; this one raises as for a user without an entry.
HOMELESS = """
import pwd, sys
def unknown(uid):
    raise KeyError(f"getpwuid(): uid not found: {uid}")
pwd.getpwuid = unknown
"""
VERBS = f"""{HOMELESS}
import json
from modular_kernel.cli.main import run
codes = {{}}
for words in json.loads(sys.argv[1]):
    try:
        run(words)
    except SystemExit as ended:
        codes[words[0]] = ended.code
print(json.dumps(codes))
"""


@pytest.fixture(autouse=True)
def _no_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "MK_CACHE_DIR", "MK_CONFIG_DIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)


def homeless(program: str, *words: str) -> str:
    """Return the output of a program in a new interpreter without a home folder."""
    command = [sys.executable, "-c", program, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_verbs_work() -> None:
    verbs = (
        ("list",),
        ("check",),
        ("doctor",),
        ("plan", "--model", "mixtral-8x7b", "--machine", "8xh200"),
        ("report", "--json"),
        ("tune", "--explain", "--model", "mixtral", "--tokens-list", "4"),
        ("test", "--one", "--pf-type", PREPARE, "--experts-type", "TorchExperts"),
    )
    printed = homeless(VERBS, json.dumps(verbs))
    codes = json.loads(printed.splitlines()[-1])
    assert codes == {words[0]: 0 for words in verbs}


def test_compose_caches_in_a_given_folder_and_reports_a_missing_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("compose", "--tokens-list", "2", "--experts", "2", "--hidden", "32", "--json")
    program = f"{HOMELESS}from modular_kernel.cli.main import run; run(sys.argv[1:])"
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # interpreted parts are not timed
    found = json.loads(homeless(program, *words, "--budget", "0"))
    assert NO_CACHE_FOLDER in found["notes"]
    monkeypatch.setenv("MK_CACHE_DIR", str(tmp_path))
    first, second = (json.loads(homeless(program, *words)) for _ in range(2))
    assert (first["timed_now"], second["timed_now"]) == (1, 0)
    assert second["notes"] == []


@pytest.mark.cpu
def test_a_kernel_is_made_and_called(monkeypatch: pytest.MonkeyPatch) -> None:
    program = f"""{HOMELESS}
import torch
import modular_kernel as mk
problem = mk.Problem(tokens=4, hidden=32, intermediate=32, experts=2, top_k=1, dtype=torch.float32)
kernel = mk.make_kernel("{PREPARE}", sys.argv[1], problem)
weights = mk.ExpertWeights(w1=torch.ones(2, 64, 32), w2=torch.ones(2, 32, 32))
ids = torch.zeros(4, 1, dtype=torch.int64)
print(kernel(torch.ones(4, 32), weights, mk.Routing(torch.ones(4, 1), ids))[0, 0].item())
"""
    # silu(32) * 32, summed over 32
    assert float(homeless(program, "TorchExperts")) == pytest.approx(32.0**3, rel=1e-5)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert float(homeless(program, "TritonExperts")) == pytest.approx(32.0**3, rel=1e-5)


def test_tuning_states_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    from modular_kernel.cli import tune
    from modular_kernel.errors import ConfigurationError

    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", none)
    search = tune.TuneOptions()
    with pytest.raises(ConfigurationError, match="MK_CONFIG_DIR"):
        tune._tune_layers([], (1,), search, as_json=False)
