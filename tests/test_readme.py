"""What the README shows runs as it stands there."""

import re
from pathlib import Path

import pytest
import torch

from modular_kernel.choose.kernel import ComposedKernel

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)


def test_the_first_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MK_CACHE_DIR", str(tmp_path))
    names: dict[str, object] = {}
    try:
        exec(compile(BLOCKS[0], "README.md", "exec"), names)
    finally:
        torch.set_default_device(None)  # the example sets one
    y_TH, kernel = names["y_TH"], names["kernel"]
    assert tuple(y_TH.shape) == (64, 128)
    assert bool(y_TH.isfinite().all())
    assert isinstance(kernel, ComposedKernel)
    assert kernel.choice.measured or kernel.choice.candidates.silent


def test_the_transformers_example_names_what_exists() -> None:
    pytest.importorskip("transformers", reason="the extra is not installed")
    lines = [line for line in BLOCKS[1].splitlines() if line.startswith(("from", "register"))]
    exec(compile("\n".join(lines), "README.md", "exec"), {})


def test_every_command_of_the_table_exists() -> None:
    from modular_kernel.cli.main import app

    verbs = {command.name for command in app.registered_commands}
    assert set(re.findall(r"^\| `mk (\w+)", README, re.M)) <= verbs
