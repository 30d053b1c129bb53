"""Run a function in a forked child process that sends messages to its parent.

`one_process` runs each mutant in a child. Messages are JSON objects, one per line. A mutant
may make the child hang, crash or exhaust memory, so its memory is limited, and the parent waits for
each message for a limited time.
"""

import json
import os
import resource
import select
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

Message = dict[str, Any]
Send = Callable[[Message], None]

# Address space that a child may use in addition to what its parent uses.
_EXTRA_MEMORY_BYTES = 6 << 30


@dataclass(frozen=True)
class ChildExit:
    """How a child process ended.

    status: "done", "hang" or "crash".
    detail: the signal, the exit status or the timeout.
    """

    status: str
    detail: str = ""


class ChildProcess:
    """A forked child process. Iterate over it to get its messages; afterwards, read `exit`.

    work: function that runs in the child. Its argument is a function that sends a message.
    timeout_s: seconds to wait for the next message; may be changed between messages.
    """

    def __init__(self, work: Callable[[Send], None], timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.exit = ChildExit("crash", "sent no message")
        self._reader, writer = os.pipe()
        self._pid = os.fork()
        if not self._pid:
            os.close(self._reader)
            _run(work, writer)
        os.close(writer)

    def __iter__(self) -> Iterator[Message]:
        buffer = b""
        try:
            while True:
                ready, _, _ = select.select([self._reader], [], [], self.timeout_s)
                if not ready:
                    self.exit = ChildExit("hang", f"no message for {self.timeout_s:.0f} s")
                    return
                chunk = os.read(self._reader, 1 << 20)
                if not chunk:
                    self._record_exit()
                    return
                *lines, buffer = (buffer + chunk).split(b"\n")
                for line in lines:
                    message = json.loads(line)
                    if message.get("done"):
                        self.exit = ChildExit("done")
                    else:
                        yield message
        finally:
            self._close()

    def _record_exit(self) -> None:
        if self.exit.status == "done":
            return
        _, status = os.waitpid(self._pid, 0)
        self._pid = 0
        exit_code = os.waitstatus_to_exitcode(status)
        is_signal = exit_code < 0
        detail = signal.Signals(-exit_code).name if is_signal else f"exit {exit_code}"
        self.exit = ChildExit("crash", detail)

    def _close(self) -> None:
        os.close(self._reader)
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = 0


def _run(work: Callable[[Send], None], writer: int) -> NoReturn:
    status = 1
    try:
        silence_and_limit_memory()
        torch.set_num_threads(1)

        def send(message: Message) -> None:
            os.write(writer, json.dumps(message).encode() + b"\n")

        work(send)
        send({"done": True})
        status = 0
    finally:
        sys.settrace(None)
        os._exit(status)


def silence_and_limit_memory() -> None:
    """Discard the output of this process, and limit its memory to 6 GiB more than it uses now."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    statm = Path("/proc/self/statm")
    if statm.exists():
        pages = int(statm.read_text(encoding="utf-8").split()[0])
        limit = pages * resource.getpagesize() + _EXTRA_MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
