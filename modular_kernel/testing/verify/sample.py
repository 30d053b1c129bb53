"""One call of a case: its inputs, and what has to come out."""

from dataclasses import replace
from functools import cached_property

import torch

from modular_kernel import reference
from modular_kernel.catalog import load_catalog
from modular_kernel.spec.problem import Combine, Problem
from modular_kernel.testing.cases.case import Case
from modular_kernel.testing.cases.inputs import Inputs, Manner, fenced, invalid_count, make_inputs
from modular_kernel.testing.verify.compare import Comparison
from modular_kernel.testing.verify.compare_isolated import Fair, compare_apart
from modular_kernel.testing.verify.compare_nan import compare_with_nan

# Enough for some 36 groups of 7 tokens: with 64, w8a8 cases of so few failed by chance where the
# error over many tokens is the recipe's.
_MORE_TOKENS = 1024


class Sample:
    """One call's inputs, and what has to come out.

    `inputs` may be harmed by a faulty part; `exact`, `recipe` and `pristine` are made apart.
    input_weighted: router weights that go on the input multiply x itself, before it is quantized.
    """

    def __init__(
        self, case: Case, device: torch.device, *, tokens: int, salt: int, strided: bool = False
    ) -> None:
        self.problem: Problem = case.problem.with_tokens(tokens)
        self.routing, self.manner = case.routing, case.manner
        self.device = device
        self.strided = strided
        prepare = load_catalog().prepare_finalize(case.prepare_finalize)
        self.input_weighted = prepare.requires.multiplies_input
        self.seed = 1000 * case.seed + salt
        self.inputs = self._make()
        self.pristine = self._make()
        self.invalid_ids = invalid_count(self.pristine.routing, self.problem)

    def _make(self, manner: Manner | None = None) -> Inputs:
        return make_inputs(
            self.problem,
            self.routing,
            self.device,
            seed=self.seed,
            strided=self.strided,
            manner=manner or self.manner,
        )

    @property
    def mine(self) -> slice:
        """Which tokens of the whole call these are."""
        return slice(None)

    @property
    def whole_pristine(self) -> Inputs:
        """The whole call's inputs, that of all ranks where there are several."""
        return self.pristine

    @property
    def whole_problem(self) -> Problem:
        """The whole call's problem, on one rank that has every expert."""
        return self.problem

    @cached_property
    def exact(self) -> torch.Tensor:
        i = self.pristine
        return reference.oracle(i.x_TH, i.weights, i.routing, self.problem)

    @cached_property
    def recipe(self) -> torch.Tensor:
        i = self.pristine
        given = i.x_TH, i.weights, i.routing, self.problem
        return reference.recipe(*given, input_weighted=self.input_weighted)

    def compare(self, out: torch.Tensor) -> Comparison:
        """`out` against the oracle; tokens that would hide others, by themselves."""
        if self.manner.nan:
            compared = out, self.exact, self.recipe, self.problem
            result = compare_with_nan(*compared)
            return result if result.ok else compare_with_nan(*compared, fair=self.fair)
        given = out, self.exact, self.recipe, self.problem, self.manner.values
        result = compare_apart(*given)
        return result if result.ok else compare_apart(*given, fair=self.fair)

    @cached_property
    def fair(self) -> Fair:
        """The recipe's errors over more tokens of the same layer: here may be few."""
        problem = replace(self.problem.with_tokens(_MORE_TOKENS), chunk_tokens=None)
        more = make_inputs(problem, "uniform", self.device, seed=self.seed)
        weights = self.pristine.weights
        if self.manner.nan:
            manner = replace(self.manner, nan="")
            weights = self._make(manner).weights
        # Adapters that no token here names hold NaN: take those of these tokens, by turns.
        named = self.pristine.routing.adapters_T
        if isinstance(named, torch.Tensor) and len(named):
            named = named[torch.arange(_MORE_TOKENS, device=named.device) % len(named)]
        expert_map = weights.expert_map
        ids_TK = _of_here(more.routing.topk_ids_TK, expert_map, problem.e)
        routing = replace(more.routing, topk_ids_TK=ids_TK, adapters_T=named)
        given = more.x_TH, weights, routing, problem
        exact = reference.oracle(*given)
        recipe = reference.recipe(*given, input_weighted=self.input_weighted)
        live = int((self.exact != 0).flatten(1).any(1).sum())  # tokens of which something is left
        return Fair.of(exact, recipe, min(_MORE_TOKENS, max(1, live)))

    def x_TH(self) -> torch.Tensor:
        """x for one call: a new copy if the call overwrites it."""
        return fenced(self.pristine.x_TH) if self.problem.inplace else self.inputs.x_TH

    def empty_output(self) -> torch.Tensor:
        """Return a fenced tensor for `out=`, full of NaN."""
        middle = () if self.problem.combine is Combine.SUM else (self.problem.top_k,)
        shape = (self.problem.tokens, *middle, self.problem.hidden)
        nan = torch.full(shape, torch.nan, dtype=self.problem.dtype, device=self.device)
        return fenced(nan)


def _of_here(ids_TK: torch.Tensor, expert_map: torch.Tensor | None, rows: int) -> torch.Tensor:
    """Return ids of experts that are here in the place of others: such pairs are no error's."""
    if expert_map is None:
        return ids_TK
    here = ((expert_map >= 0) & (expert_map < rows)).nonzero().flatten()
    if not len(here):
        return ids_TK
    return here[ids_TK.long().clamp(min=0) % len(here)].to(ids_TK.dtype)
