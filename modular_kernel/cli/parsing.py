"""Conversion of option strings to typed values.

This replaces typer's own conversion, which uses pydantic: importing pydantic takes as long as
checking a pair, and its error messages differ from ours.
"""

import functools
import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from modular_kernel.cli.file_options import FileUse, check_path
from modular_kernel.errors import ConfigurationError

_NEED: dict[Any, str] = {int: "an integer", float: "a number"}
_SHOWN = 100


def disable_conversion(command: Any) -> None:
    """Make typer pass option strings unconverted, for a command and its subcommands."""
    command.get_params = partial(_parameters, command.get_params)
    for verb in getattr(command, "commands", {}).values():
        disable_conversion(verb)


def _parameters(find: Callable[..., list[Any]], context: Any) -> list[Any]:
    """Return a command's parameters with conversion disabled.

    Called on each access, because typer adds --help in `get_params`.
    """
    parameters = find(context)
    for parameter in parameters:
        if "process_value" not in vars(parameter):
            parameter.process_value = partial(_as_typed, parameter, parameter.process_value)
    return parameters


def _as_typed(parameter: Any, process: Callable[..., Any], context: Any, value: Any) -> Any:
    if not isinstance(value, str | int | float | Path | list | tuple | None):
        return process(context, value)  # the parser's sentinel for an option that was not given
    if value is None and parameter.multiple:
        value = ()
    return value if parameter.callback is None else parameter.callback(context, parameter, value)


def convert_options(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command so that option strings are converted according to its annotations.

    The wrapper raises ConfigurationError for the first option with an invalid value, and for a path
    that is unusable for its `FileUse`.
    """
    parameters = inspect.signature(command).parameters.values()
    kinds = {p.name: _kind(p.annotation) for p in parameters}
    uses = {p.name: file_use for p in parameters if (file_use := _use(p.annotation)) is not None}

    @functools.wraps(command)
    def taking_words(**values: Any) -> None:
        values = {name: _value(name, kinds[name], value) for name, value in values.items()}
        for name, file_use in uses.items():
            value = values.get(name)
            for path in value if isinstance(value, list) else [value]:
                if path is not None:
                    check_path(_option(name), Path(path), file_use)
        command(**values)

    return taking_words


def _option(name: str) -> str:
    return f"--{name.removeprefix('as_').replace('_', '-')}"


def _use(annotation: Any) -> FileUse | None:
    """Return the FileUse in an option's annotation; None if it does not name a file."""
    if get_origin(annotation) is not Annotated:
        return None
    return next((item for item in annotation.__metadata__ if isinstance(item, FileUse)), None)


def _kind(annotation: Any) -> Any:
    """Return the value type of an option: `int` for `Annotated[int | None, ...]`."""
    if get_origin(annotation) is Annotated:
        return _kind(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        (kind,) = (arg for arg in get_args(annotation) if arg is not NoneType)
        return kind
    return annotation


def _value(name: str, kind: Any, given: Any) -> Any:
    if get_origin(kind) is list and given is not None:
        return [_value(name, get_args(kind)[0], item) for item in given]
    if kind is Path and isinstance(given, str):
        return Path(given)
    if kind in _NEED and isinstance(given, str):
        try:
            return kind(given)
        except ValueError:
            got = repr(given if len(given) <= _SHOWN else f"{given[:_SHOWN]}...")
            raise ConfigurationError(_option(name), got=got, need=_NEED[kind]) from None
    return given
