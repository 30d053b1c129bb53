"""Loading of --peer files, which define transports() returning a list of Transport objects."""

from pathlib import Path

from modular_kernel.bench.all2all.cases import Transport
from modular_kernel.bench.peer_files import load_file


def load_peers(path: Path) -> list[Transport]:
    """Import a file and return the result of its `transports()`.

    This happens in the main process and on every rank. The file should therefore import libraries
    only in `Transport.open`.

    Raises BrokenPartError or ConfigurationError, with the name of the file, if that fails.
    """
    transports: list[Transport]
    _, transports = load_file(path, "transports", Transport)
    return transports
