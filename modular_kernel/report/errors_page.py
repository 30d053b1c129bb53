"""The page of errors (docs/errors.md), from the docstrings in `modular_kernel.errors`."""

import inspect
from types import ModuleType

from modular_kernel import errors
from modular_kernel.errors import ModularKernelError
from modular_kernel.report.pages.document import Block, Code, Document, Heading, Table, Text

_EXAMPLE = """
import modular_kernel as mk
from modular_kernel.errors import ConfigurationError

try:
    mk.Problem(tokens=16, hidden=64, intermediate=128, experts=8, top_k=0)
except ConfigurationError as error:
    details = error.what, error.got, error.need
assert details == ("top_k", 0, "an int >= 1 and < 2^31")

problem = mk.Problem(tokens=16, hidden=64, intermediate=128, experts=8, top_k=2)
try:
    mk.make_kernel("BatchedPrepareAndFinalize", "TorchExperts", problem)
except mk.IncompatibleError as error:
    rules = [rejection.rule for rejection in error.rejections]
assert rules == ["format", "reduce"]
"""


def build_errors_document(module: ModuleType = errors) -> Document:
    """Build the document of all error classes that `module` defines, in order of definition."""
    classes = [
        cls
        for cls in vars(module).values()
        if isinstance(cls, type)
        and issubclass(cls, ModularKernelError)
        and cls.__module__ == module.__name__
    ]
    return (
        Heading(1, "Errors"),
        Text(
            "All exceptions that the toolkit raises deliberately are defined in "
            "`modular_kernel.errors` and derive from `ModularKernelError`. Invalid input raises an "
            "`InputError` before any kernel is launched. Its attributes are `what` (the name of "
            "the invalid input), `got` (its value) and `need` (a description of valid values). An "
            "`AssertionError` is a defect of the toolkit; please report it."
        ),
        Code("python", _EXAMPLE),
        Text("On the command line, a rejected pair exits with status 1 and bad usage with 2."),
        Table(
            ("error", "base class"), [(f"`{cls.__name__}`", _format_bases(cls)) for cls in classes]
        ),
        *(block for cls in classes for block in _make_description(cls)),
    )


def _format_bases(cls: type) -> str:
    return ", ".join(f"`{base.__name__}`" for base in cls.__bases__)


def _make_description(cls: type) -> tuple[Block, ...]:
    paragraphs = inspect.cleandoc(cls.__doc__ or "").split("\n\n")
    texts = [Text(" ".join(paragraph.split())) for paragraph in paragraphs]
    return (Heading(2, f"`{cls.__name__}`"), *texts)
