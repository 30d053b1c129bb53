"""Before any test: one thread for each process, and Triton's interpreter where there is no GPU.

A process either interprets Triton kernels or compiles them. `tests/compile` compiles, so it has a
process of its own: name nothing but paths in it, and the interpreter stays off. Otherwise, on a
machine without a GPU, `tests/compile` is left out.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
# Interpreted ranks that share a busy processor may wait long for each other, and prove the same;
# defects that make a rank wait in vain take as long.
os.environ.setdefault("MK_TIMEOUT_S", "20")

import hypothesis
import pytest
import torch

from modular_kernel.settings import enable_interpreter, read_settings
from modular_kernel.spec.problem import Machine

# pytest-xdist sets it in its workers, and commands fold their lines to it.
os.environ.pop("COLUMNS", None)

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

    from modular_kernel.testing.ranks.pool import RankPool

torch.set_num_threads(1)
# How long an example takes says nothing where processes share a busy machine.
hypothesis.settings.register_profile(
    "shared", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("shared")

LEFT_OUT = pytest.StashKey[int]()
INTERPRETED = pytest.StashKey[bool]()
COMPILE = Path(__file__).parent / "compile"
GPU = Path(__file__).parent / "gpu"
INTERPRETER = Path(__file__).parent / "interpreter"
IN_VLLM = Path(__file__).parent / "integrations" / "in_vllm"


def _compiles_only(config: pytest.Config) -> bool:
    """Whether every path named lies in tests/compile."""
    base = config.invocation_params.dir
    paths = [(base / argument.split("::")[0]).resolve() for argument in config.args]
    return bool(paths) and all(path.is_relative_to(COMPILE) for path in paths)


def pytest_configure(config: pytest.Config) -> None:
    if not torch.cuda.is_available() and not _compiles_only(config):
        enable_interpreter()
    config.stash[INTERPRETED] = read_settings().triton_interpret


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """A process interprets or compiles, never both; tests/gpu needs a GPU's memory.

    Tests in vLLM need an environment that has it: `make test-vllm`.
    """
    if collection_path.is_relative_to(IN_VLLM) and find_spec("vllm") is None:
        return True
    if collection_path.is_relative_to(GPU) and not torch.cuda.is_available():
        return True
    other = COMPILE if read_settings().triton_interpret else INTERPRETER
    return True if collection_path.is_relative_to(other) else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="run what `share` leaves to other trees")
    parser.addoption(
        "--suite",
        choices=("quick", "rest", "all"),
        default="all",
        help="select tests by their recorded time, see tests/helpers/suites.py",
    )


def _in_suite(item: pytest.Item, suite: str) -> bool:
    from shares import tree_hash
    from suites import selected

    marker = item.get_closest_marker("budget")
    name = f"{item.path.stem}::{item.name}"
    return selected(suite, name, tree_hash(), **(marker.kwargs if marker else {}))


def _in_share(item: pytest.Item) -> bool:
    from shares import in_share, tree_hash

    marker = item.get_closest_marker("share")
    return marker is None or in_share(item.nodeid, *marker.args, tree_hash())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is in no share of this tree, unless tests or words of their names are given.

    Tests of a machine without a GPU are left to a process that sees none (`make test-gpu`).
    """
    named = config.option.keyword or any("::" in argument for argument in config.args)
    if not named and not config.getoption("--whole"):
        out = {item for item in items if not _in_share(item)}
        suite = config.option.suite
        if suite != "all":
            out |= {item for item in items if not _in_suite(item, suite)}
        config.stash[LEFT_OUT] = len(out)
        config.hook.pytest_deselected(items=[item for item in items if item in out])
        items[:] = [item for item in items if item not in out]
    if not torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cpu"):
            item.add_marker(pytest.mark.skip(reason="of a machine without a GPU: `-m cpu`"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Fail a test that leaves Triton's interpreter on or off for later ones.

    What they import then would be of another kind than the kernels that this process has.
    """
    yield
    before, after = item.config.stash[INTERPRETED], read_settings().triton_interpret
    if after != before:
        os.environ["TRITON_INTERPRET"] = str(int(before))
        pytest.fail(f"TRITON_INTERPRET: the test leaves {int(after)}, need {int(before)}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)  # xdist: a worker tells the controller
    if output is not None:
        output["left_out"] = session.config.stash.get(LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: "WorkerController") -> None:
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", 0)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    left_out = config.stash.get(LEFT_OUT, 0)
    if left_out and config.option.suite != "all":
        other = "make test-rest" if config.option.suite == "quick" else "make test"
        terminalreporter.write_line(
            f"suite {config.option.suite!r}: {left_out} tests were left out. `{other}` runs most "
            "of them, `make test-all` every one."
        )


def pytest_report_header() -> list[str]:
    from shares import tree_hash

    triton = "triton: compiled"
    if read_settings().triton_interpret:
        triton = "triton: interpreted (tests/compile is left out: run `pytest tests/compile`)"
    vllm = "vllm: found"
    if find_spec("vllm") is None:
        vllm = "vllm: not found (tests/integrations/in_vllm is left out: `make test-vllm`)"
    return [triton, vllm, f"tree: {tree_hash()} (shares of cases are drawn from it)"]


@pytest.fixture(scope="session")
def machine() -> Machine:
    """This machine."""
    from modular_kernel.catalog import this_machine

    return this_machine()


@pytest.fixture(scope="session")
def rank_pool() -> "Iterator[Callable[[int], RankPool]]":
    """rank_pool(n): the session's pool of n ranks on the CPU, over gloo."""
    from modular_kernel.testing.ranks.pool import RankPool

    pools: dict[int, RankPool] = {}
    with ExitStack() as stack:

        def pool(world_size: int) -> RankPool:
            if world_size not in pools:
                pools[world_size] = stack.enter_context(RankPool(world_size))
            return pools[world_size]

        yield pool
