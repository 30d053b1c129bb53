"""Every public callable, and the arguments and tensors of one call of it.

Public names are those of docs/api/*.md, of the packages' `__all__`, and of MODULES.
`public_recipes` defines the calls; `test_public_tensors` and `test_public_wrong_values` make one
argument invalid at a time.
"""

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any

import torch

API = Path(__file__).parents[2] / "docs" / "api"
# Public modules. Without `__all__`, all names without an underscore that they define are public.
MODULES = (
    "modular_kernel",
    "modular_kernel.layers.adapter_pool",
    "modular_kernel.spec.lora",
    "modular_kernel.checkpoints",
    "modular_kernel.integrations.fused_moe",
    "modular_kernel.integrations.moe_runner",
    "modular_kernel.kernel",
    "modular_kernel.ops.moe_lora",
    "modular_kernel.select.composed_kernel",
    "experts.compat.batched_gemm",
    "experts.compat.ep_moe",
    "experts.compat.ep_scatter",
    "experts.compat.fused_moe",
    "topk_reduce",
)
# Public names of modules in which other names without an underscore are not public.
NAMES = (
    "modular_kernel.ops.align: moe_align_block_size, batched_moe_align_block_size",
    "modular_kernel.ops.reduce: moe_sum_reduce",
    "modular_kernel.quant.repacking: repack, unrepack",
    "modular_kernel.quant.scale_tiles: e8m0_to_float",
)
PACKAGES = ("modular_kernel.layers",)
OPTIONAL = "modular_kernel.integrations.transformers"
_OURS = ("modular_kernel", "experts", "prepare_finalize", "topk_reduce")


@dataclass(frozen=True)
class Call:
    """One valid call of a public callable: `function(**arguments)`.

    A path names a tensor inside the arguments, such as `weights.w1` or `topk_output[0]`. written:
    paths of the tensors that the call writes. shared: paths of tensors that may share memory with
    written tensors. accepts: defect of an argument -> the reason why the call accepts the defect.
    receiver: name of the argument that is the `self` of a method.
    """

    function: Callable[..., object]
    arguments: dict[str, Any]
    written: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    accepts: Mapping[str, str] = field(default_factory=dict)
    receiver: str = ""

    def __call__(self, path: str = "", value: object = None) -> object:
        """Make the call, with the argument at `path` replaced by `value`."""
        arguments = replaced(self.arguments, steps_of(path), value) if path else self.arguments
        return self.function(**arguments)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor of the arguments by its path."""
        return {
            path: value for path, value in leaves(self.arguments) if isinstance(value, torch.Tensor)
        }


def public_callables() -> dict[str, Callable[..., object]]:
    """Return every public function, class and method by name: `module.Class.method`."""
    callables: dict[str, Callable[..., object]] = {}
    for value in _iterate_exported():
        if inspect.isfunction(value):
            callables[_qualified_name(value)] = value
        elif inspect.isclass(value) and value.__module__.startswith(_OURS):
            callables[f"{value.__module__}.{value.__qualname__}"] = value
            callables |= {_qualified_name(method): method for method in _iterate_methods(value)}
    return dict(sorted(callables.items()))


def takes_tensors(function: Callable[..., object]) -> bool:
    """Return whether a parameter contains tensors, or, for a method, a field of its dataclass."""
    if inspect.isclass(function):
        init = vars(function).get("__init__")
        if dataclasses.is_dataclass(function) or init is None or _is_named_tuple(function):
            return _checks_arguments(function) and _holds_tensors(function)
        return any(map(_holds_tensors, _list_argument_hints(init)))
    hints = _list_argument_hints(function)
    return any(map(_holds_tensors, hints)) or _is_method_of_record(function)


def leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield every value inside dataclasses, sequences and mappings, with its path."""
    children = _list_children(value) if path else {str(k): v for k, v in dict(value).items()}  # type: ignore[call-overload]
    if children is None:
        yield path, value
        return
    for step, child in children.items():
        yield from leaves(child, f"{path}{step}")


def steps_of(path: str) -> list[str]:
    """Split a path: `weights.w1` into ["weights", ".w1"], `x[0]` into ["x", "[0]"]."""
    return re.findall(r"^\w+|\.\w+|\[\w+\]", path)


def replaced(value: Any, steps: list[str], new_value: object) -> Any:
    """Return a copy of a dataclass, sequence or mapping with `new_value` at the path `steps`."""
    if not steps:
        return new_value
    step, name = steps[0], steps[0].strip(".[]")
    if isinstance(value, dict):
        key = next(key for key in value if str(key) == name)
        return value | {key: replaced(value[key], steps[1:], new_value)}
    if step.startswith("."):
        field_value = replaced(getattr(value, name), steps[1:], new_value)
        if hasattr(value, "_replace"):
            return value._replace(**{name: field_value})
        return dataclasses.replace(value, **{name: field_value})
    items = list(value)
    items[int(name)] = replaced(items[int(name)], steps[1:], new_value)
    return type(value)(items)


