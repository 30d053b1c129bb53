"""Mutation operators: realistic mistakes in one expression or statement.

A mutation operator is a kind of change, such as replacing `<` by `<=`. Each operator is a function
that yields the possible edits of a syntax node. OPERATORS lists them by node type, and `sites`
applies them to a module. They handle idioms of Triton and torch (masks, `tl.where`, dtypes), but
are not specific to any module.
"""

import ast
from collections.abc import Callable, Iterator
from itertools import pairwise

from modular_kernel.testing.mutation.source import Edit, Positioned, Source

Edits = Iterator[Edit]
Operator = Callable[[Source, ast.AST], Edits]

_COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
}
_ARITHMETIC: dict[type[ast.operator], tuple[str, str | None]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", None),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", None),
    ast.Mod: ("%", "//"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", None),
    ast.BitOr: ("|", None),
    ast.BitXor: ("^", None),
}
_PRECISIONS = {"float32": "float16", "int64": "int32", "ieee": "tf32", "tf32": "ieee"}
_TORCH_PRECISIONS = {**_PRECISIONS, "float32": "bfloat16"}
_SWAPPED_NAMES = {"hidden": "intermediate", "intermediate": "hidden", "w1": "w2", "w2": "w1"}
_CLAMPS = {"minimum": "maximum", "maximum": "minimum", "min": "max", "max": "min"}
# The operator of edits that compute offsets in 32 bits, which overflow from 2^31 elements on.
INT64_LOST = "64 bits lost"
# Launch options that affect speed, not results.
PERFORMANCE_OPTIONS = frozenset(
    {"num_warps", "num_stages", "num_ctas", "maxnreg", "eviction_policy"}
)


def mutate_comparison(source: Source, node: ast.AST) -> Edits:
    """Yield edits that make a comparison off by one, or negate it.

    Comparisons of times are not made off by one: readings of a clock are never equal to a limit.
    """
    assert isinstance(node, ast.Compare)
    left, has_time = node.left, any(map(_is_time, ast.walk(node)))
    for operator, right in zip(node.ops, node.comparators, strict=True):
        symbol, replacement = _COMPARISONS[type(operator)]
        offset = _find_between(source, left, right, symbol)
        is_off_by_one = isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE)
        if offset is not None and not (is_off_by_one and has_time):
            yield Edit("compare", offset, offset + len(symbol), replacement)
        left = right


def mutate_binary_operation(source: Source, node: ast.AST) -> Edits:
    """Yield edits that change the operator, drop an operand, or make a division round up."""
    assert isinstance(node, ast.BinOp)
    if type(node.op) not in _ARITHMETIC or _is_string(node.left) or _is_string(node.right):
        return
    if isinstance(node.op, ast.Add | ast.Sub) and _is_zero(source, node.right):
        return
    symbol, replacement = _ARITHMETIC[type(node.op)]
    offset = _find_between(source, node.left, node.right, symbol)
    if offset is None:
        return
    start, end = source.start(node), source.end(node)
    left = source.text(start, offset).rstrip()
    right = source.text(offset + len(symbol), end).lstrip()
    if replacement is not None:
        yield Edit("arithmetic", offset, offset + len(symbol), replacement)
    if not isinstance(node.op, ast.Sub | ast.LShift | ast.RShift):
        yield Edit("operand lost", start, end, left)
    if isinstance(node.op, ast.BitAnd | ast.BitOr):
        yield Edit("operand lost", start, end, right)
    if isinstance(node.op, ast.FloorDiv) and _is_exact(source, node):
        return
    if isinstance(node.op, ast.FloorDiv) and not source.is_in_kernel(node):
        yield Edit("tail", start, end, f"-(-({left}) // ({right}))")
    elif isinstance(node.op, ast.FloorDiv) and not (
        _is_compile_time(node.left) and _is_compile_time(node.right)
    ):
        # Kernels round quotients toward 0, so -(-a // b) would equal a // b there.
        yield Edit("tail", start, end, f"({left} + ({right}) - 1) // ({right})")


def mutate_boolean_operation(source: Source, node: ast.AST) -> Edits:
    """Yield edits that drop one of the conditions."""
    assert isinstance(node, ast.BoolOp)
    joiner = " and " if isinstance(node.op, ast.And) else " or "
    for dropped in range(len(node.values)):
        remaining = [
            f"({source.text_of(value)})" for i, value in enumerate(node.values) if i != dropped
        ]
        yield source.replace_node("condition lost", node, joiner.join(remaining))


def mutate_unary_operation(source: Source, node: ast.AST) -> Edits:
    """Yield edits that drop a sign or negation. A negative number -n also becomes 0 and -n - 1."""
    assert isinstance(node, ast.UnaryOp)
    operand = source.text_of(node.operand)
    if isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        yield source.replace_node("constant", node, "0")
        yield source.replace_node("constant", node, f"(-{operand} - 1)")
    else:
        yield source.replace_node("sign", node, f"({operand})")


