"""The package works for users without a home folder, as in some containers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from modular_kernel.select.cache import NO_CACHE_FOLDER

ROOT = Path(__file__).resolve().parents[2]
PREPARE = "MoEPrepareAndFinalizeNoEP"
# A program that makes pwd.getpwuid raise KeyError, as it does for a user without a passwd entry. If
# HOME is not set, Path.home() calls pwd.getpwuid.
REMOVE_PASSWD_ENTRY = """
import pwd, sys
def unknown(uid):
    raise KeyError(f"getpwuid(): uid not found: {uid}")
pwd.getpwuid = unknown
"""
# A program that runs the commands in sys.argv[1] (JSON) and prints their exit codes.
RUN_COMMANDS = f"""{REMOVE_PASSWD_ENTRY}
import json
from modular_kernel.cli.main import run
codes = {{}}
for command in json.loads(sys.argv[1]):
    try:
        run(command)
    except SystemExit as error:
        codes[command[0]] = error.code
print(json.dumps(codes))
"""


@pytest.fixture(autouse=True)
def unset_folder_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "MK_CACHE_DIR", "MK_CONFIG_DIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)


def run_without_home(program: str, *args: str) -> str:
    """Return the output of a program that runs in a new process without a home folder."""
    command = [sys.executable, "-c", program, *args]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_commands_work_without_a_home_folder() -> None:
    commands = (
        ("list",),
        ("check",),
        ("doctor",),
        ("plan", "--model", "mixtral-8x7b", "--machine", "8xh200"),
        ("report", "--json"),
        ("tune", "--explain", "--model", "mixtral", "--tokens-list", "4"),
        ("test", "--one", "--pf-type", PREPARE, "--experts-type", "TorchExperts"),
    )
    output = run_without_home(RUN_COMMANDS, json.dumps(commands))
    codes = json.loads(output.splitlines()[-1])
    assert codes == {command[0]: 0 for command in commands}


def test_compose_uses_the_configured_cache_folder_or_reports_a_missing_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ("compose", "--tokens-list", "2", "--experts", "2", "--hidden", "32", "--json")
    program = f"{REMOVE_PASSWD_ENTRY}from modular_kernel.cli.main import run; run(sys.argv[1:])"
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # interpreted parts are not timed
    result = json.loads(run_without_home(program, *args, "--budget", "0"))
    assert NO_CACHE_FOLDER in result["notes"]
    monkeypatch.setenv("MK_CACHE_DIR", str(tmp_path))
    first, second = (json.loads(run_without_home(program, *args)) for _ in range(2))
    assert (first["timed_now"], second["timed_now"]) == (1, 0)
    assert second["notes"] == []


@pytest.mark.cpu
def test_kernels_work_without_a_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    program = f"""{REMOVE_PASSWD_ENTRY}
import torch
import modular_kernel as mk
problem = mk.Problem(tokens=4, hidden=32, intermediate=32, experts=2, top_k=1, dtype=torch.float32)
kernel = mk.make_kernel("{PREPARE}", sys.argv[1], problem)
weights = mk.ExpertWeights(w1=torch.ones(2, 64, 32), w2=torch.ones(2, 32, 32))
ids = torch.zeros(4, 1, dtype=torch.int64)
print(kernel(torch.ones(4, 32), weights, mk.Routing(torch.ones(4, 1), ids))[0, 0].item())
"""
    # Each of 32 products is silu(32) * 32, and silu(32) is about 32.
    assert float(run_without_home(program, "TorchExperts")) == pytest.approx(32.0**3, rel=1e-5)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert float(run_without_home(program, "TritonExperts")) == pytest.approx(32.0**3, rel=1e-5)


def test_tune_raises_without_a_folder_for_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    from modular_kernel.cli import tune
    from modular_kernel.errors import ConfigurationError

    def raise_error() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", raise_error)
    options = tune.TuneOptions()
    with pytest.raises(ConfigurationError, match="MK_CONFIG_DIR"):
        tune._tune_layers([], (1,), options, as_json=False)
