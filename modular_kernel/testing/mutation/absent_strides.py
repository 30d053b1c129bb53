"""Find stride arguments of absent (None) tensors, which kernels do not read.

    launch(kernel, grid, bias_ptr=w if bias is None else bias, HAS_BIAS=bias is not None,
           stride_bias=0 if bias is None else bias.stride(0))

A kernel that read such a stride would also read the tensor that is passed in place of the absent
one. A mutant of the stride is therefore equivalent by construction, and is not made.
"""

import ast
from functools import lru_cache
from typing import TypeGuard


@lru_cache(maxsize=64)
def find_absent_strides(tree: ast.Module) -> frozenset[ast.expr]:
    """Return the constants that are passed as the strides of absent tensors.

    These are each 0 in `0 if tensor is None else ...`, where the expression is the value of a
    keyword argument or of a dictionary key whose name contains "stride".
    """
    named_values: list[tuple[object, ast.expr]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword):
            named_values.append((node.arg, node.value))
        elif isinstance(node, ast.Dict):
            named_values += [
                (key.value, value)
                for key, value in zip(node.keys, node.values, strict=True)
                if isinstance(key, ast.Constant)
            ]
    return frozenset(
        value.body for name, value in named_values if "stride" in str(name) and _is_0_if_none(value)
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
