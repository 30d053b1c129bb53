"""A tolerance that sees one rounding: a part beside a twin that rounds where the part says.

Both multiply exactly the same numbers and differ by the order of float32 sums. Now and then that
moves a value across the middle between two numbers of 16 bits, so some values differ: how many is
measured on the twin itself, its sums moved at random. A rounding that is not declared, of router
weights, of partial sums, of weights, changes a quarter of all values and more.
"""

from collections.abc import Iterator

import torch

from modular_kernel import reference
from modular_kernel.spec.rounding import Roundings
from modular_kernel.testing.cases.hostile import apart
from modular_kernel.testing.verify.sample import Sample
from modular_kernel.testing.verify.trial import Trial

# The share of a typical row's values that may differ whatever the twin's own sums lead to. Over all
# 16-bit cases of the built-in parts it was 0 (triton 3.6 interpreted, torch 2.13, CPU).
TYPICAL_SHARE = 0.03
FACTOR = 3.0  # over what the twin's own sums lead to
# A value of h that was moved changes up to so many of its row's values; one that is the largest of
# its row moves the scale of eight bits, and with it nearly all. Such rows are few.
ROW_SHARE = 0.125
ODD_ROWS = 8  # one in so many, and one more
_JITTERS = 3


def one_rounding(trial: Trial) -> Iterator[str]:
    """Check that the part rounds where it says, and nowhere else."""
    if not _has_twin(trial):
        return
    shares, own, said = [], [], list[Roundings]()
    for sample, output in ((trial.first, trial.eager), (trial.second, trial.planned_second)):
        ways = declared(trial, sample)
        if ways is None:
            return
        said += [each for way in ways for each in way]
        found = [twins_of(sample, way, _JITTERS) for way in ways]  # the first of each is not moved
        live = live_rows(sample, found[0][0])
        apart_R = torch.stack([differing(output, twins[0]) for twins in found]).amin(0)
        shares.append(apart_R[live])
        own += [differing(moved, twin)[live] for twin, *others in found for moved in others]
    yield from judged(torch.cat(shares), torch.cat(own), said)


def _has_twin(trial: Trial) -> bool:
    """Whether a call of this problem, here, can be told from its twin by roundings alone."""
    problem, scheme = trial.case.problem, trial.case.problem.scheme
    if problem.adapters is not None and trial.case.manner.named == "without":
        return False  # such a call has the bits, and the roundings, of a layer without adapters
    if problem.dtype.itemsize != 2:
        return False  # float32 is compared as closely by the tolerance
    if problem.parallel.world_size > 1:
        # Each rank rounds its own part of a token's sum before they are added: with one expert a
        # token there is one part. One scale of all values of h is one of each rank's, unless one
        # rank has all of them.
        one_part = problem.top_k == 1 and problem.chunk_tokens is None
        one_scale = scheme.activation_granularity == "tensor" and not scheme.static
        if not one_part or (one_scale and trial.case.routing != "all_to_one"):
            return False
    if problem.chunk_tokens and scheme.activation_granularity == "tensor" and not scheme.static:
        return False  # x has one scale for the call, h one for each chunk
    # On a GPU tensor cores add products of fp8 with fewer bits than float32 has.
    return scheme.activation != "float8_e4m3fn" or trial.machine.device != "cuda"


def judged(shares: torch.Tensor, own: torch.Tensor, roundings: list[Roundings]) -> Iterator[str]:
    """shares: of each row, of values that are not the twin's. own: those of the twin, moved."""
    if not shares.numel():
        return
    what = " or ".join(map(str, dict.fromkeys(roundings)))
    share, most = float(shares.median()), max(TYPICAL_SHARE, FACTOR * float(own.median()))
    if share > most:
        yield (
            f"{share:.0%} of the values of a typical row are not those of {what}, "
            f"at most {most:.0%} may differ by the order of sums"
        )
    odd, most_odd = int((shares > ROW_SHARE).sum()), 1 + len(shares) // ODD_ROWS
    most_odd += int(FACTOR * float((own > ROW_SHARE).double().mean()) * len(shares))
    if odd > most_odd:
        yield f"{odd} of {len(shares)} rows are not those of {what}, at most {most_odd} may differ"


def declared(trial: Trial, sample: Sample) -> list[list[Roundings]] | None:
    """Return the ways in which the call of `sample` may round, each chunk of it, as the part says.

    In one process there is one way. Over ranks a row rounds as that rank does which computes it,
    and that goes by the rows that came there: any number up to those of all ranks.
    """
    experts, i = trial.kernel.experts, sample.pristine
    if i is sample.whole_pristine:
        found = [experts.roundings(i.x_TH[some], i.weights) for some in _chunks(sample)]
        return None if None in found else [[each for each in found if each is not None]]
    most = len(sample.whole_pristine.x_TH)
    rows_RH = i.x_TH.new_empty(most, sample.problem.hidden)
    ways = {experts.roundings(rows_RH[:count], i.weights): None for count in range(most + 1)}
    return None if None in ways else [[each] for each in ways if each is not None]


def twin_of(sample: Sample, roundings: list[Roundings]) -> torch.Tensor:
    """Return what the call of `sample` has to return, but for the order of sums."""
    (twin,) = twins_of(sample, roundings, 0)
    return twin


def twins_of(sample: Sample, roundings: list[Roundings], moved: int) -> list[torch.Tensor]:
    """Return the same and, behind it, so many whose sums are moved at random."""
    i = sample.whole_pristine  # that of all ranks is on the CPU
    jitters = [None, *(torch.Generator().manual_seed(seed) for seed in range(moved))]
    parts = [torch.stack([sample.empty_output()[:0].to(i.x_TH.device)] * len(jitters))]
    chunks = _chunks(sample) if i is sample.pristine else [slice(None)]
    for some, each in zip(chunks, roundings, strict=True):
        parts.append(
            reference.twins(
                i.x_TH[some],
                i.weights,
                i.routing.of(some),
                sample.whole_problem,
                each,
                input_weighted=sample.input_weighted,
                jitters=jitters,
            )
        )
    return list(torch.cat(parts, 1)[:, sample.mine].to(sample.device))


def _chunks(sample: Sample) -> list[slice]:
    tokens = len(sample.pristine.x_TH)
    step = sample.problem.chunk_tokens or max(1, tokens)
    return [slice(start, start + step) for start in range(0, tokens, step)]


def differing(output: torch.Tensor, twin: torch.Tensor) -> torch.Tensor:
    """(T,) or (T, K): the share of values of each row that are not the same."""
    return 1 - (output == twin).double().mean(-1)


def live_rows(sample: Sample, twin: torch.Tensor) -> torch.Tensor:
    """Rows of ordinary tokens that are not zero."""
    ordinary = (apart(sample.manner.values, len(twin)) == 0).to(twin.device)
    live = (twin != 0).any(-1) & twin.isfinite().all(-1)
    return live & (ordinary if live.dim() == 1 else ordinary[:, None])
