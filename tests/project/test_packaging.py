"""The wheel contains four typed packages, the `mk` command, entry points and requirements."""

import ast
import configparser
import email
import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import pytest

from modular_kernel.integrations.vllm import MODULE_BY_VERSION

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"modular_kernel", "prepare_finalize", "experts", "topk_reduce"}
EXTRAS = {"transformers", "cutlass", "bench", "interpreter", "sglang", "vllm", "test", "dev"}
NEVER_PACKAGED = ("tests", "tools", "docs")
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


def build_wheel(source: Path, out: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    result = subprocess.run(
        [*command, "--no-index", "--disable-pip-version-check", "--wheel-dir", str(out), "."],
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """Build the wheel of a copy of the tree in which tests, tools and docs look like packages."""
    source = tmp_path_factory.mktemp("source")
    for package in PACKAGES:
        shutil.copytree(
            ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, source)
    for folder in NEVER_PACKAGED:
        (source / folder).mkdir()
        (source / folder / "__init__.py").touch()

    out = tmp_path_factory.mktemp("wheel")
    build_wheel(source, out)
    (path,) = out.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def list_build_context_files() -> list[str]:
    """Return the files that .dockerignore includes in the build context."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert lines[0] == "*"
    return [line[1:] for line in lines if line.startswith("!")]


def test_docker_build_context_builds_the_same_wheel(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "wheel"
    source.mkdir()
    for name in list_build_context_files():
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "modular_kernel.egg-info")
            shutil.copytree(ROOT / name, source / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source)
    build_wheel(source, out)
    (path,) = out.glob("*.whl")
    with zipfile.ZipFile(path) as docker_wheel:
        assert sorted(docker_wheel.namelist()) == sorted(wheel.namelist())
        assert read_dist_info(docker_wheel, "METADATA") == read_dist_info(wheel, "METADATA")


def test_docker_targets_install_existing_extras_and_run_the_demo() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    _, *targets = re.split(r"^FROM ", dockerfile, flags=re.M)
    names = [re.match(r"\S+ AS (\w+)\n", target) for target in targets]
    assert [name and name[1] for name in names] == ["base", "cpu", "cuda"]
    for target in targets[1:]:
        (extras,) = re.findall(r"'\.\[([\w,]+)\]'", target)
        assert set(extras.split(",")) <= EXTRAS
        assert "transformers" in extras, "the demo runs models of it"
        copied = re.findall(r"^COPY (\S+) ", target, re.M)
        assert set(copied) <= {".", *list_build_context_files()}
        assert 'ENTRYPOINT ["mk"]\nCMD ["demo"]\n' in target
    hosts = set(re.findall(r"https?://([^/\s]+)", dockerfile))
    assert hosts == {"download.pytorch.org"}, (
        "all other images and packages come from the default registries"
    )


def read_dist_info(wheel: zipfile.ZipFile, name: str) -> str:
    """Return the text of a file in the wheel's .dist-info."""
    (path,) = (n for n in wheel.namelist() if n.endswith(f".dist-info/{name}"))
    return wheel.read(path).decode()


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    return email.message_from_string(read_dist_info(wheel, "METADATA"))


def test_wheel_contains_only_the_four_packages(wheel: zipfile.ZipFile) -> None:
    top_level = {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" not in name}
    assert top_level == PACKAGES


def test_wheel_contains_every_module_and_data_file(wheel: zipfile.ZipFile) -> None:
    files_in_tree = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix in {".py", ".c", ".json", ".html", ".css", ".js", ".typed"}
    }
    assert files_in_tree - set(wheel.namelist()) == set()
    assert {f"{package}/py.typed" for package in PACKAGES} <= files_in_tree


def read_changelog_versions() -> list[str]:
    """Return the released versions, newest first. Each must have a date."""
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = [
        heading
        for heading in re.findall(r"^## (.*)$", changelog, re.M)
        if heading != "[Unreleased]"
    ]
    matches = [
        re.fullmatch(r"\[(\d+\.\d+\.\d+)\] - \d{4}-\d{2}-\d{2}", heading) for heading in headings
    ]
    assert None not in matches, headings
    return [match[1] for match in matches if match]


# Digest of the text of each release when it was published.
RELEASED = {"[0.2.0] - 2026-11-24": "9d7195d64263175e", "[0.1.0] - 2026-11-20": "8805e91bfb94f5e4"}


def test_changelog_of_releases_is_unchanged() -> None:
    """Later changes belong in the section Unreleased."""
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    _, *sections = re.split(r"^## ", changelog, flags=re.M)
    headings = [section.partition("\n")[0] for section in sections]
    assert headings == ["[Unreleased]", *RELEASED]
    digests = [hashlib.sha256(f"## {section}".encode()).hexdigest()[:16] for section in sections]
    assert digests[1:] == list(RELEASED.values())
    kinds = re.findall(r"^### (.*)$", sections[0], re.M)
    assert kinds == [kind for kind in ("Added", "Changed", "Fixed") if kind in kinds]


def test_installed_wheel_runs_the_checkpoints_of_the_demo(
    wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    """The wheel runs without the source tree and without transformers."""
    wheel.extractall(tmp_path)
    program = (
        "import sys",
        "folder, root = sys.argv[1:]",
        "sys.path[:] = [folder, *(path for path in sys.path if path not in ('', root))]",
        "sys.modules['transformers'] = None",
        "from modular_kernel.cli import demo_checkpoints",
        "assert demo_checkpoints.__file__.startswith(folder)",
        "pair = ('MoEPrepareAndFinalizeNoEP', 'TorchExperts')",
        "rows = list(demo_checkpoints.run_checkpoints([pair], 'cpu'))",
        "assert len(rows) == 4 and all(row.ok for row in rows), rows",
    )
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(program), str(tmp_path), str(ROOT)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_metadata_has_name_version_and_extras(metadata: Message) -> None:
    assert metadata["Name"] == "modular-kernel"
    assert metadata["Version"] == read_changelog_versions()[0]
    assert metadata["Requires-Python"] == ">=3.11"
    assert set(metadata.get_all("Provides-Extra", [])) == EXTRAS


def test_description_has_no_relative_links(metadata: Message) -> None:
    """Package indexes show the description without the repository."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    description = str(metadata.get_payload())
    targets = re.findall(r"\]\(([^)]*)\)", readme)
    assert any(not target.startswith("https://") for target in targets)
    linked = re.findall(r"\]\(([^)]*)\)", description)
    assert linked == [target for target in targets if target.startswith("https://")]
    assert "](" not in re.sub(r"\]\(https://[^)]*\)", "", description)
    assert "<img" not in description
    for text in re.findall(r"(?<!!)\[([^\]]+)\]\(docs/", readme):
        assert text in description


def test_run_time_requirements_are_complete(metadata: Message) -> None:
    requirements = [r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r]
    names = {re.split(r"[<>=;\s]", requirement)[0] for requirement in requirements}
    assert names == {"torch", "numpy", "triton", "click", "rich", "safetensors", "jinja2"}
    (triton,) = (requirement for requirement in requirements if requirement.startswith("triton"))
    assert "platform_system" in triton


def read_pinned_versions(name: str) -> dict[str, str]:
    """Return the versions that a constraints file pins, by package."""
    lines = (ROOT / f"constraints-{name}.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_oldest_and_newest_triton_are_tested(metadata: Message) -> None:
    """`make test` uses the oldest minor release, `make test-triton` the newest."""
    (need,) = (r for r in metadata.get_all("Requires-Dist", []) if r.startswith("triton"))
    oldest_match, newest_match = (re.search(rf"{sign}3\.(\d+)", need) for sign in (">=", "<"))
    assert oldest_match is not None
    assert newest_match is not None
    minors = range(int(oldest_match[1]), int(newest_match[1]))
    oldest, newest = (
        read_pinned_versions(name)["triton"].split(".")[:2] for name in ("cpu", "newest")
    )
    assert oldest == ["3", str(minors[0])]
    assert newest == ["3", str(minors[-1])]
    compat = pytest.importorskip("modular_kernel.replay.launch.triton_versions")
    assert tuple(f"3.{minor}" for minor in minors) == compat.REPLAYABLE_RELEASES


def test_oldest_transformers_is_tested(metadata: Message) -> None:
    needs = [r for r in metadata.get_all("Requires-Dist", []) if r.startswith("transformers")]
    assert {re.search(r">=([\d.]+)", need)[1] for need in needs} == {"5.23"}  # type: ignore[index]
    assert read_pinned_versions("cpu")["transformers"].startswith("5.23.")


def test_cutlass_extra_is_tested(metadata: Message) -> None:
    """`make test-cutlass` installs all packages of the extra, in releases that the extra allows."""
    requirements = [r for r in metadata.get_all("Requires-Dist", []) if 'extra == "cutlass"' in r]
    pinned = read_pinned_versions("cutlass")
    min_versions = {
        re.split(r"[<>=;,\s]", r)[0]: re.search(r">=([\d.]+)", r)[1] for r in requirements
    }  # type: ignore[index]
    assert min_versions.keys() <= pinned.keys()
    assert pinned["nvidia-cutlass-dsl"].startswith(min_versions["nvidia-cutlass-dsl"][:3])


def test_vllm_extra_is_tested(metadata: Message) -> None:
    """The plugin has a module for the version that is tested."""
    (requirement,) = (r for r in metadata.get_all("Requires-Dist", []) if 'extra == "vllm"' in r)
    min_version = re.search(r">=([\d.]+)", requirement)
    assert min_version is not None
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    tested_version = re.search(r"^VLLM_VERSION \?= ([\d.]+)$", makefile, re.MULTILINE)
    assert tested_version is not None
    assert tested_version[1].startswith(f"{min_version[1]}.")
    assert tuple(map(int, min_version[1].split("."))) in MODULE_BY_VERSION


def test_no_requirement_is_a_url(metadata: Message) -> None:
    """Packages with such requirements cannot be uploaded, and resolving any extra would build the
    source.
    """
    assert [r for r in metadata.get_all("Requires-Dist", []) if "@" in r] == []


def test_entry_points_are_complete(wheel: zipfile.ZipFile) -> None:
    parser = configparser.ConfigParser()
    parser.read_string(read_dist_info(wheel, "entry_points.txt"))
    assert dict(parser["console_scripts"]) == {"mk": "modular_kernel.cli.main:run"}
    assert dict(parser["modular_kernel.parts"]) == {
        "prepare_finalize": "prepare_finalize:COMPONENTS",
        "experts": "experts:COMPONENTS",
        "topk_reduce": "topk_reduce:COMPONENTS",
    }
    plugins = {"modular_kernel": "modular_kernel.integrations.vllm:register"}
    assert dict(parser["vllm.general_plugins"]) == plugins


def test_wheel_contains_the_license(wheel: zipfile.ZipFile) -> None:
    (path,) = (n for n in wheel.namelist() if n.endswith("/LICENSE"))
    assert "Apache License" in wheel.read(path).decode()


@pytest.mark.parametrize(
    ("torch_requirement", "installs", "warns"),
    [
        ("torch==2.13.0", ["torch==2.13.0+cpu", "torch==2.13.0"], True),
        ("torch==2.13.0+cu130", ["torch==2.13.0+cu130"], False),
        ("/tmp/torch-2.13.0+cpu-cp311.whl", ["/tmp/torch-2.13.0+cpu-cp311.whl"], False),
    ],
)
def test_make_warns_about_cuda_if_no_cpu_build_is_found(
    tmp_path: Path, torch_requirement: str, installs: list[str], warns: bool
) -> None:
    """Run the target of `make demo TORCH=...` with a pip that finds no CPU-only build."""
    log, python = tmp_path / "log", tmp_path / "bin" / "python"
    (tmp_path / ".made-by-make").touch()
    python.parent.mkdir()
    python.write_text(
        f'#!/bin/sh\necho "$@" >> {log}\ncase "$*" in *torch==*+cpu*) exit 1;; esac\n'
    )
    python.chmod(0o755)
    command = ["make", f"VENV={tmp_path}", f"TORCH={torch_requirement}", f"PYTHON={sys.executable}"]
    result = subprocess.run(
        [*command, f"{tmp_path}/.installed"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    requested = [line.split()[-1] for line in log.read_text().splitlines()]
    assert [word for word in requested if "torch" in word] == installs
    assert ("gigabytes of CUDA" in result.stdout) is warns


def iterate_strings(path: Path) -> Iterator[str]:
    """Yield every string of a module except docstrings. Docstrings of commands are included,
    because they are help texts.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstring_owners = (
        ast.Module if path.parent.name == "cli" else ast.Module | ast.ClassDef | FUNCTION
    )
    bodies = [
        node.body[0] for node in ast.walk(tree) if isinstance(node, docstring_owners) and node.body
    ]
    docstrings = {id(first.value) for first in bodies if isinstance(first, ast.Expr)}
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in docstrings:
            yield " ".join(node.value.split())


# Strings of these files end up in the documentation, where the repository is available.
IN_DOCS = ("mutation_page.py", "cpu_undetectable.py", "benchmarks.py")


def test_messages_about_repository_files_mention_the_source_tree() -> None:
    """A wheel has no docs, tests or tools, so messages must say where these files are."""
    places = "source tree", "a checkout", "in the repository"
    repository_path = re.compile(r"(?<![\w/.])(?:docs|tests|tools|notebook)/\w")
    for package in sorted(PACKAGES):
        for path in (ROOT / package).rglob("*.py"):
            if path.name in IN_DOCS:
                continue
            for text in filter(repository_path.search, iterate_strings(path)):
                assert any(place in text for place in places), f"{path.name}: {text[-200:]}"
