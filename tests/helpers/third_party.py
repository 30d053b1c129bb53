"""Installs third-party packages into a folder and runs `mk` in a new process."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from modular_kernel.cli.scaffold import render

ROOT = Path(__file__).resolve().parents[2]


def install(
    folder: Path,
    package: str,
    source: str,
    *,
    group: str = "modular_kernel.parts",
    attribute: str = "PARTS",
) -> None:
    """Write a package, its metadata and its entry point, as a wheel does into site-packages."""
    (folder / package).mkdir(exist_ok=True)
    (folder / package / "__init__.py").write_text(source, encoding="utf-8")
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {package.replace('_', '-')}\nVersion: 1.0\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    entry = f"[{group}]\n{package}_{attribute.lower()} = {package}:{attribute}\n"
    (info / "entry_points.txt").write_text(entry, encoding="utf-8")


def install_new(folder: Path, kind: str, name: str) -> None:
    """Install the package that `mk new KIND NAME` writes."""
    modules = {path: text for path, text in render(kind, name).items() if path.parts[0] == name}
    for path, text in modules.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    source = modules[Path(name, "__init__.py")]
    if kind == "path":
        group = "modular_kernel.triton_paths"
        install(folder, name, source, group=group, attribute="PATHS")
    else:
        install(folder, name, source)


def tutorial_parts() -> str:
    """Return the source of a module with both parts of docs/add-a-part.md."""
    experts = render("experts", "my_experts")[Path("my_experts/__init__.py")]
    prepare = render("prepare-finalize", "my_prepare")[Path("my_prepare/__init__.py")]
    return f"{prepare}\n\n{experts}\n\nPARTS = (MyPrepare, MyExperts)\n"


def mk(*words: str) -> tuple[int, Any]:
    """Run `mk --json` in a new process; return its exit code and JSON output."""
    command = [sys.executable, "-m", "modular_kernel", *words, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)
