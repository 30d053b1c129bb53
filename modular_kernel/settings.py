"""Environment variables. No other module reads or writes the environment."""

import difflib
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from modular_kernel.errors import ConfigurationError

# Every environment variable of this package.
VARIABLES = (
    "MK_CACHE_DIR",
    "MK_CONFIG_DIR",
    "MK_DEADLINE_S",
    "MK_HOST_ID",
    "MK_IMPORT_DEADLINE_S",
    "MK_SGLANG",
    "MK_VLLM",
)


@dataclass(frozen=True)
class Settings:
    """Settings from the environment.

    triton_interpret: TRITON_INTERPRET is set, so Triton kernels run in the CPU interpreter.
    cache_dir: MK_CACHE_DIR, or the user's cache directory; not created here. None if neither is
        set; nothing is cached then.
    config_dir: MK_CONFIG_DIR, or the user's configuration directory, for tuned tiles; not created
        here. None if neither is set.
    deadline_s: MK_DEADLINE_S, default 10: seconds that an exchange between ranks may take, unless
        its manager sets another deadline.
    host_id: MK_HOST_ID, or "": name of this process's host. Ranks with different names treat each
        other as remote, which lets one machine simulate several hosts.
    import_deadline_s: MK_IMPORT_DEADLINE_S, default 60: seconds that importing a package's parts
        may take.
    """

    triton_interpret: bool
    cache_dir: Path | None
    config_dir: Path | None
    deadline_s: float
    host_id: str
    import_deadline_s: float


def read_settings() -> Settings:
    """Read the settings from the environment; the result is frozen."""
    interpret = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "y", "yes")
    return Settings(
        triton_interpret=interpret,
        cache_dir=_user_folder("MK_CACHE_DIR", "XDG_CACHE_HOME", ".cache"),
        config_dir=_user_folder("MK_CONFIG_DIR", "XDG_CONFIG_HOME", ".config"),
        deadline_s=_read_seconds("MK_DEADLINE_S", 10.0),
        host_id=os.environ.get("MK_HOST_ID", ""),
        import_deadline_s=_read_seconds("MK_IMPORT_DEADLINE_S", 60.0),
    )


