"""Turn the words of options into values.

typer would do it through pydantic, whose import takes as long as judging a pair, and answer in
pydantic's words.
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

_NEED: dict[Any, str] = {int: "a whole number", float: "a number"}
_SHOWN = 100


def leave_words(command: Any) -> None:
    """Have typer hand the words of options to a command's function as they are, in verbs too."""
    command.get_params = partial(_parameters, command.get_params)
    for verb in getattr(command, "commands", {}).values():
        leave_words(verb)


def _parameters(find: Callable[..., list[Any]], context: Any) -> list[Any]:
    """Return a command's parameters; typer adds --help when it is asked for them."""
    parameters = find(context)
    for parameter in parameters:
        if "process_value" not in vars(parameter):
            parameter.process_value = partial(_as_given, parameter, parameter.process_value)
    return parameters


def _as_given(parameter: Any, process: Callable[..., Any], context: Any, value: Any) -> Any:
    if not isinstance(value, str | int | float | Path | list | tuple | None):
        return process(context, value)  # the mark of a parser for an option that was not given
    if value is None and parameter.multiple:
        value = ()
    return value if parameter.callback is None else parameter.callback(context, parameter, value)


def converted(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with values where it would be given words, as its annotations say.

    ConfigurationError names the first option that is given another word than it takes, or a path
    that cannot serve its use.
    """
    parameters = inspect.signature(command).parameters.values()
    kinds = {p.name: _kind(p.annotation) for p in parameters}
    uses = {p.name: use for p in parameters if (use := _use(p.annotation)) is not None}

    @functools.wraps(command)
    def taking_words(**values: Any) -> None:
        values = {name: _value(name, kinds[name], given) for name, given in values.items()}
        for name, use in uses.items():
            given = values.get(name)
            for path in given if isinstance(given, list) else [given]:
                if path is not None:
                    check_path(_option(name), Path(path), use)
        command(**values)

    return taking_words


def _option(name: str) -> str:
    return f"--{name.removeprefix('as_').replace('_', '-')}"


def _use(annotation: Any) -> FileUse | None:
    """Return what a verb does with the file that an option names; None for other options."""
    if get_origin(annotation) is not Annotated:
        return None
    return next((one for one in annotation.__metadata__ if isinstance(one, FileUse)), None)


def _kind(annotation: Any) -> Any:
    """Return what an option holds: int of Annotated[int | None, ...]."""
    if get_origin(annotation) is Annotated:
        return _kind(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        (kind,) = (one for one in get_args(annotation) if one is not NoneType)
        return kind
    return annotation


def _value(name: str, kind: Any, given: Any) -> Any:
    if get_origin(kind) is list and given is not None:
        return [_value(name, get_args(kind)[0], one) for one in given]
    if kind is Path and isinstance(given, str):
        return Path(given)
    if kind in _NEED and isinstance(given, str):
        try:
            return kind(given)
        except ValueError:
            got = repr(given if len(given) <= _SHOWN else f"{given[:_SHOWN]}...")
            raise ConfigurationError(_option(name), got=got, need=_NEED[kind]) from None
    return given
