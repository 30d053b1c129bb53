"""Functions that tests of RankPool run on ranks. Rank processes import this module."""

import os
import signal
import time

import torch
import torch.distributed as dist


def total(rank, world, group, factor):
    """Return the rank, the world size and the sum over ranks of `factor * rank`."""
    value = torch.tensor([float(rank * factor)])
    dist.all_reduce(value, group=group)
    return rank, world, float(value)


def facts(rank, world, group):
    """Return the process id, number of threads, whether Triton is interpreted, and the backend."""
    from modular_kernel.settings import read_settings

    interpreted = read_settings().triton_interpret
    return os.getpid(), torch.get_num_threads(), interpreted, dist.get_backend(group)


def host(rank, world, group):
    """Return the host id of this rank."""
    from modular_kernel.settings import read_settings

    return read_settings().host_id


def fail(rank, world, group, failing_rank, text):
    """Raise on `failing_rank`.

    The other ranks return their rank. If text is "meet", they first wait at a barrier.
    """
    if rank == failing_rank:
        raise ValueError(text)
    if text == "meet":
        dist.barrier(group=group)
    return rank


def die(rank, world, group, failing_rank, number):
    """Send signal `number` to `failing_rank` while the other ranks wait at a barrier."""
    if rank == failing_rank:
        os.kill(os.getpid(), number)
    dist.barrier(group=group)


def leave(rank, world, group):
    """Exit on rank 0 without an exception."""
    if rank == 0:
        os._exit(3)


def hang(rank, world, group, failing_rank, seconds):
    if rank == failing_rank:
        oversleep(seconds)
    return rank


def oversleep(seconds):
    time.sleep(seconds)


def unpicklable(rank, world, group, failing_rank):
    return (lambda: None) if rank == failing_rank else rank


class Unloadable:
    """Can be pickled, but not unpickled."""

    def __reduce__(self):
        return int, ("not a number",)


def unloadable(rank, world, group, failing_rank):
    return Unloadable() if rank == failing_rank else rank


def ignore_terminate(rank, world, group):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return os.getpid()


def tensors(rank, world, group, tensor):
    return tensor * rank


def pair_up(rank, world, group):
    """Run an all-to-all in which some ranks send nothing; return the received values."""
    sends = [peer * (rank % 2) for peer in range(world)]
    receives = [rank * (peer % 2) for peer in range(world)]
    received = torch.empty(sum(receives))
    sent = torch.full((sum(sends),), float(rank))
    dist.all_to_all_single(received, sent, receives, sends, group=group)
    return received.tolist()


class SlowError(Exception):
    """An error that is reported late, because its text takes half a second."""

    def __str__(self) -> str:
        time.sleep(0.5)
        return "raised first"


def fail_one_after_the_other(rank: int, world_size: int, group: object) -> None:
    """Raise on rank 1 first, although the error of rank 1 is reported last."""
    if rank == 1:
        raise SlowError
    time.sleep(0.2)
    raise ValueError("raised second")
