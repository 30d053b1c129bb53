"""Builds click commands from annotated functions, and defines the types of their options.

A verb is a function. An annotation makes its parameter an option:

    tokens: Annotated[int | None, option("Maximum number of tokens per call.")] = None

With `argument("...")` instead of `option(...)`, the parameter becomes a positional argument. A
parameter can also be an option group: a dataclass whose fields become options. Several verbs can
share a group.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeGuard, Union, get_args, get_origin, get_type_hints

import click

from modular_kernel.cli.output import STDOUT, reserve_stdout_for_json
from modular_kernel.cli.refusals import report_error
from modular_kernel.errors import ConfigurationError, ModularKernelError

# Option -> names that other tools give it.
_OTHER_NAMES = {
    "--world-size": (
        *("--world-size", "--worldsize", "--world", "--worlds", "--ranks", "--num-ranks"),
        *("--nproc", "--nproc-per-node", "--ep", "--ep-size", "--gpus", "--num-gpus"),
    ),
    "--ranks-per-host": (
        *("--ranks-per-host", "--ranks-per-node"),
        *("--gpus-per-host", "--gpus-per-node"),
    ),
}
_OPTION_NAME = re.compile(r"--[a-z][a-z0-9-]*")
_NON_BREAKING_HYPHEN = "\N{NON-BREAKING HYPHEN}"
_MAX_QUOTED_CHARS = 100  # characters of an invalid value that a message quotes
JSON_PARAMETER = "as_json"  # name of the parameter of --json, which every verb has


class _ConfigurationErrorMixin(click.ParamType[Any]):
    """Mixin of option types that raises ConfigurationError where click raises BadParameter.

    need: description of valid values.
    """

    need: str

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            error = ConfigurationError(option_name(param), got=_quote(value), need=self.need)
            raise error from None


class Integer(_ConfigurationErrorMixin, click.types.IntParamType):
    """An integer."""

    need = "an integer"


class IntegerRange(_ConfigurationErrorMixin, click.IntRange):
    """An integer from `min` to `max`, or at least `min` if `max` is None."""

    def __init__(self, min: int, max: int | None = None) -> None:
        super().__init__(min, max)
        self.need = f"an integer >= {min}" if max is None else f"an integer from {min} to {max}"


class Number(_ConfigurationErrorMixin, click.types.FloatParamType):
    """A number."""

    need = "a number"


class NumberRange(_ConfigurationErrorMixin, click.FloatRange):
    """A number that is at least `min`. With `min_open`, it must be greater than `min`."""

    def __init__(self, min: float, *, min_open: bool = False) -> None:
        super().__init__(min, min_open=min_open)
        self.need = f"a number {'>' if min_open else '>='} {min:g}"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):  # click accepts NaN in every range
            raise ConfigurationError(option_name(param), got=_quote(value), need=self.need)
        return number


POSITIVE = NumberRange(0, min_open=True)


class Choice(_ConfigurationErrorMixin, click.Choice[str]):
    """One of the given strings."""

    def __init__(self, *choices: str) -> None:
        super().__init__(choices)
        *first_choices, last_choice = choices
        self.need = f"{', '.join(first_choices)} or {last_choice}"


class IntegerList(click.ParamType[Any]):
    """A comma-separated list of integers from 1 to `max`, as a tuple without duplicates."""

    name = "integers"

    def __init__(self, max: int, example: str) -> None:
        self.max = max
        self.need = f"numbers from 1 to {max}, such as {example}"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return self.parse(value, option_name(param))

    def parse(self, value: str, option_name: str) -> tuple[int, ...]:
        """Parse the value of an option. Raises a ConfigurationError that names the option."""
        numbers = value.split(",")
        if not all(n.isdecimal() and n.isascii() and 0 < int(n) <= self.max for n in numbers):
            raise ConfigurationError(option_name, got=_quote(value), need=self.need)
        return tuple(dict.fromkeys(map(int, numbers)))


def _quote(value: object) -> str:
    text = str(value)
    return repr(text if len(text) <= _MAX_QUOTED_CHARS else f"{text[:_MAX_QUOTED_CHARS]}...")


def option_name(parameter: click.Parameter | None) -> str:
    """Return the first name of an option, such as "--tokens"."""
    assert parameter is not None
    return parameter.opts[0]


@dataclass(frozen=True)
class Option:
    """Annotation metadata that makes a parameter an option.

    names: names on the command line. () derives one from the parameter's name.
    metavar: name of the value in the help.
    type: click type of the value. None derives it from the annotation.
    flag_value: value of the option if it is given without a value.
    """

    help: str
    names: tuple[str, ...] = ()
    metavar: str | None = None
    type: click.ParamType[Any] | None = None
    flag_value: str | None = None


def option(
    help: str,
    *names: str,
    metavar: str | None = None,
    type: click.ParamType[Any] | None = None,
    flag_value: str | None = None,
) -> Any:
    """Return an `Option` with these fields, typed as Any for use in `Annotated`."""
    return Option(help, names, metavar, type, flag_value)


@dataclass(frozen=True)
class Argument:
    """Annotation metadata that makes a parameter a required positional argument."""

    help: str


def argument(help: str) -> Any:
    """Return an `Argument` with this description.

    The docstring of the verb must also describe the argument, because click shows no description
    of arguments in the help.
    """
    return Argument(help)


class _HelpFormatter(click.HelpFormatter):
    """A formatter that does not break the lines of a help text inside the name of an option."""

    def write_text(self, text: str) -> None:
        super().write_text(_bind_option_names(text))

    def write_dl(self, rows: Iterable[tuple[str, str]], *args: int, **kwargs: int) -> None:
        super().write_dl([(name, _bind_option_names(text)) for name, text in rows], *args, **kwargs)

    def getvalue(self) -> str:
        return super().getvalue().replace(_NON_BREAKING_HYPHEN, "-")


def _bind_option_names(text: str) -> str:
    """Replace the hyphens in names of options by hyphens at which a line is not broken."""
    return _OPTION_NAME.sub(lambda match: match[0].replace("-", _NON_BREAKING_HYPHEN), text)


class HelpContext(click.Context):
    """A context whose help keeps the names of options in one line."""

    formatter_class = _HelpFormatter


class Verb(click.Command):
    """A click command that turns a ModularKernelError into a message and an exit status.

    If `--json` prints to stdout, nothing else is printed there, and an InputError is also printed
    as JSON.
    """

    context_class = HelpContext

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with _report_errors(ctx):
            try:
                return super().parse_args(ctx, args)
            except click.NoSuchOption as error:
                raise _name_the_option(error, self) from None

    def invoke(self, ctx: click.Context) -> Any:
        prints_json = ctx.params.get(JSON_PARAMETER) == STDOUT
        with reserve_stdout_for_json() if prints_json else nullcontext(), _report_errors(ctx):
            return super().invoke(ctx)


def _name_the_option(error: click.NoSuchOption, verb: Verb) -> click.UsageError:
    """Return the error with the option that another tool's name stands for, or with none.

    click suggests options with similar letters, so that it would suggest --lora for --world.
    """
    name = error.option_name.replace("_", "-")
    named = next((right for right, names in _OTHER_NAMES.items() if name in names), name)
    options = {option for parameter in verb.params for option in parameter.opts}
    if named in options and named != error.option_name:
        message = f"No such option {error.option_name!r}. Did you mean {named!r}?"
        return click.UsageError(message, ctx=error.ctx)
    if named in _OTHER_NAMES:
        return click.NoSuchOption(error.option_name, ctx=error.ctx)
    return error


@contextmanager
def _report_errors(ctx: click.Context) -> Iterator[None]:
    """Print a ModularKernelError that the body of the context raises, and exit with its status."""
    try:
        yield
    except ModularKernelError as error:
        raise click.exceptions.Exit(report_error(error, ctx.params.get(JSON_PARAMETER))) from None


def make_verb(name: str, function: Callable[..., None], short_help: str) -> Verb:
    """Return the command that calls `function` with the values of its options.

    The help lists the options of the function first, and then the options of its groups.

    short_help: description of the verb in `mk --help`.
    """
    groups: dict[str, type] = {}  # parameter name -> dataclass
    parameters: list[click.Parameter] = []
    hints = get_type_hints(function, include_extras=True)
    for parameter in sorted(
        inspect.signature(function).parameters.values(),
        key=lambda p: is_option_group(hints[p.name]),
    ):
        annotation = hints[parameter.name]
        if is_option_group(annotation):
            groups[parameter.name] = annotation
            group_hints = get_type_hints(annotation, include_extras=True)
            parameters += [
                _make_parameter(f.name, group_hints[f.name], f.default) for f in fields(annotation)
            ]
        else:
            parameters.append(_make_parameter(parameter.name, annotation, parameter.default))

    def callback(**values: Any) -> None:
        for group_name, group in groups.items():
            values[group_name] = group(**{f.name: values.pop(f.name) for f in fields(group)})
        function(**values)

    return Verb(
        name,
        callback=callback,
        params=parameters,
        help=inspect.getdoc(function),
        short_help=short_help,
    )


def is_option_group(annotation: object) -> TypeGuard[type]:
    """Return whether the annotation is a dataclass."""
    return isinstance(annotation, type) and is_dataclass(annotation)


def _make_parameter(name: str, annotation: Any, default: Any) -> click.Parameter:
    value_type, (metadata, *_) = get_args(annotation)[0], annotation.__metadata__
    if isinstance(metadata, Argument):
        return click.Argument([name], type=_TYPES.get(value_type))
    assert isinstance(metadata, Option), f"{name} has no option()"
    if get_origin(value_type) in (Union, UnionType):
        (value_type,) = (arg for arg in get_args(value_type) if arg is not NoneType)
    attributes: dict[str, Any] = {"type": metadata.type or _TYPES.get(value_type)}
    if value_type is bool:
        attributes = {"is_flag": True}
    elif get_origin(value_type) is Literal:
        attributes = {"type": Choice(*get_args(value_type))}
    elif value_type == tuple[Path, ...]:
        attributes = {"type": metadata.type or _TYPES[Path], "multiple": True}
    elif get_origin(value_type) is tuple and metadata.type is None:
        attributes = {"nargs": len(get_args(value_type))}
    if metadata.flag_value is not None:
        attributes |= {"is_flag": False, "flag_value": metadata.flag_value}
    return click.Option(
        [name, *(metadata.names or [f"--{name.replace('_', '-')}"])],
        default=default,
        help=metadata.help,
        metavar=metadata.metavar,
        show_default=default not in (None, "", ()),
        # Parse --json first, so that an error in another option is printed as JSON, too.
        is_eager=name == JSON_PARAMETER,
        **attributes,
    )


_TYPES: dict[Any, click.ParamType[Any]] = {
    int: Integer(),
    float: Number(),
    str: click.STRING,
    Path: click.Path(path_type=Path),
}
