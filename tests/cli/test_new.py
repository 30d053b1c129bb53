"""`mk new` writes a package that equals the docs, can be installed, and passes its own tests."""

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from doc_blocks import blocks_of
from run_mk import run_mk
from third_party import ROOT, install_new, mk

from modular_kernel.catalog import GROUP
from modular_kernel.cli.scaffold import KINDS, render

NAMES = {
    "experts": "my_experts",
    "prepare-finalize": "my_prepare",
    "exchange": "my_exchange",
    "path": "my_path",
    "scheme": "my_scheme",
}
GROUPS = {
    "path": {"modular_kernel.triton_paths"},
    "scheme": {GROUP, "modular_kernel.schemes"},
}
# (page of the docs, kind of package, file that the page shows)
LISTINGS = (
    ("docs/add-a-part.md", "experts", "my_experts/__init__.py"),
    ("docs/add-a-part.md", "experts", "pyproject.toml"),
    ("docs/add-a-part.md", "prepare-finalize", "my_prepare/__init__.py"),
    ("docs/add-an-exchange.md", "exchange", "my_exchange/__init__.py"),
    ("docs/contributing/add-a-path.md", "path", "my_path/__init__.py"),
    ("docs/contributing/add-a-path.md", "path", "my_path/path.py"),
    ("docs/contributing/add-a-path.md", "path", "my_path/kernels.py"),
    ("docs/contributing/add-a-path.md", "path", "pyproject.toml"),
    ("docs/contributing/add-a-quantization-scheme.md", "scheme", "my_scheme/scheme.py"),
    ("docs/contributing/add-a-quantization-scheme.md", "scheme", "my_scheme/part.py"),
    ("docs/contributing/add-a-quantization-scheme.md", "scheme", "pyproject.toml"),
)


def read_listing(page: Path, title: str) -> str:
    """Return the code block of a page whose first line is the comment `# TITLE`, without this line.

    A line with the reason why the block is not run may precede the title.
    """
    sources = (block.text for block in blocks_of(page))
    listings = (s.split("\n", 1)[1] if s.startswith("# not run:") else s for s in sources)
    (listing,) = [listing for listing in listings if listing.startswith(f"# {title}\n")]
    return listing.split("\n", 1)[1]


@pytest.mark.parametrize(("page", "kind", "file"), LISTINGS, ids=lambda value: str(value))
def test_pages_show_the_written_files(page: str, kind: str, file: str) -> None:
    assert read_listing(ROOT / page, file) == render(kind, NAMES[kind])[Path(file)]


