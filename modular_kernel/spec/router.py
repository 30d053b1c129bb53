"""RouterSpec: selection of K experts per token and their weights, from router logits.

    RouterSpec(8, renormalize=True)                                     Qwen3-MoE
    RouterSpec(4, order="topk_first")                                   gpt-oss
    RouterSpec(8, "sigmoid", groups=8, topk_groups=4, selection_bias=True,
               renormalize=True, eps=1e-20)                             DeepSeek-V3

`modular_kernel.ops.route` implements it; `modular_kernel.layers.router` is its layer.
"""

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch

from modular_kernel.errors import ConfigurationError
from modular_kernel.spec.problem import MAX_TOP_K
from modular_kernel.utils.argument_checks import MAX_INT32, Between, check_fields, expect

# Columns of logits per program of the kernel, including zero experts.
MAX_COLUMNS = 1024
# For eps and floor: float32 has no smaller normal number, and a softmax sums to at most 1.
_MIN_DIVISOR, _MAX_DIVISOR = 2.0**-126, 1.0
TopK = Annotated[int, Between(1, MAX_TOP_K)]
Groups = Annotated[int, Between(1, MAX_COLUMNS)]
NonNegativeCount = Annotated[int, Between(0, MAX_INT32)]


class StandardTopKOutput(NamedTuple):
    """Router output for T tokens; the name and fields follow SGLang.

    topk_weights: (T, K) float32. topk_ids: (T, K) int32 or int64, -1 for a skipped pair.
    router_logits: (T, E), or None.
    """

    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    router_logits: torch.Tensor | None = None


class RoutingData(NamedTuple):
    """Routing of T * K pairs sorted by expert; names follow triton_kernels.

    n_expts_act: K. gate_scal: (T * K,) float32, weight of the pair in each row, 0 in rows after the
    last pair that is not skipped. expt_hist: (E,) int32, rows per expert. n_expts_tot: E.
    """

    n_expts_act: int
    gate_scal: torch.Tensor
    expt_hist: torch.Tensor | None = None
    n_expts_tot: int = 0


class Permutation(NamedTuple):
    """A permutation (src_indx) and its inverse (dst_indx), (T * K,) int32. -1: an unused entry."""

    src_indx: torch.Tensor
    dst_indx: torch.Tensor


class TritonKernelTopKOutput(NamedTuple):
    """Router output for T tokens, sorted by expert.

    gather_indx.src_indx: the pair t * K + k in each row; gather_indx.dst_indx: the row of each
    pair. scatter_indx is the inverse.
    """

    routing_data: RoutingData
    gather_indx: Permutation
    scatter_indx: Permutation


@dataclass(frozen=True)
class RouterSpec:
    """Rules for choosing and weighting K experts per token.

    top_k: K, 1 to 32.
    score: transform of the logits: "softmax" over all columns, "sigmoid", or "sqrtsoftplus".
    order: "score_first" selects and weights by scores; "topk_first" selects by logits and computes
        scores of the selected experts only, with softmax over those K.
    groups: number of equal groups of experts; only experts of the best topk_groups groups can be
        selected.
    group_score: score of a group: that of its best expert ("max"), or the sum of its two best
        ("top2").
    selection_bias: add a bias per column for the selection; it does not affect the weights.
    renormalize: divide the K weights by max(their sum + eps, floor), in float32. eps and floor are
        0 or in [2^-126, 1]: smaller values are 0 in float32, and larger ones exceed the sum of a
        softmax, so they would scale the weights instead of guarding the division.
    table: select experts from a table by token id; the router computes only their weights.
    zero_experts: number of columns after the experts. A zero expert returns x itself.

    Ties go to the lower id. An expert whose logit or biased score is NaN, or whose biased score is
    -inf, is never selected; if fewer than K experts remain, the other ids are -1 with weight 0. The
    routed scaling factor is a field of Problem. Raises ConfigurationError for an invalid field, or
    for one that another field makes meaningless.
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
                need = f"0, or {_MIN_DIVISOR:.3g} to {_MAX_DIVISOR:.3g}: it is a float32"
                raise ConfigurationError(f"router {name}", got=value, need=need)
            if value and not self.renormalize:
                raise ConfigurationError(f"router {name}", got=value, need="renormalize=True")
        if self.table and (self.groups > 1 or self.selection_bias):
            got = "groups" if self.groups > 1 else "selection_bias"
            raise ConfigurationError(
                "router table", got=got, need="a table without groups or selection_bias"
            )
        if self.zero_experts and self.groups > 1:
            need = "groups = 1 where there are zero experts"
            raise ConfigurationError("router groups", got=self.groups, need=need)

    def columns(self, experts: int) -> int:
        """Return the number of logit columns: the experts and the zero experts.

        Raises ConfigurationError if `experts` does not match the groups or the limits.
        """
        if type(experts) is not int:  # called twice in every call of a layer
            expect("router experts", experts, int)
        columns = experts + self.zero_experts
        if experts < 1 or not self.top_k <= columns <= MAX_COLUMNS:
            need = f"top_k = {self.top_k} to {MAX_COLUMNS} columns of logits"
            raise ConfigurationError("router experts", got=experts, need=need)
        if self.groups > 1:
            self._check_groups(experts)
        return columns

    def _check_groups(self, experts: int) -> None:
        # No divmod: torch.compile cannot trace it if the number of experts is symbolic.
        size, remainder = experts // self.groups, experts % self.groups
        if remainder or (self.group_score == "top2" and size < 2):
            min_size = 2 if self.group_score == "top2" else 1
            need = f"groups = {self.groups} of one size, {min_size} or more each"
            raise ConfigurationError("router experts", got=experts, need=need)
        if size * self.topk_groups < self.top_k:
            need = f"top_k = {self.top_k} experts or more in topk_groups = {self.topk_groups}"
            raise ConfigurationError("router groups", got=f"{self.groups} of {size}", need=need)
