"""Installs third-party packages into a folder and runs `mk` in a new process."""

import json
import subprocess
import sys
import tomllib
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
    """Write a package, its metadata and its entry point, as installing a wheel does."""
    (folder / package).mkdir(exist_ok=True)
    (folder / package / "__init__.py").write_text(source, encoding="utf-8")
    write_metadata(
        folder, package, {group: {f"{package}_{attribute.lower()}": f"{package}:{attribute}"}}
    )


def write_metadata(folder: Path, package: str, entry_points: dict[str, dict[str, str]]) -> None:
    """Write the metadata of a package. entry_points: group -> name -> value."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {package.replace('_', '-')}\nVersion: 1.0\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    lines = list[str]()
    for group, entries in entry_points.items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def install_new(folder: Path, kind: str, name: str) -> None:
    """Install the package that `mk new KIND NAME` writes."""
    files = render(kind, name)
    for path, text in files.items():
        if path.parts[0] == name:
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
    project = tomllib.loads(files[Path("pyproject.toml")])["project"]
    write_metadata(folder, name, project["entry-points"])


def tutorial_parts() -> str:
    """Return the source of a module with both parts of docs/add-a-part.md."""
    experts = render("experts", "my_experts")[Path("my_experts/__init__.py")]
    prepare = render("prepare-finalize", "my_prepare")[Path("my_prepare/__init__.py")]
    return f"{prepare}\n\n{experts}\n\nPARTS = (MyPrepare, MyExperts)\n"


def mk(*arguments: str) -> tuple[int, Any]:
    """Run `mk --json` in a new process; return its exit code and JSON output."""
    command = [sys.executable, "-m", "modular_kernel", *arguments, "--json"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.stdout, process.stderr
    return process.returncode, json.loads(process.stdout)
