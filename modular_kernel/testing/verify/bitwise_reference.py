"""Detect a rounding to 16 or 8 bits that an experts component ("part") does not declare.

A part declares in `roundings()` which intermediate values it rounds. The bitwise reference
(`modular_kernel.reference.bitwise_references`) multiplies the same numbers as the part and rounds
exactly these values. The part may differ from it only in the order of float32 sums, which
occasionally moves a value across the midpoint between two 16-bit numbers. References whose sums are
perturbed at random show how many values this affects. An undeclared rounding (of router weights,
partial sums or weights) changes at least a quarter of all values.
"""

from collections.abc import Iterator

import torch

from modular_kernel import reference
from modular_kernel.spec.rounding import Roundings
from modular_kernel.testing.cases.value_kinds import assign_token_groups
from modular_kernel.testing.verify.sample import Sample
from modular_kernel.testing.verify.trial import Trial

# Minimum tolerance for the fraction of differing values in the median row. In all 16-bit cases of
# the built-in parts, no value of the median row differed (triton 3.6 interpreted, torch 2.13, CPU).
MIN_MEDIAN_TOLERANCE = 0.03
TOLERANCE_FACTOR = 3.0  # tolerance, relative to the fraction of the perturbed reference
# h is the activation between the two GEMMs. A single changed value of h affects at most this
# fraction of the outputs of its row, unless it is the largest value of the row: then the 8-bit
# scale changes, and with it nearly all outputs. Such rows are rare.
ROW_MISMATCH_LIMIT = 0.125
OUTLIER_ROW_INTERVAL = 8  # one row in eight, plus one, may exceed ROW_MISMATCH_LIMIT
_NUM_PERTURBED = 3  # perturbed references per call


def check_one_rounding(trial: Trial) -> Iterator[str]:
    """Check that the part rounds where it declares a rounding, and nowhere else."""
    if not _is_comparable(trial):
        return
    mismatches, perturbed_mismatches, roundings = [], [], list[Roundings]()
    for sample, output in ((trial.first, trial.eager_output), (trial.second, trial.planned_second)):
        variants = list_declared_roundings(trial, sample)
        if variants is None:
            return
        roundings += [rounding for variant in variants for rounding in variant]
        references = [
            compute_perturbed_references(sample, variant, _NUM_PERTURBED) for variant in variants
        ]
        # The first reference of each list is unperturbed.
        is_compared = find_comparable_rows(sample, references[0][0])
        mismatch_R = torch.stack(
            [compute_mismatch_fraction(output, outputs[0]) for outputs in references]
        ).amin(0)
        mismatches.append(mismatch_R[is_compared])
        perturbed_mismatches += [
            compute_mismatch_fraction(perturbed_output, exact_reference)[is_compared]
            for exact_reference, *perturbed in references
            for perturbed_output in perturbed
        ]
    yield from check_mismatches(torch.cat(mismatches), torch.cat(perturbed_mismatches), roundings)


def _is_comparable(trial: Trial) -> bool:
    """Return whether roundings alone can explain a difference from the bitwise reference."""
    problem, scheme = trial.case.problem, trial.case.problem.scheme
    if problem.adapters is not None and trial.case.variation.slot_pattern == "without":
        return False  # the call uses no adapters, so it rounds like a layer without adapters
    if problem.dtype.itemsize != 2:
        return False  # for float32, `compare` is already as strict
    if problem.parallel.world_size > 1:
        # Each rank rounds its partial sum of a token before the sums are added, so only a token
        # with one expert has no additional rounding. Each rank computes its own per-tensor scale of
        # h, which equals the scale of the reference only if one rank computes all pairs.
        has_one_partial_sum = problem.top_k == 1 and problem.chunk_tokens is None
        has_dynamic_tensor_scale = scheme.activation_granularity == "tensor" and not scheme.static
        if not has_one_partial_sum or (
            has_dynamic_tensor_scale and trial.case.routing != "all_to_one"
        ):
            return False
    if problem.chunk_tokens and scheme.activation_granularity == "tensor" and not scheme.static:
        return False  # x has one scale for the whole call, but h has one for each chunk
    # GPU tensor cores accumulate fp8 products with fewer bits than float32.
    return scheme.activation != "float8_e4m3fn" or trial.machine.device != "cuda"


