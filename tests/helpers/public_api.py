"""The public API as text, one line per name.

`python tests/helpers/public_api.py` writes this text to public_api.txt.
"""

import dataclasses
import enum
import inspect
from pathlib import Path
from typing import Any

import modular_kernel

RECORD = Path(__file__).with_suffix(".txt")


def surface() -> list[str]:
    """Return every name of `modular_kernel.__all__` with its signature, fields and methods."""
    lines = list[str]()
    for name in sorted(modular_kernel.__all__):
        value = getattr(modular_kernel, name)
        if inspect.isclass(value):
            lines += [
                f"class {name}{_format_bases(value)}",
                *(f"  {line}" for line in _list_members(value)),
            ]
        elif callable(value):
            lines.append(f"{name}{inspect.signature(value)}")
        else:
            lines.append(f"{name}: {type(value).__name__}")
    return lines


def _format_bases(cls: type) -> str:
    return f"({', '.join(base.__name__ for base in cls.__bases__ if base is not object)})"


def _list_members(cls: type) -> list[str]:
    if issubclass(cls, enum.Enum):
        return [member.name for member in cls]
    lines = list[str]()
    if dataclasses.is_dataclass(cls):
        lines += [_format_field(field) for field in dataclasses.fields(cls)]
    elif "__init__" in vars(cls):
        lines.append(f"__init__{inspect.signature(cls)}")
    members = dict[str, Any]()
    for owner in reversed(cls.__mro__):
        if owner.__module__.startswith("modular_kernel."):  # inherited names are public as well
            members |= {n: v for n, v in vars(owner).items() if n == "__call__" or n[0] != "_"}
    for name, value in sorted(members.items()):
        if isinstance(value, classmethod | staticmethod):
            value = value.__func__
        if inspect.isfunction(value):
            lines.append(f"{name}{inspect.signature(value)}")
        elif isinstance(value, property):
            lines.append(f"{name}: property")
    return lines


def _format_field(field: "dataclasses.Field[Any]") -> str:
    optional = field.default is not dataclasses.MISSING
    optional |= field.default_factory is not dataclasses.MISSING
    return f"{field.name}: {'may be left out' if optional else 'needed'}"


if __name__ == "__main__":
    RECORD.write_text("\n".join(surface()) + "\n", encoding="utf-8")