def mutate_constant(source: Source, node: ast.AST) -> Edits:
    """Yield edits that change a number, negate a flag, or lower a precision."""
    assert isinstance(node, ast.Constant)
    value = node.value
    if isinstance(value, bool):
        yield source.replace_node("constant", node, str(not value))
    elif isinstance(value, int):
        yield source.replace_node("constant", node, str(value + 1))
        if value > 1:
            yield source.replace_node("constant", node, str(value - 1))
    elif isinstance(value, float):
        yield source.replace_node("constant", node, repr(value * 1.25 if value else 1.0))
    elif isinstance(value, str) and value in _PRECISIONS:
        yield source.replace_node("precision", node, repr(_PRECISIONS[value]))


def mutate_duration(source: Source, node: ast.expr) -> Edits:
    """Yield 0 seconds, and 1000 times the duration. Smaller changes have no visible effect."""
    assert isinstance(node, ast.Constant) and isinstance(node.value, float)  # noqa: PT018
    yield source.replace_node("constant", node, "0.0")
    yield source.replace_node("constant", node, repr(node.value * 1000.0))


def mutate_name(source: Source, node: ast.AST) -> Edits:
    """Yield edits that use a similar operand (w2 for w1), or a dtype with fewer bits."""
    if isinstance(node, ast.Attribute):
        identifier, start = node.attr, source.end(node) - len(node.attr.encode())
    else:
        assert isinstance(node, ast.Name)
        identifier, start = node.id, source.start(node)
    end = start + len(identifier.encode())
    prefix, _, suffix = identifier.partition("_")
    if prefix in _SWAPPED_NAMES and identifier != "hidden_states":
        new = _SWAPPED_NAMES[prefix] + (f"_{suffix}" if suffix else "")
        yield Edit("swapped operand", start, end, new)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        replacements = {"tl": _PRECISIONS, "torch": _TORCH_PRECISIONS}.get(node.value.id, {})
        if identifier in replacements:
            operator = INT64_LOST if identifier == "int64" else "dtype"
            yield Edit(operator, start, end, replacements[identifier])


def mutate_call(source: Source, node: ast.AST) -> Edits:
    """Yield edits that drop or change a clamp, selection, cast, mask, range or argument."""
    assert isinstance(node, ast.Call)
    callee = _get_callee_name(node)
    yield from _mutate_clamp(source, node, callee)
    yield from _mutate_cast(source, node, callee)
    yield from _mutate_keywords(source, node, callee)
    yield from _mutate_range(source, node, callee)
    if callee == "where" and len(node.args) == 3:
        yield source.replace_node("selection", node, f"({source.text_of(node.args[1])})")
        yield source.replace_node("selection", node, f"({source.text_of(node.args[2])})")
    names = [a for a in node.args if isinstance(a, ast.Name | ast.Attribute)]
    if len(names) == len(node.args) and len(names) >= 2 and callee not in _CLAMPS:
        yield from _swap_operands(source, node.args[0], node.args[1])


def _mutate_clamp(source: Source, node: ast.Call, callee: str) -> Edits:
    if callee in _CLAMPS and len(node.args) == 2:
        yield source.replace_node("clamp", node, f"({source.text_of(node.args[0])})")
        yield source.replace_node("clamp", node, f"({source.text_of(node.args[1])})")
    elif callee in ("clamp", "clamp_") and isinstance(node.func, ast.Attribute):
        value = node.args[0] if _is_module(node.func.value) else node.func.value
        yield source.replace_node("clamp", node, _format_operand(source, value))


def _mutate_cast(source: Source, node: ast.Call, callee: str) -> Edits:
    if callee in ("to", "float", "long", "contiguous") and isinstance(node.func, ast.Attribute):
        target = source.text_of(node.args[0]) if node.args else ""
        if target.endswith(".dtype.element_ty"):
            return  # tl.store casts anyway
        operator = INT64_LOST if callee == "long" or target.endswith("int64") else "cast lost"
        yield source.replace_node(operator, node, _format_operand(source, node.func.value))


def _format_operand(source: Source, node: ast.expr) -> str:
    """Return the text of an expression, in parentheses if it is not a simple operand.

    The syntax node of `(a >> 1)` in `(a >> 1).to(b)` does not include the parentheses.
    """
    is_primary = isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript)
    return source.text_of(node) if is_primary else f"({source.text_of(node)})"


def _mutate_keywords(source: Source, node: ast.Call, callee: str) -> Edits:
    is_declaration = callee.endswith("Requirements")
    keywords = [keyword for keyword in node.keywords if keyword.arg is not None]
    for keyword in keywords:
        if keyword.arg == "mask" and not _is_none(keyword.value):
            yield source.replace_node("mask lost", keyword, "mask=None")
        if is_declaration:
            yield Edit(
                "weakened rule", source.start(keyword), _find_end_with_comma(source, keyword), ""
            )
    for first, second in pairwise(keywords):
        if (
            _get_stem(first) == _get_stem(second)
            and not _is_constant(first)
            and not _is_constant(second)
        ):
            yield from _swap_operands(source, first.value, second.value)


