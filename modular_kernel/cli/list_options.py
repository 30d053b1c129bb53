"""Parsers for options that take several values, separated by commas."""

from modular_kernel.errors import ConfigurationError

_MOST_TOKENS = 1 << 20


def token_numbers(text: str) -> tuple[int, ...]:
    """Parse `--tokens-list`, such as 1,16,128, and drop duplicates.

    Raises ConfigurationError for a number out of range.
    """
    words = text.split(",")
    if not all(w.isdecimal() and w.isascii() and 0 < int(w) < _MOST_TOKENS for w in words):
        need = f"numbers from 1 to {_MOST_TOKENS - 1}, such as 1,16,128"
        raise ConfigurationError("--tokens-list", got=repr(text[:80]), need=need)
    return tuple(dict.fromkeys(map(int, words)))


def schemes(text: str) -> list[str]:
    """Parse `--quant` into a list of schemes without duplicates.

    A scheme may itself contain commas, as in `name:option=value,option=value`.
    """
    from modular_kernel.spec.quantization import QuantScheme

    texts: list[str] = []
    for word in text.split(","):
        continues = "=" in word and ":" not in word and texts
        texts[-1:] = [f"{texts[-1]},{word}"] if continues else [*texts[-1:], word]
    return list(dict.fromkeys(str(QuantScheme.parse(spec)) for spec in texts))
