"""One call of a test case: its inputs and expected output.

A `Trial` makes one `Sample` for each kind of call. "Fenced" tensors are surrounded by memory of a
known pattern, so that a write outside of them is detected.
"""

from dataclasses import replace
from functools import cached_property

import torch

from modular_kernel import reference
from modular_kernel.catalog import load_catalog
from modular_kernel.spec.problem import Combine, Problem
from modular_kernel.testing.cases.case import Case
from modular_kernel.testing.cases.inputs import (
    Inputs,
    InputVariation,
    count_invalid_ids,
    fenced,
    make_inputs,
)
from modular_kernel.testing.verify.compare import Comparison
from modular_kernel.testing.verify.compare_isolated import RoundingErrors, compare_by_group
from modular_kernel.testing.verify.compare_nan import compare_with_nan

# Number of tokens over which the error of the rounded reference is measured. With 64, w8a8 cases of
# 7 tokens failed by chance, although the part and the rounded reference had equal errors over many
# tokens.
NUM_REFERENCE_TOKENS = 1024


class Sample:
    """Inputs and expected output of one call.

    Attributes:
        inputs: the arguments of the call. A faulty part may write to them.
        original_inputs: a separate copy of the inputs, from which the expected output is computed.
        exact: the output of the float64 reference.
        rounded_reference: the output of plain torch with the roundings of the dtype and scheme.
        input_weighted: whether the PrepareAndFinalize multiplies x by the router weights before it
            quantizes x. Matters only in problems whose router weights apply to the input.
        invalid_ids: number of invalid ids in the routing.
    """

    def __init__(
        self,
        case: Case,
        device: torch.device,
        *,
        tokens: int,
        seed_offset: int,
        strided: bool = False,
    ) -> None:
        self.problem: Problem = case.problem.with_tokens(tokens)
        self.routing, self.variation = case.routing, case.variation
        self.device = device
        self.strided = strided
        prepare = load_catalog().prepare_finalize(case.prepare_finalize)
        self.input_weighted = prepare.requires.multiplies_input
        self.seed = 1000 * case.seed + seed_offset
        self.inputs = self._make_call_inputs()
        self.original_inputs = self._make_call_inputs()
        self.invalid_ids = count_invalid_ids(self.original_inputs.routing, self.problem)

    def _make_call_inputs(self, variation: InputVariation | None = None) -> Inputs:
        return make_inputs(
            self.problem,
            self.routing,
            self.device,
            seed=self.seed,
            strided=self.strided,
            variation=variation or self.variation,
        )

    @property
    def local_tokens(self) -> slice:
        """The slice of this sample's tokens among the tokens of all ranks."""
        return slice(None)

    @property
    def global_original_inputs(self) -> Inputs:
        """The inputs of the whole call, across all ranks."""
        return self.original_inputs

    @property
    def global_problem(self) -> Problem:
        """The problem of the whole call as if it ran on one rank with all experts."""
        return self.problem

    @cached_property
    def exact(self) -> torch.Tensor:
        inputs = self.original_inputs
        return reference.float64_reference(
            inputs.x_TH, inputs.weights, inputs.routing, self.problem
        )

    @cached_property
    def rounded_reference(self) -> torch.Tensor:
        inputs = self.original_inputs
        args = inputs.x_TH, inputs.weights, inputs.routing, self.problem
        return reference.rounded_reference(*args, input_weighted=self.input_weighted)

    def compare(self, out: torch.Tensor) -> Comparison:
        """Compare `out` with the float64 reference.

        Tokens with extreme values are compared separately. If the comparison fails, it is repeated
        with the tolerance from `rounding_errors`, which takes longer to compute.
        """
        if self.variation.nan:
            nan_args = out, self.exact, self.rounded_reference, self.problem
            result = compare_with_nan(*nan_args)
            if result.ok:
                return result
            return compare_with_nan(*nan_args, rounding_errors=self.rounding_errors)
        args = out, self.exact, self.rounded_reference, self.problem, self.variation.values
        result = compare_by_group(*args)
        return (
            result if result.ok else compare_by_group(*args, rounding_errors=self.rounding_errors)
        )

    @cached_property
    def rounding_errors(self) -> RoundingErrors:
        """The errors of the rounded reference, measured on more tokens of the same layer.

        In a call with few tokens, the error of the rounded reference may be small by chance.
        """
        problem = replace(self.problem.with_tokens(NUM_REFERENCE_TOKENS), chunk_tokens=None)
        inputs = make_inputs(problem, "uniform", self.device, seed=self.seed)
        weights = self.original_inputs.weights
        if self.variation.nan:
            variation = replace(self.variation, nan="")
            weights = self._make_call_inputs(variation).weights
        # Slots that no token of this call uses are filled with NaN, so use only slots of this call.
        adapters_T = self.original_inputs.routing.adapters_T
        if isinstance(adapters_T, torch.Tensor) and len(adapters_T):
            adapters_T = adapters_T[
                torch.arange(NUM_REFERENCE_TOKENS, device=adapters_T.device) % len(adapters_T)
            ]
        expert_map = weights.expert_map
        ids_TK = _map_to_local(inputs.routing.topk_ids_TK, expert_map, problem.e)
        routing = replace(inputs.routing, topk_ids_TK=ids_TK, adapters_T=adapters_T)
        args = inputs.x_TH, weights, routing, problem
        exact = reference.float64_reference(*args)
        rounded_reference = reference.rounded_reference(*args, input_weighted=self.input_weighted)
        num_rows = int((self.exact != 0).flatten(1).any(1).sum())
        return RoundingErrors.measure(
            exact, rounded_reference, min(NUM_REFERENCE_TOKENS, max(1, num_rows))
        )

    def x_TH(self) -> torch.Tensor:
        """Return x for one call; a new copy if the call overwrites x."""
        return fenced(self.original_inputs.x_TH) if self.problem.inplace else self.inputs.x_TH

    def make_empty_output(self) -> torch.Tensor:
        """Return a fenced tensor for `out=`, full of NaN."""
        pair_dims = () if self.problem.combine is Combine.SUM else (self.problem.top_k,)
        shape = (self.problem.tokens, *pair_dims, self.problem.hidden)
        nan = torch.full(shape, torch.nan, dtype=self.problem.dtype, device=self.device)
        return fenced(nan)


def _map_to_local(ids_TK: torch.Tensor, expert_map: torch.Tensor | None, rows: int) -> torch.Tensor:
    """Replace ids of remote experts with ids of local experts, so that every pair is computed.

    rows: number of local experts.
    """
    if expert_map is None:
        return ids_TK
    local_ids = ((expert_map >= 0) & (expert_map < rows)).nonzero().flatten()
    if not len(local_ids):
        return ids_TK
    return local_ids[ids_TK.long().clamp(min=0) % len(local_ids)].to(ids_TK.dtype)