@pytest.mark.parametrize("kind", KINDS)
def test_written_package_is_installable(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "their_own2"
    code, out, _ = run_mk(capsys, "new", kind, name, "--out", str(tmp_path))
    assert code == 0
    folder = tmp_path / name
    written = sorted(path for path in folder.rglob("*") if path.is_file())
    assert [line for line in out.splitlines() if line.startswith(str(folder))] == [
        str(path) for path in written
    ]
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["name"] == "their-own2"
    groups = project["project"]["entry-points"]
    assert set(groups) == GROUPS.get(kind, {GROUP})
    for entries in groups.values():
        module, attribute = entries[name].split(":")
        path = Path(*module.split(".")).with_suffix(".py")
        if module == name:
            path = Path(name, "__init__.py")
        assert f"{attribute} = (" in (folder / path).read_text("utf-8")
    for path in folder.rglob("*.py"):
        compile(path.read_text(encoding="utf-8"), str(path), "exec")
    assert (folder / f"tests/test_{name}.py").is_file()
    for path in written:
        assert "{{" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("experts", "My-Experts"), "a package name such as my_experts"),
        (("experts", "../elsewhere"), "a package name such as my_experts"),
        (("experts", "a" * 61), "at most 60 characters"),
        (("experts", "lambda"), "a package name such as my_experts"),
        (("experts", "json"), "a name that no module in this environment has"),
        (("experts", "experts"), "a name that no module in this environment has"),
        (("experts", "torch_experts"), "TorchExperts is installed already"),
        (("path", "gemv"), "gemv is installed already"),
        (("scheme", "mxfp4_w4a16"), "mxfp4_w4a16 is installed already"),
        (("scheme", "torch"), "a name that no module in this environment has"),
        (("transport", "mine"), "one of experts, prepare-finalize, exchange, path, scheme"),
    ],
)
def test_invalid_arguments_write_nothing(
    args: tuple[str, str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, errors = run_mk(capsys, "new", *args, "--out", str(tmp_path))
    assert code == 2
    assert message in errors
    assert list(tmp_path.iterdir()) == []


def test_existing_folder_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "existing").mkdir()
    (tmp_path / "existing/keep").write_text("kept", encoding="utf-8")
    code, _, errors = run_mk(capsys, "new", "experts", "existing", "--out", str(tmp_path))
    assert code == 2
    assert "a folder that does not exist yet" in errors
    assert [path.name for path in (tmp_path / "existing").iterdir()] == ["keep"]
    assert run_mk(capsys, "new", "experts", "mine", "--out", str(tmp_path / "new")).code == 0
    assert (tmp_path / "new/mine/pyproject.toml").is_file()


def test_failed_writes_leave_no_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full after two files."""
    written = list[Path]()
    open_path = Path.open

    def open_on_full_disk(path: Path, *args: Any, **kwargs: Any) -> Any:
        if tmp_path in path.parents and (args or kwargs.get("mode", "r"))[0] in "xw":
            written.append(path)
            if len(written) > 2:
                raise OSError(28, "No space left on device")
        return open_path(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", open_on_full_disk)
    code, _, errors = run_mk(capsys, "new", "experts", "mine", "--out", str(tmp_path / "new"))
    assert code == 2
    assert "No space left on device" in errors
    assert len(written) == 3
    assert list((tmp_path / "new").iterdir()) == []


# Kind of package -> (options with which `mk profile` calls the new code, stages of the new code).
PROFILES = {
    "experts": ("--experts-type MyExperts", "sort gemm1_activation gemm2 weight_and_reduce"),
    "prepare-finalize": (
        "--pf-type MyPrepare --experts-type TorchExperts",
        "dispatch weight_and_reduce",
    ),
    "exchange": (
        "--pf-type MyExchange --experts-type TorchExperts --world-size 2",
        "dispatch combine",
    ),
    "path": ("--experts-type TritonExperts", "gemm1_activation gemm2+weight_and_reduce"),
    "scheme": (
        "--experts-type MySchemeExperts --quant my_scheme",
        "sort gemm1_activation gemm2 weight_and_reduce",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_profile_contains_the_stages_of_the_new_code(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_new(tmp_path, kind, NAMES[kind])
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    options, stages = PROFILES[kind]
    sizes = "--tokens 4 --hidden 64 --intermediate 64 --experts 4 --top-k 2"
    code, profiled = mk("profile", *sizes.split(), *options.split(), "--out", str(tmp_path / "out"))
    assert code == 0
    entered = {s["stage"] for s in profiled["stages"] if s["is_stage"] and s["entered"]}
    assert {f"mk::{stage}" for stage in stages.split()} <= entered
    assert "mk::gemm1_activation+gemm2" not in entered, "experts without a stage"


@pytest.mark.parametrize("kind", KINDS)
def test_readme_has_a_profile_of_the_new_code(kind: str) -> None:
    readme = render(kind, NAMES[kind])[Path("README.md")]
    (line,) = (line for line in readme.splitlines() if line.startswith("    mk profile "))
    options, _ = PROFILES[kind]
    assert line.endswith(f"{options} --tokens 4" if kind == "path" else options)


@pytest.mark.slow
@pytest.mark.share(2)
@pytest.mark.parametrize("kind", KINDS)
def test_tests_of_the_written_package_pass(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests run the cases of `mk test --level full`, or, for a path, the cases that use it."""
    name, site = NAMES[kind], tmp_path / "site"
    site.mkdir()
    install_new(site, kind, name)
    test = tmp_path / f"test_{name}.py"
    text = render(kind, name)[Path(f"tests/test_{name}.py")]
    test.write_text(text, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{site}")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test)]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout[-3000:]
    assert " passed" in process.stdout
