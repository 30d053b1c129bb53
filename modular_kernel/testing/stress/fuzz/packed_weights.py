"""Fuzz target: importers of packed weights, with random GPTQ and AWQ matrices or junk.

The importers, `modular_kernel.checkpoints.from_gptq` and `from_awq`, convert one matrix to the
layout of this package.
"""

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from modular_kernel.spec.problem import Problem
from modular_kernel.testing.stress.fuzz.independent_reference import dequantize_matrix
from modular_kernel.testing.stress.fuzz.junk import JUNK, shorten
from modular_kernel.testing.stress.fuzz.outcome import (
    CORRECT,
    INVALID_ACCEPTED,
    WRONG_RESULT,
    FuzzOutcome,
    run_or_classify,
)
from modular_kernel.testing.stress.fuzz.target import (
    Target,
    biased_bool,
    import_object,
    seeds,
)


@dataclass(frozen=True)
class PackedCase:
    """A packed matrix of `groups * group` x `32 / bits * words` values of `bits` bits.

    Attributes:
        awq: whether it is packed like AWQ; otherwise, like GPTQ.
        bits: number of bits of a value.
        group: number of rows in a group.
        groups: number of groups.
        words: number of int32 words per row.
        seed: seed of the values.
        one_group: whether the group size -1 is passed if there is only one group.
        default_zeros: whether all zero points of AWQ are 8, so that they may be omitted.
        omit_zeros: whether zero points that may be omitted are omitted.
        junk: (name of an argument, value), or None.
    """

    awq: bool
    bits: int
    group: int
    groups: int
    words: int
    seed: int
    one_group: bool
    default_zeros: bool
    omit_zeros: bool
    junk: tuple[str, Any] | None


@st.composite
def _packed_cases(draw: st.DrawFn) -> PackedCase:
    awq = draw(biased_bool(percent_true=40))
    group = draw(st.sampled_from((32, 64)))
    name = draw(
        st.sampled_from(("qweight", "scales", "qzeros", "group", *(() if awq else ("bits",))))
    )
    is_valid = {"bits": (4, 8), "group": (-1, group)}.get(name, ())
    values = [v for v in JUNK if v is not None and not (isinstance(v, int) and v in is_valid)]
    return PackedCase(
        awq=awq,
        bits=4 if awq else draw(st.sampled_from((4, 8))),
        group=group,
        groups=draw(st.sampled_from((1, 1, 2, 3))),
        words=draw(st.sampled_from((2, 4, 8))),
        seed=draw(seeds),
        one_group=draw(st.booleans()),
        default_zeros=draw(biased_bool(percent_true=30)),
        omit_zeros=draw(st.booleans()),
        junk=(name, draw(st.sampled_from(values))) if draw(biased_bool(percent_true=60)) else None,
    )


def check_importer(case: PackedCase) -> FuzzOutcome:
    """Import a random GPTQ or AWQ matrix. Values must be correct, and junk must be refused."""
    codes, zeros, arguments = _pack(case)
    depth, rows = codes.shape
    name = "from_awq" if case.awq else "from_gptq"
    description = f"{name} of {depth} x {rows}, {case.bits} bits, groups of {arguments['group']}"
    scales = arguments["scales"]
    if case.junk:
        junk_name, value = case.junk
        arguments[junk_name] = value
        description += f" with {junk_name}={shorten(value)}"
    result = run_or_classify(
        description, lambda: import_object(f"modular_kernel.checkpoints:{name}")(**arguments)
    )
    if isinstance(result, FuzzOutcome):
        return result if case.junk else FuzzOutcome(WRONG_RESULT, f"{description}: refused")
    if case.junk:
        return FuzzOutcome(INVALID_ACCEPTED, description)
    has_zeros = result.zero_point is not None
    quant = (
        f"int{case.bits}_w{case.bits}a16_group:group={case.group}"
        f",zero_points={str(has_zeros).lower()}"
    )
    problem = Problem(1, depth, rows, 1, 1, dtype=torch.float32, quant=quant)
    zero = result.zero_point[None] if has_zeros else None
    values = dequantize_matrix(result.w[None], result.scale[None], zero, problem)[0]
    expected = (codes - zeros.repeat_interleave(case.group, 0)) * scales.repeat_interleave(
        case.group, 0
    )
    is_close = torch.allclose(values.T, expected.double(), rtol=1e-6)
    return FuzzOutcome(CORRECT, description) if is_close else FuzzOutcome(WRONG_RESULT, description)


def _pack(case: PackedCase) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Draw codes and zero points, and pack them; return both and the importer's arguments."""
    generator, bits = torch.Generator().manual_seed(case.seed), case.bits
    depth, rows = case.group * case.groups, 32 // bits * case.words
    codes = torch.randint(0, 2**bits, (depth, rows), generator=generator)
    zeros = torch.randint(1, 2**bits, (case.groups, rows), generator=generator)
    if case.awq and case.default_zeros:
        zeros = torch.full_like(zeros, 8)
    arguments: dict[str, Any] = {
        "scales": torch.rand(case.groups, rows, generator=generator) + 0.1,
        "group": -1 if case.groups == 1 and case.one_group else case.group,
    }
    if case.awq:
        arguments |= {"qweight": _pack_awq(codes), "qzeros": _pack_awq(zeros)}
        if case.default_zeros and case.omit_zeros:
            arguments["qzeros"] = None
    else:
        arguments |= {
            "qweight": _pack_words(codes, 0, bits),
            "qzeros": _pack_words(zeros - 1, 1, bits),
            "bits": bits,
        }
    return codes, zeros, arguments


def _pack_awq(values: torch.Tensor) -> torch.Tensor:
    """Pack int32 words along the columns like AWQ, with the even columns in the low half."""
    eights = values.reshape(len(values), -1, 8)
    reordered = torch.cat([eights[..., 0::2], eights[..., 1::2]], dim=-1)
    return _pack_words(reordered.reshape(len(values), -1), 1, 4)


def _pack_words(values: torch.Tensor, dim: int, bits: int) -> torch.Tensor:
    """Pack 32 / bits values into each int32 word along `dim`, the first one in the lowest bits."""
    values_per_word = 32 // bits
    packed_last = values.movedim(dim, -1)
    groups = packed_last.reshape(*packed_last.shape[:-1], -1, values_per_word).long()
    words = (groups << (torch.arange(values_per_word) * bits)).sum(-1)
    words = torch.where(words >= 2**31, words - 2**32, words)
    return words.to(torch.int32).movedim(-1, dim)


TARGETS: tuple[Target[Any], ...] = (Target("importers", 4, _packed_cases(), check_importer),)
