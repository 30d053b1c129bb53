"""Runs `mk` from a checkout without installation, for scripts that run one verb.

Importing this module adds the checkout to sys.path.
"""

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
# If the package is not installed, generate the egg-info metadata, which lists its entry points.
if not entry_points(group="modular_kernel.parts"):
    subprocess.run([sys.executable, "setup.py", "-q", "egg_info"], cwd=ROOT, check=True)

from modular_kernel.cli.main import run


def run_verb(verb):
    """Run a verb of `mk` with this process's arguments."""
    run([verb, *sys.argv[1:]])
