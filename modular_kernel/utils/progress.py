"""Logging of the progress of long loops, with at most one line every five seconds.

for expert in log_progress(experts, "model.layers.3.mlp.experts", "experts"):
    ...

INFO modular_kernel.loading: model.layers.3.mlp.experts: 40 of 128 experts in 5.1 s
"""

import logging
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

_LOG = logging.getLogger("modular_kernel.loading")
_INTERVAL_S = 5.0

T = TypeVar("T")


def log_progress(items: Sequence[T], what: str, unit: str) -> Iterator[T]:
    """Yield the items, and log the number of finished items every five seconds.

    what: name of the object that consists of the items.
    unit: name of the items, in the plural.
    """
    start = last_log = time.monotonic()
    for num_finished, item in enumerate(items):
        now = time.monotonic()
        if now - last_log >= _INTERVAL_S:
            _LOG.info(
                "%s: %d of %d %s in %.1f s", what, num_finished, len(items), unit, now - start
            )
            last_log = now
        yield item
