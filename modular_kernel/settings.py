"""Reads and sets environment variables. No other module accesses the environment."""

import difflib
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from modular_kernel.errors import ConfigurationError

# All environment variables of this package.
VARIABLES = (
    "MK_CACHE_DIR",
    "MK_CONFIG_DIR",
    "MK_TIMEOUT_S",
    "MK_HOST_ID",
    "MK_IMPORT_TIMEOUT_S",
    "MK_SGLANG",
    "MK_VLLM",
    "MK_VLLM_PREPARE",
)


@dataclass(frozen=True)
class Settings:
    """Settings from the environment. Reading them does not create directories.

    triton_interpret: TRITON_INTERPRET, whether Triton kernels run in the CPU interpreter.
    cache_dir: MK_CACHE_DIR, or the user's cache directory. None if neither is known; then nothing
        is cached.
    config_dir: MK_CONFIG_DIR, or the user's configuration directory, for tuned configurations. None
        if neither is known.
    timeout_s: MK_TIMEOUT_S, 10 by default. Timeout of an exchange between ranks in seconds. The
        manager of the ranks' connections can set a different timeout.
    host_id: MK_HOST_ID, "" by default. Name of this process's host. Ranks with different host names
        treat each other as remote, so that one machine can simulate several hosts.
    import_timeout_s: MK_IMPORT_TIMEOUT_S, 60 by default. Timeout of the import of a package's parts
        in seconds.
    """

    triton_interpret: bool
    cache_dir: Path | None
    config_dir: Path | None
    timeout_s: float
    host_id: str
    import_timeout_s: float


def read_settings() -> Settings:
    """Read the settings from the environment."""
    interpret = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "y", "yes")
    return Settings(
        triton_interpret=interpret,
        cache_dir=_find_user_folder("MK_CACHE_DIR", "XDG_CACHE_HOME", ".cache"),
        config_dir=_find_user_folder("MK_CONFIG_DIR", "XDG_CONFIG_HOME", ".config"),
        timeout_s=_read_seconds("MK_TIMEOUT_S", 10.0),
        host_id=os.environ.get("MK_HOST_ID", ""),
        import_timeout_s=_read_seconds("MK_IMPORT_TIMEOUT_S", 60.0),
    )


