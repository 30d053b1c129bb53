"""Mutation operators: realistic mistakes in one expression or statement.

Each is a function from a syntax node to possible edits, listed in OPERATORS by node type. They use
the vocabulary of Triton and torch (masks, `tl.where`, dtypes), but are not specific to any part.
"""

import ast
from collections.abc import Callable, Iterator
from itertools import pairwise

from modular_kernel.testing.mutation.source import Edit, Placed, Source

Edits = Iterator[Edit]
Operator = Callable[[Source, ast.AST], Edits]

_COMPARED = {
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
_SYMBOLS: dict[type[ast.operator], tuple[str, str | None]] = {
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
_WORDS = {"float32": "float16", "int64": "int32", "ieee": "tf32", "tf32": "ieee"}
_TORCH_WORDS = {**_WORDS, "float32": "bfloat16"}
_PEERS = {"hidden": "intermediate", "intermediate": "hidden", "w1": "w2", "w2": "w1"}
_CLAMPS = {"minimum": "maximum", "maximum": "minimum", "min": "max", "max": "min"}
# 32-bit addresses, wrong from 2^31 elements on.
WIDE = "64 bits lost"
# Launch options that affect speed, not results.
SPEED = frozenset({"num_warps", "num_stages", "num_ctas", "maxnreg", "eviction_policy"})


def compare(source: Source, node: ast.AST) -> Edits:
    """Yield a comparison off by one or negated."""
    assert isinstance(node, ast.Compare)
    left = node.left
    for operator, right in zip(node.ops, node.comparators, strict=True):
        old, new = _COMPARED[type(operator)]
        at = _between(source, left, right, old)
        if at is not None:
            yield Edit("compare", at, at + len(old), new)
        left = right


def binary(source: Source, node: ast.AST) -> Edits:
    """Yield another sign, a lost operand (offset, stride, scale, half a mask), another rounding."""
    assert isinstance(node, ast.BinOp)
    if type(node.op) not in _SYMBOLS or _is_text(node.left) or _is_text(node.right):
        return
    symbol, other = _SYMBOLS[type(node.op)]
    at = _between(source, node.left, node.right, symbol)
    if at is None:
        return
    start, end = source.start(node), source.end(node)
    left = source.text(start, at).rstrip()
    right = source.text(at + len(symbol), end).lstrip()
    if other is not None:
        yield Edit("arithmetic", at, at + len(symbol), other)
    if not isinstance(node.op, ast.Sub | ast.LShift | ast.RShift):
        yield Edit("operand lost", start, end, left)
    if isinstance(node.op, ast.BitAnd | ast.BitOr):
        yield Edit("operand lost", start, end, right)
    if isinstance(node.op, ast.FloorDiv) and not source.in_kernel(node):
        yield Edit("tail", start, end, f"-(-({left}) // ({right}))")
    elif isinstance(node.op, ast.FloorDiv) and not (
        _is_compile_time(node.left) and _is_compile_time(node.right)
    ):
        # Kernels divide towards 0, where the negative of -a // b is a // b.
        yield Edit("tail", start, end, f"({left} + ({right}) - 1) // ({right})")


def boolean(source: Source, node: ast.AST) -> Edits:
    """Yield the loss of each one of several conditions."""
    assert isinstance(node, ast.BoolOp)
    word = " and " if isinstance(node.op, ast.And) else " or "
    for lost in range(len(node.values)):
        remaining = [f"({source.of(value)})" for i, value in enumerate(node.values) if i != lost]
        yield source.replaced("condition lost", node, word.join(remaining))


def unary(source: Source, node: ast.AST) -> Edits:
    """Yield a lost sign or negation; 0 or -2 in place of -1, the id of a skipped pair."""
    assert isinstance(node, ast.UnaryOp)
    operand = source.of(node.operand)
    if isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        yield source.replaced("constant", node, "0")
        yield source.replaced("constant", node, f"(-{operand} - 1)")
    else:
        yield source.replaced("sign", node, f"({operand})")


def constant(source: Source, node: ast.AST) -> Edits:
    """Yield a number off by one or by a factor, an inverted flag, another precision."""
    assert isinstance(node, ast.Constant)
    value = node.value
    if isinstance(value, bool):
        yield source.replaced("constant", node, str(not value))
    elif isinstance(value, int):
        yield source.replaced("constant", node, str(value + 1))
        if value > 1:
            yield source.replaced("constant", node, str(value - 1))
    elif isinstance(value, float):
        yield source.replaced("constant", node, repr(value * 1.25 if value else 1.0))
    elif isinstance(value, str) and value in _WORDS:
        yield source.replaced("precision", node, repr(_WORDS[value]))


def duration(source: Source, node: ast.expr) -> Edits:
    """Yield 0 seconds, or seconds read as milliseconds; no run detects smaller changes."""
    assert isinstance(node, ast.Constant) and isinstance(node.value, float)  # noqa: PT018
    yield source.replaced("constant", node, "0.0")
    yield source.replaced("constant", node, repr(node.value * 1000.0))


def name(source: Source, node: ast.AST) -> Edits:
    """Yield a similar operand (w2 for w1, I for H), or an accumulator or offset of fewer bits."""
    if isinstance(node, ast.Attribute):
        word, place = node.attr, source.end(node) - len(node.attr.encode())
    else:
        assert isinstance(node, ast.Name)
        word, place = node.id, source.start(node)
    end = place + len(word.encode())
    head, _, tail = word.partition("_")
    if head in _PEERS and word != "hidden_states":
        new = _PEERS[head] + (f"_{tail}" if tail else "")
        yield Edit("swapped operand", place, end, new)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        words = {"tl": _WORDS, "torch": _TORCH_WORDS}.get(node.value.id, {})
        if word in words:
            operator = WIDE if word == "int64" else "dtype"
            yield Edit(operator, place, end, words[word])


def call(source: Source, node: ast.AST) -> Edits:
    """Yield changes of clamps, selections, casts, masks, ranges and arguments of a call."""
    assert isinstance(node, ast.Call)
    called = _called(node)
    yield from _clamp(source, node, called)
    yield from _cast(source, node, called)
    yield from _keywords(source, node, called)
    yield from _range(source, node, called)
    if called == "where" and len(node.args) == 3:
        yield source.replaced("selection", node, f"({source.of(node.args[1])})")
        yield source.replaced("selection", node, f"({source.of(node.args[2])})")
    names = [a for a in node.args if isinstance(a, ast.Name | ast.Attribute)]
    if len(names) == len(node.args) and len(names) >= 2 and called not in _CLAMPS:
        yield from _exchange(source, node.args[0], node.args[1])


def _clamp(source: Source, node: ast.Call, called: str) -> Edits:
    if called in _CLAMPS and len(node.args) == 2:
        yield source.replaced("clamp", node, f"({source.of(node.args[0])})")
        yield source.replaced("clamp", node, f"({source.of(node.args[1])})")
    elif called in ("clamp", "clamp_") and isinstance(node.func, ast.Attribute):
        kept = node.args[0] if _is_module(node.func.value) else node.func.value
        yield source.replaced("clamp", node, _operand(source, kept))


def _cast(source: Source, node: ast.Call, called: str) -> Edits:
    if called in ("to", "float", "long", "contiguous") and isinstance(node.func, ast.Attribute):
        to = source.of(node.args[0]) if node.args else ""
        if to.endswith(".dtype.element_ty"):
            return  # tl.store casts anyway
        operator = WIDE if called == "long" or to.endswith("int64") else "cast lost"
        yield source.replaced(operator, node, _operand(source, node.func.value))


def _operand(source: Source, node: ast.expr) -> str:
    """Return a method's object as text that is valid anywhere.

    The syntax node of `(a >> 1)` in `(a >> 1).to(b)` does not include its parentheses.
    """
    whole = isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript)
    return source.of(node) if whole else f"({source.of(node)})"


def _keywords(source: Source, node: ast.Call, called: str) -> Edits:
    rule = called.endswith("Requirements")
    keywords = [keyword for keyword in node.keywords if keyword.arg is not None]
    for keyword in keywords:
        if keyword.arg == "mask" and not _is_none(keyword.value):
            yield source.replaced("mask lost", keyword, "mask=None")
        if rule:
            yield Edit("weakened rule", source.start(keyword), _past_comma(source, keyword), "")
    for one, two in pairwise(keywords):
        if _stem(one) == _stem(two) and not _is_constant(one) and not _is_constant(two):
            yield from _exchange(source, one.value, two.value)


def _range(source: Source, node: ast.Call, called: str) -> Edits:
    if called not in ("range", "static_range") or len(node.args) > 2:
        return
    head = source.of(node.func)
    first = source.of(node.args[0]) if len(node.args) == 2 else "0"
    last = source.of(node.args[-1])
    yield source.replaced("loop", node, f"{head}({first}, ({last}) - 1)")
    yield source.replaced("loop", node, f"{head}(({first}) + 1, {last})")
    yield source.replaced("order", node, f"{head}(({last}) - 1, ({first}) - 1, -1)")


def ternary(source: Source, node: ast.AST) -> Edits:
    """Yield the other branch."""
    assert isinstance(node, ast.IfExp)
    yield source.replaced("branch", node.test, f"not ({source.of(node.test)})")


def branch(source: Source, node: ast.AST) -> Edits:
    """Yield the other branch of a statement."""
    assert isinstance(node, ast.If | ast.While)
    yield source.replaced("branch", node.test, f"not ({source.of(node.test)})")


def slice_(source: Source, node: ast.AST) -> Edits:
    """Yield a slice one row short at either end."""
    assert isinstance(node, ast.Slice)
    for bound, sign in ((node.lower, "+"), (node.upper, "-")):
        if bound is not None and not isinstance(bound, ast.Constant):
            yield source.replaced("slice", bound, f"({source.of(bound)}) {sign} 1")


def statement(source: Source, node: ast.AST) -> Edits:
    """Yield a lost step: a store, a barrier, an update of an accumulator or a pointer, a rule."""
    assert isinstance(node, ast.Expr | ast.AugAssign)
    if isinstance(node, ast.AugAssign) or isinstance(
        node.value, ast.Call | ast.Yield | ast.YieldFrom
    ):
        yield source.replaced("step lost", node, "pass")


OPERATORS: dict[type[ast.AST], Operator] = {
    ast.Compare: compare,
    ast.BinOp: binary,
    ast.BoolOp: boolean,
    ast.UnaryOp: unary,
    ast.Constant: constant,
    ast.Name: name,
    ast.Attribute: name,
    ast.Call: call,
    ast.IfExp: ternary,
    ast.If: branch,
    ast.While: branch,
    ast.Slice: slice_,
    ast.Expr: statement,
    ast.AugAssign: statement,
}


def _between(source: Source, left: Placed, right: Placed, symbol: str) -> int | None:
    """Return the position of `symbol` between two nodes, or None."""
    start, end = source.end(left), source.start(right)
    position = source.data.find(symbol.encode(), start, end)
    return position if position >= 0 else None


def _exchange(source: Source, one: Placed, two: Placed) -> Edits:
    a, b = source.of(one), source.of(two)
    if a != b:
        middle = source.text(source.end(one), source.start(two))
        start, end = source.start(one), source.end(two)
        yield Edit("swapped operand", start, end, f"{b}{middle}{a}")


def _past_comma(source: Source, keyword: ast.keyword) -> int:
    end = source.end(keyword)
    rest = source.data[end:].lstrip()
    return end + (len(source.data) - end - len(rest)) + 1 if rest.startswith(b",") else end


def _called(node: ast.Call) -> str:
    """Return the last component of the called name."""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _stem(keyword: ast.keyword) -> str:
    return (keyword.arg or "").split("_", maxsplit=1)[0]


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _is_constant(keyword: ast.keyword) -> bool:
    return isinstance(keyword.value, ast.Constant)


def _is_compile_time(node: ast.expr) -> bool:
    """Return whether a kernel is compiled for the value, as for a block size.

    Divisions of such values have no remainder.
    """
    return isinstance(node, ast.Constant) or (isinstance(node, ast.Name) and node.id.isupper())


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_module(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("tl", "torch", "np")
