"""Functions that validate a process group and connect its ranks, for the managers.

Every manager (`TorchGroup`, `DeepEPGroup` and others) takes a ProcessGroup of the caller, and opens
new connections through the store of this group. Each step has a deadline.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d

from modular_kernel.errors import ConfigurationError, DeviceError
from modular_kernel.settings import read_settings
from modular_kernel.utils import forks
from prepare_finalize.rendezvous.at_exit import run_in_thread
from prepare_finalize.rendezvous.failure_log import failure_key

R = TypeVar("R")
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
_NCCL_CONNECT_S = 30.0  # connecting over NCCL takes seconds, even if later timeouts are short


def resolve_timeout(timeout_s: Any) -> float:
    """Return `timeout_s` in seconds, or the timeout of `read_settings` for None.

    Raise ConfigurationError unless `timeout_s` is a finite number above 0.
    """
    if timeout_s is None:
        return read_settings().timeout_s
    is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if is_number and 0 < timeout_s < float("inf"):
        return float(timeout_s)
    raise ConfigurationError("timeout_s", got=repr(timeout_s), need="seconds > 0")


def check_process(generation: int) -> None:
    """Raise StateError in a process that was forked after a manager was created."""
    need = "a spawned process, with a process group of its own"
    forks.check_process(generation, "exchange between ranks", need)


def connect(device: str, store: Store, rank: int, world_size: int, timeout_s: float) -> Any:
    """Open a new communicator over `store`: gloo for "cpu", NCCL for "cuda".

    Raise RuntimeError if a rank does not connect within `timeout_s` (at least 30 s for NCCL).
    """
    if device == "cpu":
        return dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=timeout_s))
    # The thread below does not inherit the current device.
    current_device = torch.device("cuda", torch.cuda.current_device())

    def create() -> Any:
        # NCCL's watchdog aborts the process after the timeout in the options. This timeout is much
        # longer than `timeout_s`, so that run_with_timeout raises an error first.
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=max(600.0, 10 * timeout_s))
        group = dist.ProcessGroupNCCL(store, rank, world_size, options)
        group.eager_connect_single_device(current_device)
        return group

    return run_with_timeout(create, max(timeout_s, _NCCL_CONNECT_S))


def run_with_timeout(function: Callable[[], R], seconds: float) -> R:
    """Run `function` in a thread and return its result.

    Raise RuntimeError if `function` takes longer than `seconds`. The thread is not stopped.
    """
    results: list[R] = []
    errors: list[RuntimeError] = []

    def run() -> None:
        try:
            results.append(function())
        except RuntimeError as error:
            errors.append(error)

    run_in_thread(run).join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise RuntimeError(f"no answer within {seconds:g} s")
    return results[0]


def agree_on_prefix(store: Store, rank: int, world_size: int) -> str:
    """Return a prefix of store keys for a new manager, the same on every rank.

    Each manager needs a new prefix, because the keys of earlier managers remain in the store. The
    prefix contains the number of attempts to create a manager. A rank may have made fewer attempts
    than others, because it failed before it reached the store. Such a rank joins the latest attempt
    of the others, or starts a new attempt if that attempt has failed.
    """
    keys = [f"modular_kernel/attempts/{peer}" for peer in range(world_size)]
    attempts_W = [_parse_counter(key, store.get(key)) if store.check([key]) else 0 for key in keys]
    attempt = max(attempts_W)
    failure_keys = [f"modular_kernel/{attempt}/{failure_key(peer)}" for peer in range(world_size)]
    if attempt == attempts_W[rank] or any(store.check([key]) for key in failure_keys):
        attempt += 1
    store.set(keys[rank], str(attempt))
    return f"modular_kernel/{attempt}"


def _parse_counter(key: str, value: bytes) -> int:
    """Parse a counter. Raise RuntimeError, like an unreachable store, if it is not a number."""
    try:
        return int(value)
    except ValueError as error:
        raise RuntimeError(f"the store holds {value[:20]!r} as {key}, not a number") from error


def new_prefix_store(
    group: dist.ProcessGroup, timeout_s: float, *, prefix: str = ""
) -> PrefixStore:
    """Return the group's store, with a prefix of keys for a new manager (`agree_on_prefix`).

    Raise RuntimeError if the store does not answer in time.

    prefix: appended to the prefix of keys.
    """
    store = distributed_c10d._get_process_group_store(group)
    attempt = run_with_timeout(
        lambda: agree_on_prefix(store, group.rank(), group.size()), timeout_s
    )
    return PrefixStore(f"{attempt}{prefix}", store)


def get_rank_and_size(group: object | None) -> tuple[int, int]:
    """Return this process's rank in a ProcessGroup, and the size of the group.

    Raise ConfigurationError if this process is not a member.
    """
    process_group = resolve_process_group(group)
    return process_group.rank(), process_group.size()


def resolve_process_group(group: object | None) -> dist.ProcessGroup:
    """Return `group`, or the default group for None.

    Raise ConfigurationError if this process is not a member.
    """
    if not dist.is_available() or not dist.is_initialized():
        need = "torch.distributed.init_process_group first"
        raise ConfigurationError("process group", got="none in this process", need=need)
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        need = "a ProcessGroup that this rank is a member of"
        raise ConfigurationError("process group", got=type(group).__name__, need=need)
    return group


def select_device_type(group: dist.ProcessGroup, requested: str | None) -> str:
    """Return `requested`, or the default device type of a group for None.

    The default is "cuda" if the group has an NCCL backend, and otherwise "cpu".

    Raise ConfigurationError unless the group has the backend of `BACKENDS` for the device type.
    """
    config = dist.get_backend_config(group)
    backends = dict(pair.split(":", 1) for pair in config.split(",") if ":" in pair)
    device_types = [
        device for device in ("cuda", "cpu") if backends.get(device) == BACKENDS[device]
    ]
    if not device_types or (requested is not None and requested not in device_types):
        need = " or ".join(
            f"{BACKENDS[d]} for {d}" for d in ([requested] if requested else BACKENDS)
        )
        raise ConfigurationError("process group's backend", got=config, need=need)
    return requested or device_types[0]


def check_device_type(device: torch.device | str, group_device_type: str) -> None:
    """Raise DeviceError unless the type of `device` is `group_device_type`."""
    device_type = torch.device(device).type
    if device_type != group_device_type:
        need = f"{group_device_type}: the group's backend is {BACKENDS[group_device_type]}"
        raise DeviceError("tensors of an exchange", got=device_type, need=need)
