"""What ranks run in the tests of the pool; a rank imports this file."""

import os
import signal
import time

import torch
import torch.distributed as dist


def total(rank, world, group, factor):
    """factor * (0 + 1 + ... + world - 1), by an all-reduce; and who we are."""
    value = torch.tensor([float(rank * factor)])
    dist.all_reduce(value, group=group)
    return rank, world, float(value)


def facts(rank, world, group):
    """Process id, threads, whether Triton is interpreted, the group's backend."""
    from modular_kernel.settings import read_settings

    interpreted = read_settings().triton_interpret
    return os.getpid(), torch.get_num_threads(), interpreted, dist.get_backend(group)


def host(rank, world, group):
    """The host that this rank takes itself for."""
    from modular_kernel.settings import read_settings

    return read_settings().host_id


def fail(rank, world, group, who, text):
    """Rank `who` raises; the others return, or wait for it in vain where text is "meet"."""
    if rank == who:
        raise ValueError(text)
    if text == "meet":
        dist.barrier(group=group)
    return rank


def die(rank, world, group, who, number):
    """Rank `who` is ended by a signal; the others wait for it."""
    if rank == who:
        os.kill(os.getpid(), number)
    dist.barrier(group=group)


def leave(rank, world, group):
    """Rank 0 ends its process as if all were well."""
    if rank == 0:
        os._exit(3)


def hang(rank, world, group, who, seconds):
    """Rank `who` sleeps."""
    if rank == who:
        oversleep(seconds)
    return rank


def oversleep(seconds):
    time.sleep(seconds)


def unpicklable(rank, world, group, who):
    return (lambda: None) if rank == who else rank


class Odd:
    """Can be pickled, and not unpickled."""

    def __reduce__(self):
        return int, ("not a number",)


def odd(rank, world, group, who):
    return Odd() if rank == who else rank


def ignore_terminate(rank, world, group):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return os.getpid()


def tensors(rank, world, group, given):
    return given * rank


def pair_up(rank, world, group):
    """An all-to-all with splits that differ, and nothing from some ranks to others."""
    sends = [peer * (rank % 2) for peer in range(world)]
    receives = [rank * (peer % 2) for peer in range(world)]
    inbox = torch.empty(sum(receives))
    outbox = torch.full((sum(sends),), float(rank))
    dist.all_to_all_single(inbox, outbox, receives, sends, group=group)
    return inbox.tolist()


class SlowToTell(Exception):
    """Raised at once, told late."""

    def __str__(self) -> str:
        time.sleep(0.5)
        return "raised first"


def fail_one_after_the_other(rank: int, world_size: int, group: object) -> None:
    """Rank 1 first, of which is heard last."""
    if rank == 1:
        raise SlowToTell
    time.sleep(0.2)
    raise ValueError("because of the other")
