"""A forked child process that sends messages to its parent, one JSON object per line.

The child may hang, crash or exhaust memory; the parent limits the wait for each message.
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
Tell = Callable[[Message], None]

# Address space that a child may use in addition to its parent's.
_MORE_BYTES = 6 << 30


@dataclass(frozen=True)
class ChildExit:
    """How a child ended: "done", "hang", or "crash" with a signal or an exit status."""

    how: str
    detail: str = ""


class ChildProcess:
    """A working child process. Iterate over its messages; then `ended` holds how it ended.

    patience: timeout in seconds for the next message; may be changed between messages.
    """

    def __init__(self, work: Callable[[Tell], None], patience: float) -> None:
        self.patience = patience
        self.ended = ChildExit("crash", "sent no message")
        self._reader, writer = os.pipe()
        self._pid = os.fork()
        if not self._pid:
            os.close(self._reader)
            _run(work, writer)
        os.close(writer)

    def __iter__(self) -> Iterator[Message]:
        rest = b""
        try:
            while True:
                ready, _, _ = select.select([self._reader], [], [], self.patience)
                if not ready:
                    self.ended = ChildExit("hang", f"no message for {self.patience:.0f} s")
                    return
                data = os.read(self._reader, 1 << 20)
                if not data:
                    self._died()
                    return
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    message = json.loads(line)
                    if message.get("done"):
                        self.ended = ChildExit("done")
                    else:
                        yield message
        finally:
            self._end()

    def _died(self) -> None:
        """Record how the child ended, after it closed its end of the pipe."""
        if self.ended.how == "done":
            return
        _, status = os.waitpid(self._pid, 0)
        self._pid = 0
        code = os.waitstatus_to_exitcode(status)
        self.ended = ChildExit("crash", signal.Signals(-code).name if code < 0 else f"exit {code}")

    def _end(self) -> None:
        """Close the pipe and kill the child if it still runs."""
        os.close(self._reader)
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = 0


def _run(work: Callable[[Tell], None], writer: int) -> NoReturn:
    """Run the work in the child and exit."""
    status = 1
    try:
        confine()
        torch.set_num_threads(1)

        def tell(message: Message) -> None:
            os.write(writer, json.dumps(message).encode() + b"\n")

        work(tell)
        tell({"done": True})
        status = 0
    finally:
        sys.settrace(None)
        os._exit(status)


def confine() -> None:
    """Silence this process and limit its memory to 6 GiB more than it uses now."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    statm = Path("/proc/self/statm")
    if statm.exists():
        pages = int(statm.read_text(encoding="utf-8").split()[0])
        limit = pages * resource.getpagesize() + _MORE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
