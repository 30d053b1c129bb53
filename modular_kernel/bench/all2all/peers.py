"""Reads a file of peers: Python with transports(), which returns a list of Transport objects."""

from pathlib import Path

from modular_kernel.bench.all2all.cases import Transport
from modular_kernel.bench.peer_files import load_file


def load_peers(path: Path) -> list[Transport]:
    """Return what `transports()` of the file returns, made anew.

    Raise an error that names the file if it cannot.

    Called in the process that lists them and on every rank, so importing the file, and making the
    transports, should import no library: `open` does.
    """
    transports: list[Transport]
    _, transports = load_file(path, "transports", Transport)
    return transports