def _mutate_range(source: Source, node: ast.Call, callee: str) -> Edits:
    if callee not in ("range", "static_range") or len(node.args) > 2:
        return
    range_name = source.text_of(node.func)
    first = source.text_of(node.args[0]) if len(node.args) == 2 else "0"
    last = source.text_of(node.args[-1])
    yield source.replace_node("loop", node, f"{range_name}({first}, ({last}) - 1)")
    yield source.replace_node("loop", node, f"{range_name}(({first}) + 1, {last})")
    yield source.replace_node("order", node, f"{range_name}(({last}) - 1, ({first}) - 1, -1)")


def mutate_ternary(source: Source, node: ast.AST) -> Edits:
    """Yield the edit that negates the condition of a conditional expression."""
    assert isinstance(node, ast.IfExp)
    yield source.replace_node("branch", node.test, f"not ({source.text_of(node.test)})")


def mutate_branch(source: Source, node: ast.AST) -> Edits:
    """Yield the edit that negates the condition of an `if` or `while` statement."""
    assert isinstance(node, ast.If | ast.While)
    yield source.replace_node("branch", node.test, f"not ({source.text_of(node.test)})")


def mutate_slice(source: Source, node: ast.AST) -> Edits:
    """Yield edits that drop the first or the last element of a slice."""
    assert isinstance(node, ast.Slice)
    for bound, sign in ((node.lower, "+"), (node.upper, "-")):
        if bound is not None and not isinstance(bound, ast.Constant):
            yield source.replace_node("slice", bound, f"({source.text_of(bound)}) {sign} 1")


def mutate_statement(source: Source, node: ast.AST) -> Edits:
    """Yield the edit that removes a step: a store, barrier, accumulator update or yield."""
    assert isinstance(node, ast.Expr | ast.AugAssign)
    if isinstance(node, ast.AugAssign) or isinstance(
        node.value, ast.Call | ast.Yield | ast.YieldFrom
    ):
        yield source.replace_node("step lost", node, "pass")


OPERATORS: dict[type[ast.AST], Operator] = {
    ast.Compare: mutate_comparison,
    ast.BinOp: mutate_binary_operation,
    ast.BoolOp: mutate_boolean_operation,
    ast.UnaryOp: mutate_unary_operation,
    ast.Constant: mutate_constant,
    ast.Name: mutate_name,
    ast.Attribute: mutate_name,
    ast.Call: mutate_call,
    ast.IfExp: mutate_ternary,
    ast.If: mutate_branch,
    ast.While: mutate_branch,
    ast.Slice: mutate_slice,
    ast.Expr: mutate_statement,
    ast.AugAssign: mutate_statement,
}


def _find_between(source: Source, left: Positioned, right: Positioned, symbol: str) -> int | None:
    """Return the offset of `symbol` between two nodes, or None."""
    start, end = source.end(left), source.start(right)
    position = source.data.find(symbol.encode(), start, end)
    return position if position >= 0 else None


def _swap_operands(source: Source, first: Positioned, second: Positioned) -> Edits:
    first_text, second_text = source.text_of(first), source.text_of(second)
    if first_text != second_text:
        separator = source.text(source.end(first), source.start(second))
        start, end = source.start(first), source.end(second)
        yield Edit("swapped operand", start, end, f"{second_text}{separator}{first_text}")


def _find_end_with_comma(source: Source, keyword: ast.keyword) -> int:
    """Return the offset after a keyword argument and the comma that follows it, if any."""
    end = source.end(keyword)
    remainder = source.data[end:].lstrip()
    return (
        end + (len(source.data) - end - len(remainder)) + 1 if remainder.startswith(b",") else end
    )


def _get_callee_name(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _get_stem(keyword: ast.keyword) -> str:
    """Return a keyword up to its first underscore. Keywords with the same stem are similar."""
    return (keyword.arg or "").split("_", maxsplit=1)[0]


def _is_exact(source: Source, node: ast.BinOp) -> bool:
    """Return whether a power of two is divided by the size of a dtype, without a remainder."""
    is_power = isinstance(node.left, ast.Name) and node.left.id in source.powers_of_two
    return is_power and source.text_of(node.right).endswith((".itemsize", ".element_size()"))


def _is_zero(source: Source, node: ast.expr) -> bool:
    """Return whether an operand is a constant of the module with the value 0."""
    return isinstance(node, ast.Name) and node.id in source.zeros


def _is_string(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _is_constant(keyword: ast.keyword) -> bool:
    return isinstance(keyword.value, ast.Constant)


def _is_compile_time(node: ast.expr) -> bool:
    """Return whether the value is a compile-time constant of a kernel, such as a block size.

    Divisions of two such values have no remainder.
    """
    return isinstance(node, ast.Constant) or (isinstance(node, ast.Name) and node.id.isupper())


def _is_time(node: ast.AST) -> bool:
    """Return whether a node reads a clock, or a number of seconds, whose name ends in "_s"."""
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name == "monotonic" or str(name).lower().endswith("_s")


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_module(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("tl", "torch", "np")
