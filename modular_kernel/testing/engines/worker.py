"""Program of a worker process, which receives cases and judges them one at a time.

    python -m modular_kernel.testing.engines.worker DESCRIPTOR MODULE

DESCRIPTOR is the file descriptor of a connection to the parent process. `load_engine` of MODULE
returns the engine. The worker sends a Description, or the error if the engine cannot be loaded. For
each case, it then sends the name of each phase as the phase begins, and finally an Outcome.
"""

import sys
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection

import torch

from modular_kernel.errors import ModularKernelError
from modular_kernel.integrations.engine import Engine
from modular_kernel.testing.engines.judge import Judge


def main(descriptor: int, module: str) -> None:
    """Judge cases until the parent closes the connection."""
    connection = Connection(descriptor)
    torch.set_num_threads(1)
    try:
        engine: Engine = import_module(module).load_engine()
        description = engine.describe()
    except ModularKernelError as error:
        connection.send(error)
        return
    connection.send(description)
    judge = Judge(engine, torch.device(description.device), connection.send)
    with suppress(EOFError):
        while True:
            outcome = judge.judge(connection.recv())
            connection.send(outcome)
            if outcome.is_fatal:
                return


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