@dataclass(frozen=True)
class Launcher:
    """The process group that a launcher such as torchrun started this process in.

    local_rank: rank among this host's processes, also the index of its GPU. local_world_size:
    number of processes on this host, if the launcher sets it. address: host:port of the
    rendezvous store.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None
    address: str

    @property
    def ranks_per_host(self) -> int | None:
        """Ranks per host; None if all ranks share one host, or hosts have unequal numbers."""
        local = self.local_world_size
        return None if local in (None, self.world_size) or self.world_size % local else local


_MAX_DIGITS = 18
_REQUIRED_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def read_launcher() -> Launcher | None:
    """Read the launcher's RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.

    Returns None if RANK and WORLD_SIZE are unset. Raises ConfigurationError if the variables are
    incomplete, not integers, or out of range. LOCAL_RANK defaults to RANK; LOCAL_WORLD_SIZE is
    optional.
    """
    if not (os.environ.get("RANK") or os.environ.get("WORLD_SIZE")):
        return None
    missing = [name for name in _REQUIRED_VARIABLES if not os.environ.get(name)]
    if missing:
        got = f"no {', '.join(missing)}"
        names = ", ".join(_REQUIRED_VARIABLES)
        need = f"{names}, as a launcher sets them, or none of RANK and WORLD_SIZE"
        raise ConfigurationError("launcher's variables", got=got, need=need)
    world_size = _read_int("WORLD_SIZE", 1, None)
    rank = _read_int("RANK", 0, world_size)
    # With port 0, rank 0 would bind an arbitrary free port that the other ranks cannot know.
    address = f"{os.environ['MASTER_ADDR']}:{_read_int('MASTER_PORT', 1, 1 << 16)}"
    variable = "LOCAL_WORLD_SIZE"
    local_world_size = _read_int(variable, 1, world_size + 1) if os.environ.get(variable) else None
    local_end = local_world_size or world_size
    local = _read_int("LOCAL_RANK", 0, local_end) if os.environ.get("LOCAL_RANK") else rank
    return Launcher(rank, world_size, local, local_world_size, address)


def _read_int(name: str, start: int, end: int | None) -> int:
    """Read an integer variable; ConfigurationError unless it is in [start, end)."""
    text = os.environ[name]
    is_integer = len(text) <= _MAX_DIGITS and text.isascii() and text.isdecimal()
    number = int(text) if is_integer else -1
    if number < start or (end is not None and number >= end):
        need = f">= {start}" if end is None else f"in [{start}, {end})"
        raise ConfigurationError(name, got=text[:80], need=need)
    return number


def _user_folder(variable: str, xdg_variable: str, home_subfolder: str) -> Path | None:
    """Return the folder that `variable` names, else this package's subfolder of the user folder.

    Returns None if there is no user folder either.
    """
    if os.environ.get(variable):
        return Path(os.environ[variable])
    if os.environ.get(xdg_variable):
        return Path(os.environ[xdg_variable], "modular_kernel")
    try:
        return Path.home() / home_subfolder / "modular_kernel"
    except RuntimeError:  # HOME is unset and the user has no passwd entry, as in some containers
        return None


def c_compiler() -> str | None:
    """Return the C compiler that triton would use: CC, else gcc, else clang; None if missing."""
    from_env = os.environ.get("CC")
    names = (from_env,) if from_env else ("gcc", "clang")
    return next((path for path in map(shutil.which, names) if path), None)


def unknown_variables() -> dict[str, str]:
    """Return unrecognized variables that begin with MK_.

    The value is the closest known variable, or "".
    """
    unknown = [v for v in os.environ if v.startswith("MK_") and v not in VARIABLES]
    matches = {v: difflib.get_close_matches(v, VARIABLES, n=1, cutoff=0.6) for v in sorted(unknown)}
    return {v: names[0] if names else "" for v, names in matches.items()}


def _read_seconds(name: str, default: float) -> float:
    """Read a number of seconds; ConfigurationError unless it is finite and above 0."""
    text = os.environ.get(name) or str(default)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigurationError(name, got=text, need="seconds > 0")
    return seconds


def nvshmem_uses_ibgda() -> bool:
    """Return whether NVSHMEM is configured to reach peers over InfiniBand from the GPU (IBGDA).

    Libraries set the variable while they are in use, so it is read on every call.
    """
    return os.environ.get("NVSHMEM_IB_ENABLE_IBGDA", "1").lower() not in ("0", "false", "off", "n")


def deepep_disables_gin() -> bool:
    """Return whether DeepEP v2 is configured not to use NCCL GIN (RDMA)."""
    return os.environ.get("EP_DISABLE_GIN", "0") not in ("", "0")


def vllm_plugin() -> str:
    """Return MK_VLLM, default "1": "0" disables the plugin for vLLM, and "1" enables it.

    Any other value enables it with the experts parts that it names, separated by commas.
    """
    return os.environ.get("MK_VLLM", "").strip() or "1"


def are_fused_operations_disabled() -> bool:
    """Return whether SGLANG_CI_DISABLE_MOE_FUSED_FUNC disables fused operations of MoE runners."""
    return os.environ.get("SGLANG_CI_DISABLE_MOE_FUSED_FUNC", "0") == "1"


def is_sglang_plugin_disabled() -> bool:
    """Return whether MK_SGLANG=0 keeps this package out of SGLang."""
    value = os.environ.get("MK_SGLANG", "1").strip().lower()
    return value in ("0", "false", "off", "no")


@contextmanager
def use_deadline(seconds: float) -> Iterator[None]:
    """Set MK_DEADLINE_S to `seconds` inside the block, for managers that parts create."""
    with _set_variable("MK_DEADLINE_S", str(seconds)):
        yield


@contextmanager
def use_host_id(name: str) -> Iterator[None]:
    """Set MK_HOST_ID to `name` inside the block, for managers created there."""
    with _set_variable("MK_HOST_ID", name):
        yield


@contextmanager
def use_variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the block."""
    with ExitStack() as stack:
        for variable, value in values.items():
            stack.enter_context(_set_variable(variable, value))
        yield


@contextmanager
def _set_variable(variable: str, value: str) -> Iterator[None]:
    previous = os.environ.get(variable)
    os.environ[variable] = value
    try:
        yield
    finally:
        if previous is None:
            del os.environ[variable]
        else:
            os.environ[variable] = previous


def hide_gpus() -> None:
    """Hide all GPUs from this process. Effective only before CUDA is first used."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def enable_interpreter() -> None:
    """Enable Triton's CPU interpreter. Effective only before triton is first imported.

    Triton reads TRITON_INTERPRET when kernels are defined, so a command that finds no GPU calls
    this before anything else.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    # One BLAS thread: the interpreter's small matmuls run several times slower with more.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def child_environment(*, interpreted: bool) -> dict[str, str]:
    """Return the environment for a child process with or without Triton's interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    threads = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    return environment | threads | ({"TRITON_INTERPRET": "1"} if interpreted else {})


@contextmanager
def preserve_environment() -> Iterator[None]:
    """Restore the environment after the block, for commands that change it."""
    previous = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(previous)
