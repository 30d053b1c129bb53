"""Find strides of tensors that are None, which kernels do not read.

    launch(kernel, grid, bias_ptr=w if bias is None else bias, HAS_BIAS=bias is not None,
           stride_bias=0 if bias is None else bias.stride(0))

A kernel that reads such a stride reads the tensor as well, which is another one. A mutant of the
stride is equivalent by construction, and is not made.
"""

import ast
from functools import lru_cache
from typing import TypeGuard


@lru_cache(maxsize=64)
def find_absent_strides(tree: ast.Module) -> frozenset[ast.expr]:
    """Return the constants that stand for the strides of tensors that are None.

    Included is the 0 of `0 if tensor is None else ...`, if it is the value of a keyword argument or
    of a dictionary key whose name contains "stride".
    """
    named: list[tuple[object, ast.expr]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword):
            named.append((node.arg, node.value))
        elif isinstance(node, ast.Dict):
            named += [
                (key.value, value)
                for key, value in zip(node.keys, node.values, strict=True)
                if isinstance(key, ast.Constant)
            ]
    return frozenset(
        value.body for name, value in named if "stride" in str(name) and _is_0_if_none(value)
    )


def _is_0_if_none(value: ast.expr) -> TypeGuard[ast.IfExp]:
    return (
        isinstance(value, ast.IfExp)
        and isinstance(value.body, ast.Constant)
        and value.body.value == 0
        and isinstance(value.test, ast.Compare)
        and isinstance(value.test.ops[0], ast.Is)
        and ast.unparse(value.test.comparators[0]) == "None"
    )
