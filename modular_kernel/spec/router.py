"""RouterSpec: how a router selects and weights K experts per token from its logits.

    RouterSpec(8, renormalize=True)                                     Qwen3-MoE
    RouterSpec(4, order="topk_first")                                   gpt-oss
    RouterSpec(8, "sigmoid", groups=8, topk_groups=4, selection_bias=True,
               renormalize=True, eps=1e-20)                             DeepSeek-V3

`modular_kernel.ops.route` implements a RouterSpec, and `modular_kernel.layers.router.Router` is a
layer that applies one. This module also has the types of router outputs.
"""

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch

from modular_kernel.errors import ConfigurationError
from modular_kernel.spec.problem import MAX_TOP_K
from modular_kernel.utils.argument_checks import MAX_INT32, Between, check_fields, expect

# Maximum number of columns of logits, including zero experts: one program handles a whole row.
MAX_COLUMNS = 1024
# Range of eps and floor. 2^-126 is the smallest normal number of float32, and a softmax sums to at
# most 1.
_MIN_DIVISOR, _MAX_DIVISOR = 2.0**-126, 1.0
TopK = Annotated[int, Between(1, MAX_TOP_K)]
Groups = Annotated[int, Between(1, MAX_COLUMNS)]
NonNegativeCount = Annotated[int, Between(0, MAX_INT32)]


class StandardTopKOutput(NamedTuple):
    """Router output for T tokens. The names of the class and its fields follow SGLang.

    topk_weights: (T, K) float32.
    topk_ids: (T, K) int32 or int64; -1 skips the pair.
    router_logits: (T, E), or None.
    """

    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    router_logits: torch.Tensor | None = None


class RoutingData(NamedTuple):
    """Routing of T * K pairs sorted by expert. The names follow triton_kernels.

    n_expts_act: K.
    gate_scal: (T * K,) float32, router weight of the pair in each row. Rows after the last pair
        that is not skipped are 0.
    expt_hist: (E,) int32, number of rows of each expert.
    n_expts_tot: E.
    """

    n_expts_act: int
    gate_scal: torch.Tensor
    expt_hist: torch.Tensor | None = None
    n_expts_tot: int = 0


class Permutation(NamedTuple):
    """A permutation (src_indx) and its inverse (dst_indx), both (T * K,) int32.

    Unused entries are -1.
    """

    src_indx: torch.Tensor
    dst_indx: torch.Tensor


class TritonKernelTopKOutput(NamedTuple):
    """Router output for T tokens, sorted by expert.

    gather_indx.src_indx holds the pair, t * K + k, of each row, and gather_indx.dst_indx the row of
    each pair. scatter_indx is the inverse of gather_indx.
    """

    routing_data: RoutingData
    gather_indx: Permutation
    scatter_indx: Permutation


@dataclass(frozen=True)
class RouterSpec:
    """Rules for choosing and weighting K experts per token.

    top_k: K, 1 to 32.
    score: function that turns logits into scores: "softmax" over all columns, "sigmoid", or
        "sqrtsoftplus".
    order: "score_first" selects and weights experts by their scores. "topk_first" selects experts
        by their logits, and computes scores only of the selected experts, with a softmax over K.
    groups: number of groups of equal size that the experts are divided into.
    topk_groups: number of best groups whose experts can be selected.
    group_score: "max" ranks a group by the score of its best expert, "top2" by the sum of the
        scores of its two best experts.
    selection_bias: add a bias per column for the selection. The bias does not affect the weights.
    renormalize: divide the K weights by max(sum of the weights + eps, floor), in float32.
    eps, floor: 0, or in [2^-126, 1]. Smaller values are 0 in float32. Larger values exceed the sum
        of a softmax, so they would scale the weights instead of guarding the division.
    table: select experts from a table, by token id; the router computes only their weights.
    zero_experts: number of columns after the experts. A zero expert returns x itself.

    If scores are equal, the lower id is selected. An expert whose logit or biased score is NaN, or
    whose biased score is -inf, is never selected. If fewer than K experts can be selected, the
    remaining ids are -1 with weight 0. The routed scaling factor is a field of Problem.

    Raises ConfigurationError for an invalid field, or for a field that has no effect because of
    another field.
    """

    top_k: TopK
    score: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    order: Literal["score_first", "topk_first"] = "score_first"
    groups: Groups = 1
    topk_groups: Groups = 1
    group_score: Literal["max", "top2"] = "top2"
    selection_bias: bool = False
    renormalize: bool = False
    eps: float = 0.0
    floor: float = 0.0
    table: bool = False
    zero_experts: NonNegativeCount = 0

    def __post_init__(self) -> None:
        check_fields(self, "router ")
        if self.topk_groups > self.groups:
            need = f"1 to groups = {self.groups}"
            raise ConfigurationError("router topk_groups", got=self.topk_groups, need=need)
        for name in ("eps", "floor"):
            value = getattr(self, name)
            if value and not _MIN_DIVISOR <= value <= _MAX_DIVISOR:
                need = f"0, or a float32 from {_MIN_DIVISOR:.3g} to {_MAX_DIVISOR:.3g}"
                raise ConfigurationError(f"router {name}", got=value, need=need)
            if value and not self.renormalize:
                raise ConfigurationError(f"router {name}", got=value, need="renormalize=True")
        if self.table and (self.groups > 1 or self.selection_bias):
            got = "groups" if self.groups > 1 else "selection_bias"
            raise ConfigurationError(
                "router table", got=f"a table and {got}", need="no groups and no selection_bias"
            )
        if self.zero_experts and self.groups > 1:
            need = "groups = 1, because zero_experts is set"
            raise ConfigurationError("router groups", got=self.groups, need=need)

    def columns(self, experts: int) -> int:
        """Return the number of logit columns: the experts and the zero experts.

        Raises ConfigurationError if `experts` does not match the groups or the limits.
        """
        if type(experts) is not int:  # called twice in every call of a layer
            expect("router experts", experts, int)
        columns = experts + self.zero_experts
        if experts < 1 or not self.top_k <= columns <= MAX_COLUMNS:
            need = f"from top_k = {self.top_k} to {MAX_COLUMNS} columns of logits"
            raise ConfigurationError("router experts", got=experts, need=need)
        if self.groups > 1:
            self._check_groups(experts)
        return columns

    def _check_groups(self, experts: int) -> None:
        # No divmod: torch.compile cannot trace it if the number of experts is symbolic.
        group_size, remainder = experts // self.groups, experts % self.groups
        if remainder or (self.group_score == "top2" and group_size < 2):
            min_size = 2 if self.group_score == "top2" else 1
            need = f"groups = {self.groups} of equal size, with at least {min_size} experts each"
            raise ConfigurationError("router experts", got=experts, need=need)
        if group_size * self.topk_groups < self.top_k:
            need = f"at least top_k = {self.top_k} experts in topk_groups = {self.topk_groups}"
            got = f"{self.groups} groups of {group_size}"
            raise ConfigurationError("router groups", got=got, need=need)