def check_mismatches(
    mismatches: torch.Tensor, perturbed: torch.Tensor, roundings: list[Roundings]
) -> Iterator[str]:
    """Yield a message for each limit, derived from the perturbed references, that is exceeded.

    mismatches: (rows,), the fraction of each row's values that differ from the reference.
    perturbed: (rows of all perturbed references,), the fraction of each row's values that differ
        between a perturbed reference and the unperturbed one.
    roundings: the roundings of the reference, which the messages name.
    """
    if not mismatches.numel():
        return
    names = " or ".join(map(str, dict.fromkeys(roundings)))
    median_mismatch = float(mismatches.median())
    max_median_mismatch = max(MIN_MEDIAN_TOLERANCE, TOLERANCE_FACTOR * float(perturbed.median()))
    if median_mismatch > max_median_mismatch:
        yield (
            f"{median_mismatch:.0%} of the values of the median row differ from the bitwise "
            f"reference ({names}); at most {max_median_mismatch:.0%} may differ because of "
            "summation order"
        )
    num_outliers, max_num_outliers = (
        int((mismatches > ROW_MISMATCH_LIMIT).sum()),
        1 + len(mismatches) // OUTLIER_ROW_INTERVAL,
    )
    max_num_outliers += int(
        TOLERANCE_FACTOR * float((perturbed > ROW_MISMATCH_LIMIT).double().mean()) * len(mismatches)
    )
    if num_outliers > max_num_outliers:
        yield (
            f"{num_outliers} of {len(mismatches)} rows differ from the bitwise reference in more "
            f"than {ROW_MISMATCH_LIMIT:.1%} of their values ({names}); at most "
            f"{max_num_outliers} may differ by so much"
        )


def list_declared_roundings(trial: Trial, sample: Sample) -> list[list[Roundings]] | None:
    """Return all roundings that the part may apply in the call on `sample`.

    Each element of the returned list is a variant: a list with the roundings of each chunk. On one
    rank there is a single variant. With multiple ranks, the roundings of a row depend on how many
    rows its rank received, so there is a variant for each number of rows from 0 to the total number
    of tokens. Returns None if the part declares no roundings.
    """
    experts, inputs = trial.kernel.experts, sample.original_inputs
    if inputs is sample.global_original_inputs:
        roundings = [
            experts.roundings(inputs.x_TH[chunk], inputs.weights)
            for chunk in _split_into_chunks(sample)
        ]
        if None in roundings:
            return None
        return [[rounding for rounding in roundings if rounding is not None]]
    max_rows = len(sample.global_original_inputs.x_TH)
    rows_RH = inputs.x_TH.new_empty(max_rows, sample.problem.hidden)
    variants = {
        experts.roundings(rows_RH[:count], inputs.weights): None for count in range(max_rows + 1)
    }
    if None in variants:
        return None
    return [[rounding] for rounding in variants if rounding is not None]


def compute_bitwise_reference(sample: Sample, roundings: list[Roundings]) -> torch.Tensor:
    """Return the expected output of the call on `sample`, bitwise up to summation order."""
    (output,) = compute_perturbed_references(sample, roundings, 0)
    return output


def compute_perturbed_references(
    sample: Sample, roundings: list[Roundings], num_perturbed: int
) -> list[torch.Tensor]:
    """Return the bitwise reference, followed by `num_perturbed` outputs with perturbed sums."""
    inputs = sample.global_original_inputs  # with multiple ranks, these are CPU tensors
    # Each generator perturbs the sums of one reference at random.
    generators = [None, *(torch.Generator().manual_seed(seed) for seed in range(num_perturbed))]
    chunk_outputs = [
        torch.stack([sample.make_empty_output()[:0].to(inputs.x_TH.device)] * len(generators))
    ]
    chunks = _split_into_chunks(sample) if inputs is sample.original_inputs else [slice(None)]
    for chunk, rounding in zip(chunks, roundings, strict=True):
        chunk_outputs.append(
            reference.bitwise_references(
                inputs.x_TH[chunk],
                inputs.weights,
                inputs.routing.of(chunk),
                sample.global_problem,
                rounding,
                input_weighted=sample.input_weighted,
                generators=generators,
            )
        )
    return list(torch.cat(chunk_outputs, 1)[:, sample.local_tokens].to(sample.device))


def _split_into_chunks(sample: Sample) -> list[slice]:
    tokens = len(sample.original_inputs.x_TH)
    chunk_size = sample.problem.chunk_tokens or max(1, tokens)
    return [slice(start, start + chunk_size) for start in range(0, tokens, chunk_size)]


def compute_mismatch_fraction(output: torch.Tensor, reference_output: torch.Tensor) -> torch.Tensor:
    """Return the fraction of each row's values that differ, of shape (T,) or (T, K)."""
    return 1 - (output == reference_output).double().mean(-1)


def find_comparable_rows(sample: Sample, reference_output: torch.Tensor) -> torch.Tensor:
    """Return a mask of the rows that are nonzero, finite and belong to ordinary tokens.

    The mask is (T,) for a reference output (T, H), and (T, K) for (T, K, H). `assign_token_groups`
    defines the ordinary tokens.
    """
    groups = assign_token_groups(sample.variation.values, len(reference_output))
    is_ordinary = (groups == 0).to(reference_output.device)
    is_usable = (reference_output != 0).any(-1) & reference_output.isfinite().all(-1)
    return is_usable & (is_ordinary if is_usable.dim() == 1 else is_ordinary[:, None])