@dataclass(frozen=True)
class LauncherEnvironment:
    """Rank and sizes that a launcher such as torchrun has set for this process.

    rank: rank of this process.
    world_size: number of processes.
    local_rank: rank among the processes on this host, which is also the index of its GPU.
    local_world_size: number of processes on this host; None if the launcher does not set it.
    address: host:port of the rendezvous store.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None
    address: str

    @property
    def ranks_per_host(self) -> int | None:
        """Number of ranks per host.

        None if all ranks are on one host, if the launcher does not set LOCAL_WORLD_SIZE, or if
        LOCAL_WORLD_SIZE does not divide WORLD_SIZE.
        """
        size = self.local_world_size
        return None if size in (None, self.world_size) or self.world_size % size else size


_MAX_INTEGER_DIGITS = 18  # of an integer variable; every 18-digit number fits in int64
_REQUIRED_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def read_launcher() -> LauncherEnvironment | None:
    """Read RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    LOCAL_RANK defaults to RANK, and LOCAL_WORLD_SIZE is optional. Returns None if RANK and
    WORLD_SIZE are not set. Raises ConfigurationError if variables are missing, not integers, or out
    of range.
    """
    if not (os.environ.get("RANK") or os.environ.get("WORLD_SIZE")):
        return None
    missing = [name for name in _REQUIRED_VARIABLES if not os.environ.get(name)]
    if missing:
        got = f"no {', '.join(missing)}"
        names = ", ".join(_REQUIRED_VARIABLES)
        need = f"{names}, which launchers set; or unset RANK and WORLD_SIZE"
        raise ConfigurationError("variables of the launcher", got=got, need=need)
    world_size = _read_int("WORLD_SIZE", 1, None)
    rank = _read_int("RANK", 0, world_size)
    # Port 0 is refused, because rank 0 would bind a free port that the other ranks do not know.
    address = f"{os.environ['MASTER_ADDR']}:{_read_int('MASTER_PORT', 1, 1 << 16)}"
    variable = "LOCAL_WORLD_SIZE"
    local_world_size = _read_int(variable, 1, world_size + 1) if os.environ.get(variable) else None
    local_end = local_world_size or world_size
    local_rank = _read_int("LOCAL_RANK", 0, local_end) if os.environ.get("LOCAL_RANK") else rank
    return LauncherEnvironment(rank, world_size, local_rank, local_world_size, address)


def _read_int(name: str, start: int, end: int | None) -> int:
    """Read an integer variable. Raises ConfigurationError unless it is in [start, end)."""
    value = os.environ[name]
    is_integer = len(value) <= _MAX_INTEGER_DIGITS and value.isascii() and value.isdecimal()
    number = int(value) if is_integer else -1
    if number < start or (end is not None and number >= end):
        need = f">= {start}" if end is None else f"in [{start}, {end})"
        raise ConfigurationError(name, got=value[:80], need=need)
    return number


def _find_user_folder(variable: str, xdg_variable: str, home_subfolder: str) -> Path | None:
    """Return the folder that `variable` names, or this package's subfolder of the user's folder.

    Returns None if there is no such folder.

    variable: name of an environment variable of this package.
    xdg_variable: name of an environment variable that holds the user's folder.
    home_subfolder: the user's folder relative to the home directory, if xdg_variable is not set.
    """
    if os.environ.get(variable):
        return Path(os.environ[variable])
    if os.environ.get(xdg_variable):
        return Path(os.environ[xdg_variable], "modular_kernel")
    try:
        return Path.home() / home_subfolder / "modular_kernel"
    except RuntimeError:  # HOME is unset and the user has no passwd entry, as in some containers
        return None


def find_c_compiler() -> str | None:
    """Return the path of the C compiler that triton uses, or None if there is none.

    The compiler is the one in CC if CC is set, and otherwise gcc or, without gcc, clang.
    """
    configured = os.environ.get("CC")
    names = (configured,) if configured else ("gcc", "clang")
    return next((path for path in map(shutil.which, names) if path), None)


def find_unknown_variables() -> dict[str, str]:
    """Return the unknown environment variables that begin with MK_.

    Each name is mapped to the most similar known variable, or to "" if none is similar.
    """
    unknown = [v for v in os.environ if v.startswith("MK_") and v not in VARIABLES]
    matches = {v: difflib.get_close_matches(v, VARIABLES, n=1, cutoff=0.6) for v in sorted(unknown)}
    return {v: names[0] if names else "" for v, names in matches.items()}


def _read_seconds(name: str, default: float) -> float:
    """Read a number of seconds. Raises ConfigurationError unless it is finite and above 0."""
    value = os.environ.get(name) or str(default)
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigurationError(name, got=value, need="a number of seconds > 0")
    return seconds


def nvshmem_uses_ibgda() -> bool:
    """Return whether NVSHMEM is configured to reach peers over InfiniBand from the GPU (IBGDA).

    The variable is read in every call, because libraries set it at run time.
    """
    return os.environ.get("NVSHMEM_IB_ENABLE_IBGDA", "1").lower() not in ("0", "false", "off", "n")


def read_nvshmem_qp_depth() -> int:
    """Return NVSHMEM_QP_DEPTH, the work requests that a queue pair holds. DeepEP's default is 1024.

    Raises ConfigurationError unless it is a positive integer.
    """
    text = os.environ.get("NVSHMEM_QP_DEPTH", "1024")
    if not text.isdecimal() or not int(text):
        raise ConfigurationError("NVSHMEM_QP_DEPTH", got=repr(text[:40]), need="an integer > 0")
    return int(text)


def is_deepep_gin_disabled() -> bool:
    """Return whether EP_DISABLE_GIN disables NCCL GIN (RDMA) in DeepEP v2."""
    return os.environ.get("EP_DISABLE_GIN", "0") not in ("", "0")


def find_deepgemm_compiler() -> Path | None:
    """Return the path of the nvcc that DeepGEMM runs, which need not exist; None if it uses NVRTC.

    The variables are read in every call, because the import of DeepGEMM sets some of them.
    """
    if os.environ.get("DG_JIT_USE_NVRTC", "0") == "1":
        return None
    if compiler := os.environ.get("DG_JIT_NVCC_COMPILER"):
        return Path(compiler)
    if home := os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        return Path(home, "bin/nvcc")
    return Path(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc")


def read_vllm_setting() -> str:
    """Return MK_VLLM, "1" by default.

    "0" disables the plugin for vLLM, and "1" enables it. Any other value is a comma-separated list
    of experts parts, with which the plugin is enabled.
    """
    return os.environ.get("MK_VLLM", "").strip() or "1"


def is_vllm_preparation_enabled() -> bool:
    """Return whether the plugin for vLLM prepares 4-bit weights (MK_VLLM_PREPARE)."""
    value = os.environ.get("MK_VLLM_PREPARE", "1").strip().lower()
    return value not in ("0", "false", "off", "no")


def are_fused_operations_disabled() -> bool:
    """Return whether SGLANG_CI_DISABLE_MOE_FUSED_FUNC disables fused operations of MoE runners."""
    return os.environ.get("SGLANG_CI_DISABLE_MOE_FUSED_FUNC", "0") == "1"


def is_sglang_plugin_disabled() -> bool:
    """Return whether MK_SGLANG disables the plugin for SGLang."""
    value = os.environ.get("MK_SGLANG", "1").strip().lower()
    return value in ("0", "false", "off", "no")


@contextmanager
def use_timeout(seconds: float) -> Iterator[None]:
    """Set MK_TIMEOUT_S inside the block, for connections to other ranks that are created there."""
    with _set_variable("MK_TIMEOUT_S", str(seconds)):
        yield


@contextmanager
def use_host_id(name: str) -> Iterator[None]:
    """Set MK_HOST_ID inside the block, for connections to other ranks that are created there."""
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
    """Hide all GPUs from this process. This has an effect only before CUDA is used."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def enable_interpreter() -> None:
    """Enable Triton's CPU interpreter. This has an effect only before triton is imported.

    Commands call this function before anything else if there is no GPU.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    # The interpreter's small matmuls are several times slower with more than one BLAS thread.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def make_child_environment(*, interpreted: bool) -> dict[str, str]:
    """Return the environment for a child process, with one BLAS thread.

    interpreted: whether to enable Triton's interpreter in the child process.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    threads = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    return environment | threads | ({"TRITON_INTERPRET": "1"} if interpreted else {})


def update_environment(variables: Mapping[str, str]) -> None:
    """Set environment variables of this process."""
    os.environ.update(variables)


@contextmanager
def preserve_environment() -> Iterator[None]:
    """Restore the environment variables after the block."""
    previous = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(previous)
