"""Reads a file of peers: Python with transports(), which returns a list of Transport objects."""

import importlib.util
from pathlib import Path

from modular_kernel.bench.exchange import Transport
from modular_kernel.errors import BrokenPartError, ConfigurationError


def load_peers(path: Path) -> list[Transport]:
    """What `transports()` of the file returns, made anew; an error that names the file else.

    Called in the process that lists them and on every rank, so importing the file, and making the
    transports, should import no library: `open` does.
    """
    what = f"--peer {path}"
    spec = importlib.util.spec_from_file_location(f"mk_exchange_peer_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigurationError(what, got="no such Python file", need="FILE.py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        made = module.transports()
    # A foreign file can fail in any way; it is named, and nothing is measured.
    except (Exception, SystemExit) as error:
        raise BrokenPartError(what, got=repr(error), need="a file with transports()") from error
    if not isinstance(made, list) or not all(isinstance(each, Transport) for each in made):
        need = "a list of modular_kernel.bench.exchange.Transport"
        raise ConfigurationError(f"{what}: transports()", got=repr(made), need=need)
    return made
