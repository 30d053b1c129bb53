"""Loading of records that a verb wrote with --json."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from modular_kernel.errors import ConfigurationError
from modular_kernel.utils import json_files

_MOST_BYTES = 1 << 26

Record = TypeVar("Record")


def load_record(option: str, path: Path, read: Callable[[str], Record]) -> Record:
    """Load a record file, at most 64 MiB, with the parser `read`.

    Raises ConfigurationError naming `option` and the path if the file cannot be read or parsed.
    """
    try:
        return read(json_files.read_file(path, _MOST_BYTES).decode())
    except ConfigurationError as error:
        got, need = f"schema {error.got!r}", f"{error.need}, as --json wrote it"
    except OSError as error:
        got, need = error.strerror or str(error), "a file of --json"
    except UnicodeDecodeError:
        got, need = "not UTF-8", "a file of --json"
    except ValueError as error:
        got, need = f"no JSON: {error}", "a file of --json"
    except (KeyError, TypeError, AttributeError) as error:
        got, need = f"a record that is not whole: {error}", "a file of --json"
    raise ConfigurationError(f"{option} {path}", got=got, need=need)
