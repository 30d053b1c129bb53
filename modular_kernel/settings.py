"""The only module that reads (or writes) the environment."""

import difflib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from modular_kernel.errors import ConfigurationError

# Every variable of this package's own.
VARIABLES = ("MK_CACHE_DIR", "MK_CONFIG_DIR", "MK_DEADLINE_S", "MK_HOST_ID", "MK_IMPORT_DEADLINE_S")


@dataclass(frozen=True)
class Settings:
    """What the environment says.

    triton_interpret: TRITON_INTERPRET is set, so Triton kernels run in its CPU interpreter.
    cache_dir: MK_CACHE_DIR, or the user's cache folder; never created here. None where neither is
        known: nothing is kept then.
    config_dir: MK_CONFIG_DIR, or the user's configuration folder: tuned tiles; never created here.
        None where neither is known.
    deadline_s: MK_DEADLINE_S, or 10: seconds that an exchange between ranks may take, where its
        manager was not told otherwise.
    host_id: MK_HOST_ID, or "": a name of the host this process is on. Ranks with different names
        take each other for ranks of other hosts, which lets one machine stand for several.
    import_deadline_s: MK_IMPORT_DEADLINE_S, or 60: seconds that a package may take to be imported
        for the parts it offers.
    """

    triton_interpret: bool
    cache_dir: Path | None
    config_dir: Path | None
    deadline_s: float
    host_id: str
    import_deadline_s: float


def read_settings() -> Settings:
    """Read the environment once; callers keep the frozen result."""
    interpret = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "y", "yes")
    return Settings(
        triton_interpret=interpret,
        cache_dir=_folder("MK_CACHE_DIR", "XDG_CACHE_HOME", ".cache"),
        config_dir=_folder("MK_CONFIG_DIR", "XDG_CONFIG_HOME", ".config"),
        deadline_s=_seconds("MK_DEADLINE_S", 10.0),
        host_id=os.environ.get("MK_HOST_ID", ""),
        import_deadline_s=_seconds("MK_IMPORT_DEADLINE_S", 60.0),
    )


@dataclass(frozen=True)
class Launcher:
    """The world that a launcher such as torchrun put this process in.

    local_rank: among the processes of this host; the GPU to use. local_world_size: how many these
    are, as far as the launcher says. address: of the store, host:port.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None
    address: str

    @property
    def ranks_per_host(self) -> int | None:
        """How many ranks are on each host; None where all are on one, or hosts have unlike many."""
        here = self.local_world_size
        return None if here in (None, self.world_size) or self.world_size % here else here


_MOST_DIGITS = 18
_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def read_launcher() -> Launcher | None:
    """Read what a launcher left: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.

    None where RANK and WORLD_SIZE are not set. ConfigurationError where they are not whole, or no
    numbers in range. LOCAL_RANK defaults to RANK; LOCAL_WORLD_SIZE may be absent.
    """
    if not (os.environ.get("RANK") or os.environ.get("WORLD_SIZE")):
        return None
    missing = [name for name in _LAUNCHER if not os.environ.get(name)]
    if missing:
        got = f"no {', '.join(missing)}"
        need = f"{', '.join(_LAUNCHER)}, as a launcher sets them, or none of RANK and WORLD_SIZE"
        raise ConfigurationError("launcher's variables", got=got, need=need)
    world_size = _number("WORLD_SIZE", 1, None)
    rank = _number("RANK", 0, world_size)
    # Rank 0 would take any free port for 0, which no other rank knows.
    address = f"{os.environ['MASTER_ADDR']}:{_number('MASTER_PORT', 1, 1 << 16)}"
    beside = "LOCAL_WORLD_SIZE"
    here = _number(beside, 1, world_size + 1) if os.environ.get(beside) else None
    end = here or world_size
    local = _number("LOCAL_RANK", 0, end) if os.environ.get("LOCAL_RANK") else rank
    return Launcher(rank, world_size, local, here, address)


def _number(name: str, least: int, end: int | None) -> int:
    """ConfigurationError unless the variable is an integer in [least, end)."""
    text = os.environ[name]
    short = len(text) <= _MOST_DIGITS and text.isascii() and text.isdecimal()
    number = int(text) if short else -1
    if number < least or (end is not None and number >= end):
        need = f">= {least}" if end is None else f"in [{least}, {end})"
        raise ConfigurationError(name, got=text[:80], need=need)
    return number


def _folder(own: str, user_s: str, below_home: str) -> Path | None:
    """Return what `own` names, else this package's folder in the user's; None if neither is."""
    if os.environ.get(own):
        return Path(os.environ[own])
    if os.environ.get(user_s):
        return Path(os.environ[user_s], "modular_kernel")
    try:
        return Path.home() / below_home / "modular_kernel"
    except RuntimeError:  # HOME is not set, and the user has no entry in passwd: a container
        return None


def c_compiler() -> str | None:
    """Find the C compiler that triton would take: CC, else gcc, else clang; None if none is."""
    named = os.environ.get("CC")
    names = (named,) if named else ("gcc", "clang")
    return next((found for found in map(shutil.which, names) if found), None)


def unknown_variables() -> dict[str, str]:
    """Return variables beginning with MK_ that mean nothing here.

    Each comes with the nearest known one, or "".
    """
    unknown = [v for v in os.environ if v.startswith("MK_") and v not in VARIABLES]
    near = {v: difflib.get_close_matches(v, VARIABLES, n=1, cutoff=0.6) for v in sorted(unknown)}
    return {v: found[0] if found else "" for v, found in near.items()}


def _seconds(name: str, default: float) -> float:
    """Raise ConfigurationError unless the variable, if set, is a finite number above 0."""
    text = os.environ.get(name) or str(default)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigurationError(name, got=text, need="seconds > 0")
    return seconds


def nvshmem_asks_for_ibgda() -> bool:
    """Tell whether NVSHMEM is told to reach peers over InfiniBand from the GPU.

    Libraries set the variable while they are in use, so it is read at every call.
    """
    return os.environ.get("NVSHMEM_IB_ENABLE_IBGDA", "1").lower() not in ("0", "false", "off", "n")


def deepep_disables_gin() -> bool:
    """Tell whether DeepEP's second generation is told to do without NCCL's GIN, that is RDMA."""
    return os.environ.get("EP_DISABLE_GIN", "0") not in ("", "0")


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Have MK_DEADLINE_S be `seconds` within: for managers that parts make by themselves."""
    with _told("MK_DEADLINE_S", str(seconds)):
        yield


@contextmanager
def host_called(name: str) -> Iterator[None]:
    """Have MK_HOST_ID be `name` within: for managers that are made there."""
    with _told("MK_HOST_ID", name):
        yield


@contextmanager
def _told(variable: str, value: str) -> Iterator[None]:
    before = os.environ.get(variable)
    os.environ[variable] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


def hide_gpus() -> None:
    """See no GPU in this process; works only before CUDA is first used."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def enable_interpreter() -> None:
    """Ask Triton for its CPU interpreter; works only before triton is first imported.

    Triton reads TRITON_INTERPRET while kernels are defined, so a command that finds no GPU calls
    this first of all.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    # One BLAS thread: the interpreter's small products run several times slower with more.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def environment_of_child(*, interpreted: bool) -> dict[str, str]:
    """Return the environment of a process in which kernels are interpreted, or are not."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    threads = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    return environment | threads | ({"TRITON_INTERPRET": "1"} if interpreted else {})


@contextmanager
def environment_kept() -> Iterator[None]:
    """Put the environment back behind it: a command changes its process's."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
