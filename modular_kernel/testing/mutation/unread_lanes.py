"""Find values of masked lanes of loads that nothing reads, so that changing them has no effect.

    headers = tl.load(row, mask=mask, other=0)
    tl.store(words, headers, mask=mask)

The store skips the lanes that have the value of `other`. A mutant of this value is equivalent by
construction, and is not made.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache


@lru_cache(maxsize=64)
def find_unread_values(tree: ast.Module) -> frozenset[ast.expr]:
    """Return the values of `other` whose lanes are never stored.

    Included are the values of loads that are assigned to a name of a function, if every use of the
    name is a value that is later stored with the same mask. The name, and every name in the mask,
    must be assigned at most once in the function, the names in the mask before the load.
    """
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return frozenset(value for function in functions for value in _find_in_function(function))


def _find_in_function(function: ast.FunctionDef) -> Iterator[ast.expr]:
    nodes = [*ast.walk(function)]
    names = [node for node in nodes if isinstance(node, ast.Name)]
    assigned = [name for name in names if isinstance(name.ctx, ast.Store)]
    num_assigned = Counter(name.id for name in assigned)
    line_assigned = {name.id: name.lineno for name in assigned}
    num_read = Counter(name.id for name in names if isinstance(name.ctx, ast.Load))
    stores = [node for node in nodes if isinstance(node, ast.Call) and _is_call_of(node, "store")]
    for node in nodes:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        target, load = node.targets[0], node.value
        arguments = {keyword.arg: keyword.value for keyword in load.keywords}
        mask, other = arguments.get("mask"), arguments.get("other")
        if not isinstance(target, ast.Name) or not _is_call_of(load, "load"):
            continue
        if mask is None or other is None:
            continue
        mask_names = {name.id for name in ast.walk(mask) if isinstance(name, ast.Name)}
        later = [store for store in stores if store.lineno > node.lineno]
        num_stored = sum(_stores(store, target.id, ast.dump(mask)) for store in later)
        is_constant = all(num_assigned[name] <= 1 for name in (target.id, *mask_names))
        is_constant &= all(line_assigned.get(name, 0) < node.lineno for name in mask_names)
        if is_constant and num_stored == num_read[target.id]:
            yield other


def _stores(call: ast.Call, name: str, mask: str) -> bool:
    """Return whether a call stores the value of a name, with a mask given as `ast.dump`."""
    masks = [ast.dump(keyword.value) for keyword in call.keywords if keyword.arg == "mask"]
    has_value = len(call.args) == 2 and isinstance(call.args[1], ast.Name)
    return has_value and call.args[1].id == name and masks == [mask]  # type: ignore[attr-defined]


def _is_call_of(call: ast.Call, name: str) -> bool:
    """Return whether a call is `tl.NAME(...)`."""
    function = call.func
    return (
        isinstance(function, ast.Attribute)
        and function.attr == name
        and isinstance(function.value, ast.Name)
        and function.value.id == "tl"
    )
