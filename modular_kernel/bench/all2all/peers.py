"""Loading of --peer files, which define transports() returning a list of Transport objects."""

from pathlib import Path

from modular_kernel.bench.all2all.cases import Transport
from modular_kernel.bench.peer_files import load_file


def load_peers(path: Path) -> list[Transport]:
    """Import the file and return the result of its `transports()`.

    Raises BrokenPartError or ConfigurationError naming the file if that fails.

    This is called in the listing process and on every rank. Libraries should therefore be imported
    in `Transport.open`, not at import of the file or in the constructors.
    """
    transports: list[Transport]
    _, transports = load_file(path, "transports", Transport)
    return transports
