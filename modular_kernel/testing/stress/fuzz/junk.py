"""Junk: values of many types, most of which are invalid for any given argument.

Fuzz targets pass them to functions, which must refuse them with an error of this package.
"""

from enum import Enum
from math import inf, nan
from typing import Any

import torch
from hypothesis import strategies as st

from modular_kernel.spec.problem import ActivationSpec, Combine, Parallel


class LookalikeCombine(Enum):
    """An enum whose member looks like Combine.SUM."""

    SUM = "sum"


JUNK: tuple[Any, ...] = (
    None, True, False, 0, 1, 2, -1, 3, 7, 2**31 - 1, 2**31, 2**63, 10**400, -(2**40), 0.0, -0.0,
    1.0, 2.5, nan, inf, -inf, 1e308, 1j, "", " ", "silu", "none", "sum", "false", "true", "linear",
    "ieee", "bf16", "fp8_w8a8_block:block=1x1", "fp8_w8a8_block:block=0x0",
    "int4_w4a16_group:group=3",
    "\x1b[31m", "x" * 5000, "é\u0000", b"none", [], [1], (), (1, 2), {}, {"a": 1}, set(), object(),
    int, Combine.SUM, LookalikeCombine.SUM, torch.float32, torch.int64, torch.bfloat16,
    torch.float64, torch.complex64, torch.strided, torch.tensor(3), torch.tensor([1, 2]),
    torch.device("cpu"), torch.ones(2, 2), torch.zeros(0, 8, dtype=torch.int32), lambda: 1,
    Parallel(), ActivationSpec(), range(3),
)  # fmt: skip

junk = st.sampled_from(JUNK)


def shorten(value: Any) -> str:
    """Format a value in at most about 40 characters."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an int of {value.bit_length()} bits"
    is_simple = isinstance(value, str | int | float | type(None))
    return repr(value)[:40] if is_simple else str(type(value))
