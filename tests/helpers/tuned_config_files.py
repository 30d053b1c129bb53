"""Files of tuned configurations, and a simulated H200 that looks up its configurations in them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experts.triton.configs import select as tiles
from experts.triton.configs.files import FORMAT
from experts.triton.configs.lookup import ConfigLookup
from experts.triton.launch_config import Device, LaunchConfig, MoEConfig
from modular_kernel.spec.problem import Machine, Problem

H200 = Device("NVIDIA H200")
MACHINE = Machine("cuda", (9, 0), frozenset({"triton"}), name="NVIDIA H200")
TRITON = "3.6.0"
MIXTRAL = Problem(tokens=64, hidden=4096, intermediate=14336, experts=8, top_k=2)
BLOCK_FP8 = replace(MIXTRAL, quant="fp8_w8a8_block")
NAME = "E=8,N=14336,device_name=NVIDIA_H200.json"
SMALL_TILES = MoEConfig(
    LaunchConfig(16, 32, 64, 1, 4, 2), LaunchConfig(16, 64, 64, 1, 4, 2), "aligned"
)
LARGE_TILES = MoEConfig(
    LaunchConfig(32, 32, 64, 1, 4, 2), LaunchConfig(32, 64, 64, 1, 4, 2), "aligned"
)


def vllm_launch(m: int = 16, n: int = 64, k: int = 128, **fields: Any) -> dict[str, Any]:
    """Return a launch in the file format of vLLM and SGLang."""
    sizes = {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": k}
    return {**sizes, "GROUP_SIZE_M": 1, "num_warps": 4, "num_stages": 3, **fields}


def file_contents(**entries: Any) -> dict[str, Any]:
    """Return the contents of a file in our format.

    entries: launches of both GEMMs, such as `tokens_64=(gemm1, gemm2)`.
    """
    by_tokens = {
        name.removeprefix("tokens_"): {"gemm1": gemm1, "gemm2": gemm2}
        for name, (gemm1, gemm2) in entries.items()
    }
    return {"format": FORMAT, "triton_version": TRITON, **by_tokens}


def write_config_file(path: Path, contents: object) -> Path:
    """Write a string unchanged, or other contents as JSON; return `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = contents if isinstance(contents, str) else json.dumps(contents)
    path.write_text(text, encoding="utf-8")
    return path


def make_lookup(folder: Path, *packaged_folders: Path, triton: str | None = TRITON) -> ConfigLookup:
    """Return a lookup on an H200, first in the user's folder and then in the packaged folder.

    folder: the user's folder. packaged_folders: the packaged folder, if there is one.
    """
    titles = ("user", "packaged")
    return ConfigLookup(tuple(zip(titles, (folder, *packaged_folders), strict=False)), H200, triton)


@contextmanager
def simulated_h200(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Simulate an H200 without packaged files; yield the user's folder, a subfolder of `folder`."""
    monkeypatch.setenv("MK_CONFIG_DIR", str(folder / "user"))
    monkeypatch.setattr(tiles, "current_machine", lambda: MACHINE)
    monkeypatch.setattr(tiles, "_PACKAGED_FOLDER", folder / "packaged")
    monkeypatch.setattr(tiles, "triton_version", lambda: TRITON)
    tiles.clear_caches()
    try:
        yield folder / "user"
    finally:
        tiles.clear_caches()


def make_h200_fixture() -> Any:
    """Return a fixture that applies `simulated_h200` and returns the user's folder."""

    @pytest.fixture
    def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
        with simulated_h200(tmp_path, monkeypatch) as folder:
            yield folder

    return user_folder