def _list_children(value: object) -> dict[str, object] | None:
    if hasattr(value, "_fields"):
        return {f".{name}": getattr(value, name) for name in value._fields}
    if dataclasses.is_dataclass(value) and not inspect.isclass(value):
        names = [item.name for item in dataclasses.fields(value) if item.init]
        children = {f".{name}": getattr(value, name) for name in names}
        return children if _holds_tensors(type(value)) else None
    if isinstance(value, list | tuple) and value:
        return {f"[{index}]": item for index, item in enumerate(value)}
    if isinstance(value, dict) and value:
        return {f"[{key}]": item for key, item in value.items()}
    return None


def _iterate_exported() -> Iterator[object]:
    text = "".join(page.read_text(encoding="utf-8") for page in sorted(API.glob("*.md")))
    blocks = re.findall(r"```\{api\}\n(.*?)```", text, re.DOTALL)
    for line in (*"".join(blocks).splitlines(), *NAMES):
        module, _, names = line.partition(":")
        if not module.startswith(OPTIONAL):
            for name in names.split(","):
                yield getattr(import_module(module.strip()), name.strip())
    modules = list(MODULES)
    for package in PACKAGES:
        paths = import_module(package).__path__
        modules += [info.name for info in walk_packages(paths, f"{package}.")]
    for module_ in map(import_module, modules):
        exported = getattr(module_, "__all__", None)
        for name in vars(module_) if exported is None else exported:
            value = getattr(module_, name)
            is_defined_here = getattr(value, "__module__", "") == module_.__name__
            if exported is not None or (is_defined_here and not name.startswith("_")):
                yield value


def _qualified_name(function: Callable[..., object]) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _iterate_methods(cls: type) -> Iterator[Callable[..., object]]:
    for owner in cls.__mro__:
        if not owner.__module__.startswith(_OURS):
            continue
        for name, value in vars(owner).items():
            if isinstance(value, classmethod | staticmethod):
                value = value.__func__
            elif isinstance(value, property):
                continue
            is_public = name == "__call__" or not name.startswith("_")
            if is_public and inspect.isfunction(value):
                yield value


def _list_argument_hints(function: Any) -> list[object]:
    function = inspect.unwrap(function)
    try:
        hints = typing.get_type_hints(function)
    except NameError:  # a forward reference to a type imported only for type checking
        hints = dict(function.__annotations__)
    return [hint for name, hint in hints.items() if name != "return"]


def _holds_tensors(hint: Any, seen: frozenset[object] = frozenset()) -> bool:
    """Return whether values of an annotation contain tensors that a call may read."""
    if isinstance(hint, str):
        return "Tensor" in hint
    if hint in seen:
        return False
    seen |= {hint}
    if inspect.isclass(hint) and issubclass(hint, torch.Tensor):
        return True
    if typing.get_origin(hint) is typing.Unpack or typing.is_typeddict(hint):
        inner = hint if typing.is_typeddict(hint) else typing.get_args(hint)[0]
        return any(
            _holds_tensors(inner_hint, seen) for inner_hint in typing.get_type_hints(inner).values()
        )
    if typing.get_origin(hint) is not None and typing.get_origin(hint) is not typing.Literal:
        if typing.get_origin(hint) is Callable or "Callable" in str(typing.get_origin(hint)):
            return False
        return any(_holds_tensors(inner_hint, seen) for inner_hint in typing.get_args(hint))
    if isinstance(hint, typing.types.UnionType):  # type: ignore[attr-defined]
        return any(_holds_tensors(inner_hint, seen) for inner_hint in typing.get_args(hint))
    is_record = inspect.isclass(hint) and hint.__module__.startswith(_OURS)
    if is_record and (dataclasses.is_dataclass(hint) or _is_named_tuple(hint)):
        return any(
            _holds_tensors(inner_hint, seen) for inner_hint in typing.get_type_hints(hint).values()
        )
    return False


def _is_named_tuple(cls: type) -> bool:
    return issubclass(cls, tuple) and hasattr(cls, "_fields")


def _checks_arguments(cls: type) -> bool:
    """Return whether the constructor of a dataclass checks its arguments itself."""
    return "__post_init__" in vars(cls)


def _is_method_of_record(function: Callable[..., object]) -> bool:
    owner = function.__qualname__.rpartition(".")[0]
    cls = getattr(import_module(function.__module__), owner, None) if owner else None
    return inspect.isclass(cls) and dataclasses.is_dataclass(cls) and _holds_tensors(cls)
