"""Pytest configuration: one thread per process, Triton's interpreter, and selection of tests.

A process either interprets Triton kernels or compiles them. On a machine without a GPU, it
interprets them, and `tests/compile` is not collected. If all paths on the command line are in
`tests/compile`, the interpreter stays off.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
# Interpreted ranks do not reach this timeout even on a busy processor. A longer timeout would slow
# down the tests in which a rank waits until it expires.
os.environ.setdefault("MK_TIMEOUT_S", "20")

import hypothesis
import pytest
import torch

from modular_kernel.settings import enable_interpreter, read_settings
from modular_kernel.spec.problem import Machine

# pytest-xdist sets COLUMNS in its workers, and `mk` wraps its output at that width.
os.environ.pop("COLUMNS", None)

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

    from modular_kernel.testing.ranks.pool import RankPool

torch.set_num_threads(1)
# Deadlines of examples are unreliable on a busy machine.
hypothesis.settings.register_profile(
    "shared", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("shared")

NUM_DESELECTED = pytest.StashKey[int]()
INTERPRETER_IS_ON = pytest.StashKey[bool]()
COMPILE_FOLDER = Path(__file__).parent / "compile"
GPU_FOLDER = Path(__file__).parent / "gpu"
INTERPRETER_FOLDER = Path(__file__).parent / "interpreter"
VLLM_FOLDER = Path(__file__).parent / "integrations" / "in_vllm"


def _compiles_only(config: pytest.Config) -> bool:
    """Return whether every path on the command line is in tests/compile."""
    base = config.invocation_params.dir
    paths = [(base / argument.split("::")[0]).resolve() for argument in config.args]
    return bool(paths) and all(path.is_relative_to(COMPILE_FOLDER) for path in paths)


def pytest_configure(config: pytest.Config) -> None:
    if not torch.cuda.is_available() and not _compiles_only(config):
        enable_interpreter()
        if find_spec("triton") is not None:
            # The import fixes the mode of the process. Some tests change TRITON_INTERPRET.
            import triton  # noqa: F401
    config.stash[INTERPRETER_IS_ON] = read_settings().triton_interpret


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Ignore the tests that this process cannot run.

    tests/compile needs the interpreter to be off and tests/interpreter needs it to be on, tests/gpu
    needs a GPU, and tests/integrations/in_vllm needs vLLM (`make test-vllm`).
    """
    if collection_path.is_relative_to(VLLM_FOLDER) and find_spec("vllm") is None:
        return True
    if collection_path.is_relative_to(GPU_FOLDER) and not torch.cuda.is_available():
        return True
    excluded = COMPILE_FOLDER if read_settings().triton_interpret else INTERPRETER_FOLDER
    return True if collection_path.is_relative_to(excluded) else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--whole",
        action="store_true",
        help="run all parameters of tests marked `share` or `budget`",
    )
    parser.addoption(
        "--suite",
        choices=("quick", "rest", "all"),
        default="all",
        help="select tests by their recorded time, see tests/helpers/suites.py",
    )


def _in_suite(item: pytest.Item, suite: str) -> bool:
    from shares import tree_hash
    from suites import is_selected

    marker = item.get_closest_marker("budget")
    name = f"{item.path.stem}::{item.name}"
    return is_selected(suite, name, tree_hash(), **(marker.kwargs if marker else {}))


def _in_share(item: pytest.Item) -> bool:
    from shares import in_share, tree_hash

    marker = item.get_closest_marker("share")
    return marker is None or in_share(item.nodeid, *marker.args, tree_hash())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that the suite or a `share` mark excludes for this source tree.

    No test is deselected with --whole, with -k, or if tests are named on the command line. With a
    GPU, tests marked `cpu` are skipped: `make test-gpu` runs them in a process without a GPU.
    """
    named = config.option.keyword or any("::" in argument for argument in config.args)
    if not named and not config.getoption("--whole"):
        deselected = {item for item in items if not _in_share(item)}
        suite = config.option.suite
        if suite != "all":
            deselected |= {item for item in items if not _in_suite(item, suite)}
        config.stash[NUM_DESELECTED] = len(deselected)
        config.hook.pytest_deselected(items=[item for item in items if item in deselected])
        items[:] = [item for item in items if item not in deselected]
    if not torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cpu"):
            item.add_marker(pytest.mark.skip(reason="needs a process without a GPU: `-m cpu`"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Fail a test that does not restore TRITON_INTERPRET.

    With a changed value, some modules would define interpreted kernels and others compiled ones.
    """
    yield
    before, after = item.config.stash[INTERPRETER_IS_ON], read_settings().triton_interpret
    if after != before:
        os.environ["TRITON_INTERPRET"] = str(int(before))
        pytest.fail(f"TRITON_INTERPRET after the test: got {int(after)}, need {int(before)}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    worker_output = getattr(session.config, "workeroutput", None)  # sent to xdist's controller
    if worker_output is not None:
        worker_output["num_deselected"] = session.config.stash.get(NUM_DESELECTED, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: "WorkerController") -> None:
    node.config.stash[NUM_DESELECTED] = getattr(node, "workeroutput", {}).get("num_deselected", 0)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    num_deselected = config.stash.get(NUM_DESELECTED, 0)
    if num_deselected and config.option.suite != "all":
        complement = "make test-rest" if config.option.suite == "quick" else "make test"
        terminalreporter.write_line(
            f"suite {config.option.suite!r}: {num_deselected} tests were left out. "
            f"`{complement}` runs most of them, `make test-all` every one."
        )


def pytest_report_header() -> list[str]:
    from shares import tree_hash

    triton = "triton: compiled"
    if read_settings().triton_interpret:
        triton = "triton: interpreted (tests/compile is not collected: run `pytest tests/compile`)"
    vllm = "vllm: found"
    if find_spec("vllm") is None:
        vllm = "vllm: not found (tests/integrations/in_vllm is not collected: `make test-vllm`)"
    return [triton, vllm, f"tree: {tree_hash()} (hash that selects the shares of cases)"]


@pytest.fixture(scope="session")
def machine() -> Machine:
    """Return the description of this machine."""
    from modular_kernel.catalog import this_machine

    return this_machine()


@pytest.fixture(scope="session")
def rank_pool() -> "Iterator[Callable[[int], RankPool]]":
    """Return a function that takes a world size and returns the session's pool of CPU ranks."""
    from modular_kernel.testing.ranks.pool import RankPool

    pools: dict[int, RankPool] = {}
    with ExitStack() as stack:

        def get_pool(world_size: int) -> RankPool:
            if world_size not in pools:
                pools[world_size] = stack.enter_context(RankPool(world_size))
            return pools[world_size]

        yield get_pool
