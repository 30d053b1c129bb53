"""Check that the text of a refusal agrees with the edge at which it occurs.

An edge consists of an accepted and a refused problem that differ in a single field. A compatibility
rule reports what it got and what it needs. A need is parsed if it is a bound, a multiple, a range
or a list. The refused value must not satisfy the need, and the accepted value must satisfy it. If
the comparison in a rule is off by one, its text contradicts the edge.
"""

import re
from collections.abc import Callable

_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def find_contradiction(got: str, need: str, values: tuple[int, int] | None, field: str) -> str:
    """Describe how the text of a refusal contradicts the edge.

    Returns "" if there is no contradiction, or if the text cannot be parsed.

    got, need: the text of the refusal. `got` has values of the problem or the machine, and `need`
        has values of requirements.
    values: the (passing, failing) values of the edge's field if it is numeric.
    field: the name of the edge's field.
    """
    if got == need:
        return f"got and need are both {got}"
    satisfied = _is_satisfied(got, need)
    if satisfied:
        return f"refused although {got} satisfies {need}"
    if satisfied is None or values is None:
        return ""
    is_declared = "requires" in field
    text = need if is_declared else got
    passing, failing = (_format_number(value, text) for value in values)
    matches = [match for match in _NUMBER.finditer(text) if match.group() == failing]
    if not matches:
        return ""
    start, end = matches[-1 if field.endswith("[1]") else 0].span()
    changed_text = text[:start] + passing + text[end:]
    got, need = (got, changed_text) if is_declared else (changed_text, need)
    if _is_satisfied(got, need) is False:
        return f"accepted although {got} does not satisfy {need}"
    return ""


def _format_number(number: int, text: str) -> str:
    """Format a number like the numbers in `text`, such as 9.0 for 90 in a compute capability."""
    first_number = _NUMBER.search(text)
    is_dotted = first_number is not None and "." in first_number.group()
    return f"{number // 10}.{number % 10}" if is_dotted else str(number)


def _is_satisfied(got: str, need: str) -> bool | None:
    for pattern, is_met in _NEED_PATTERNS:
        match = re.match(pattern, need)
        number = _NUMBER.search(got.partition("=")[2] or got)
        if match and number:
            return is_met(float(number.group()), *map(float, match.groups()))
    allowed = [word.strip() for word in re.split(r", | or ", need.removeprefix("one of "))]
    if len(allowed) > 1 and not any(" " in word for word in allowed):
        return got.split()[0] in allowed
    return None


_NEED_PATTERNS: tuple[tuple[str, Callable[..., bool]], ...] = (
    (r"(?:<=|at most)(?: its)? (\d+(?:\.\d+)?)", lambda got, maximum: got <= maximum),
    (r"(?:>=|at least) (\d+(?:\.\d+)?)", lambda got, minimum: got >= minimum),
    (r"(\d+) to (\d+)$", lambda got, low, high: low <= got <= high),
    (
        r"a multiple of (?:the \S+ group |world_size )?(\d+)",
        lambda got, divisor: got % divisor == 0,
    ),
)
