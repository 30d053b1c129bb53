"""Configurations by the number of tokens of a call."""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from experts.triton.launch_config import MoEConfig
from experts.triton.path import ENDLESS


@dataclass(frozen=True)
class Steps:
    """Configurations by tokens: configs[i] serves calls of at most lasts[i] tokens, as far as none
    before it does. lasts ascends and ends with ENDLESS."""

    lasts: tuple[int, ...]
    configs: tuple[MoEConfig, ...]

    def index(self, tokens: int) -> int:
        return bisect_left(self.lasts, tokens)

    def choose(self, tokens: int) -> MoEConfig:
        return self.configs[self.index(tokens)]

    def most_tokens(self, tokens: int) -> dict[tuple[str, int], int]:
        """(path, block_m) -> the most tokens of a call that meets it, none above `tokens`."""
        most: dict[tuple[str, int], int] = {}
        for last in self.lasts:
            limit = min(tokens, last)
            config = self.choose(limit)
            kind = config.path, config.gemm1.block_m
            most[kind] = max(limit, most.get(kind, 0))
        return most

    def within(self, paths: Collection[str], other: "Steps") -> "Steps":
        """Return these steps, or those of `other` wherever the path is not one of `paths`."""
        return self.changed(
            other.lasts, lambda last, c: c if c.path in paths else other.choose(last)
        )

    def changed(
        self, ends: Iterable[int], change: Callable[[int, MoEConfig], MoEConfig]
    ) -> "Steps":
        """Return these steps, cut behind `ends` too, each configuration as `change` has it.

        change: is told the most tokens of a step, and is the same for all of its calls.
        """
        lasts = sorted({*self.lasts, *(end for end in ends if 0 <= end < ENDLESS)})
        found = [change(last, self.choose(last)) for last in lasts]
        kept = [i for i, one in enumerate(found[:-1]) if one != found[i + 1]] + [len(found) - 1]
        return Steps(tuple(lasts[i] for i in kept), tuple(found[i] for i in kept))
