"""Whether a refusal's words agree with the edge they were given at.

A rule says what it got and what it needs. Where the need is a bound, a multiple, a range or a list,
it can be read: then what was refused must not satisfy it, and what passes one step away must. A
rule that compares one off contradicts its own words.
"""

import re
from collections.abc import Callable

_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def contradiction(got: str, need: str, values: tuple[int, int] | None, field: str) -> str:
    """Return what is wrong with a refusal `got` of `need`; "" if nothing is, or its words are no
    test.

    values: of the field that the edge is in, passing and failing, if it counts. What a declaration
    says is the need, what problem and machine say was got.
    """
    if got == need:
        return f"got and need are both {got}"
    satisfied = _satisfied(got, need)
    if satisfied:
        return f"refused, though {got} is {need}"
    if satisfied is None or values is None:
        return ""
    declared = "requires" in field
    words = need if declared else got
    passing, failing = (_shown(value, words) for value in values)
    at = [found for found in _NUMBER.finditer(words) if found.group() == failing]
    if not at:
        return ""
    start, end = at[-1 if field.endswith("[1]") else 0].span()
    changed = words[:start] + passing + words[end:]
    got, need = (got, changed) if declared else (changed, need)
    return f"accepted, though {got} is not {need}" if _satisfied(got, need) is False else ""


def _shown(number: int, words: str) -> str:
    """Return a number as these words have it: 90 is 9.0 where they name a compute capability."""
    first = _NUMBER.search(words)
    dotted = first is not None and "." in first.group()
    return f"{number // 10}.{number % 10}" if dotted else str(number)


def _satisfied(got: str, need: str) -> bool | None:
    """Whether what was got is what is needed; None where that cannot be read."""
    for pattern, holds in _NEEDS:
        found = re.match(pattern, need)
        number = _NUMBER.search(got.partition("=")[2] or got)
        if found and number:
            return holds(float(number.group()), *map(float, found.groups()))
    listed = [word.strip() for word in re.split(r", | or ", need.removeprefix("one of "))]
    if len(listed) > 1 and not any(" " in word for word in listed):
        return got.split()[0] in listed
    return None


_NEEDS: tuple[tuple[str, Callable[..., bool]], ...] = (
    (r"(?:<=|at most)(?: its)? (\d+(?:\.\d+)?)", lambda got, most: got <= most),
    (r"(?:>=|at least) (\d+(?:\.\d+)?)", lambda got, least: got >= least),
    (r"(\d+) to (\d+)$", lambda got, low, high: low <= got <= high),
    (r"a multiple of (?:the \S+ group |world_size )?(\d+)", lambda got, of: got % of == 0),
)
