"""A fixture with ranks that all tests of a module share."""

from collections.abc import Iterator
from typing import Any

import pytest

from modular_kernel.testing.ranks.pool import RankPool


def make_ranks_fixture(world_size: int, grace: float = 15) -> Any:
    """Return a module-scoped fixture with a pool of `world_size` ranks."""

    @pytest.fixture(scope="module")
    def ranks() -> Iterator[RankPool]:
        with RankPool(world_size, grace=grace) as pool:
            yield pool

    return ranks
