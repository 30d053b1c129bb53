"""Packages of third parties, installed into a folder, and a fresh `mk` that finds them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def install(folder: Path, package: str, source: str) -> None:
    """What a wheel leaves in site-packages: a package, its metadata and its entry point."""
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text(source, encoding="utf-8")
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {package.replace('_', '-')}\nVersion: 1.0\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    entry = f"[modular_kernel.parts]\n{package}_parts = {package}:PARTS\n"
    (info / "entry_points.txt").write_text(entry, encoding="utf-8")


def mk(*words: str) -> tuple[int, Any]:
    """Exit code and JSON of a fresh `mk`."""
    command = [sys.executable, "-m", "modular_kernel", *words, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)
