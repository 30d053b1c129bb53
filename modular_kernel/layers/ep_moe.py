"""EPMoE, a FusedMoE with the argument names of SGLang's EPMoE.

layer = EPMoE(256, 8, 7168, 2048, use_grouped_topk=True, num_expert_group=8, topk_group=4,
              tp_size=8, tp_rank=rank, correction_bias=bias)
partial_TH = layer(x_TH, router_logits)    # partial sum of this rank
"""

from pathlib import Path
from typing import Any

import torch

from modular_kernel.errors import ConfigurationError, UnsupportedError
from modular_kernel.layers.fused_moe import FusedMoE
from modular_kernel.layers.parallel import LayerParallel
from modular_kernel.layers.weight_loading import (
    Fp8EPMoEMethod,
    UnquantizedEPMoEMethod,
    get_checkpoint_config,
)
from modular_kernel.operators.kernel_cache import Experts
from modular_kernel.spec.router import RouterSpec
from modular_kernel.utils.argument_checks import Count, expect


class EPMoE(FusedMoE):
    """A FusedMoE with expert parallelism, but without token exchange.

    Each rank holds a contiguous block of experts, gets all tokens, and computes the (token, expert)
    pairs of its experts. The caller sums the outputs of all ranks.

    num_experts: E of the whole model, a multiple of the number of ranks.
    top_k: K.
    hidden_size: H.
    intermediate_size: I of a whole expert.
    tp_group: process group of the ranks.
    tp_rank: this rank. Defaults to the rank in tp_group, or to 0 without a group.
    tp_size: number of ranks. Defaults to the size of tp_group, or to 1 without a group.
    renormalize: whether to scale the K weights of a token to sum to 1.
    use_grouped_topk: whether to select experts from the best topk_group of num_expert_group groups.
        Without correction_bias, scores are a softmax, and a group is ranked by its best expert.
        With correction_bias (E,), scores are sigmoids, and a group is ranked by the sum of its two
        best experts.
    quant_config: as for FusedMoE; or an object with an `activation_scheme` of "dynamic" or
        "static", which means float8 with one scale per expert, or per block if the object has a
        `weight_block_size`.
    experts: the experts part. GroupedGemmExperts needs Triton.

    In addition to the arguments, the layer has these attributes for engines:

    - use_fp8_w8a8: whether the scheme is one of fp8_w8a8.
    - activation_scheme: "dynamic", "static" or None.
    - quant_method: an object whose `process_weights_after_loading(layer)` the engine calls after it
      has loaded the weights. None for schemes other than unquantized weights, and float8 with one
      scale per expert or per block.

    Raises ConfigurationError for arguments that contradict each other.
    """

    def __init__(  # noqa: PLR0913 (the names and the order are the field's)
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        params_dtype: torch.dtype | None = None,
        renormalize: bool = True,
        use_grouped_topk: bool = False,
        num_expert_group: int | None = None,
        topk_group: int | None = None,
        quant_config: object | None = None,
        tp_size: int | None = None,
        prefix: str = "",
        correction_bias: torch.Tensor | None = None,
        *,
        tp_rank: int | None = None,
        tp_group: object | None = None,
        activation: str = "silu",
        experts: Experts = "GroupedGemmExperts",
        device: torch.device | str | None = None,
    ) -> None:
        expect("num_experts", num_experts, Count)
        expect("renormalize", renormalize, bool)
        expect("use_grouped_topk", use_grouped_topk, bool)
        expect("tp_size", tp_size, int | None)
        expect("tp_rank", tp_rank, int | None)
        expect("num_expert_group", num_expert_group, Count | None)
        expect("topk_group", topk_group, Count | None)
        parallel = _make_parallel(tp_size, tp_rank, tp_group)
        if num_experts % parallel.ep[1]:
            need = f"a multiple of tp_size = {parallel.ep[1]}"
            raise ConfigurationError("num_experts", got=num_experts, need=need)
        groups = num_expert_group, topk_group
        router = _make_router_spec(
            top_k, renormalize, groups if use_grouped_topk else None, correction_bias is not None
        )
        if not use_grouped_topk and groups != (None, None):
            need = "None, because use_grouped_topk is False"
            raise ConfigurationError("num_expert_group, topk_group", got=groups, need=need)
        super().__init__(
            num_experts,
            hidden_size,
            intermediate_size,
            quant_config=get_checkpoint_config(quant_config),
            params_dtype=params_dtype,
            activation=activation,
            router=router,
            selection_bias=correction_bias,
            parallel=parallel,
            experts=experts,
            device=device,
            prefix=prefix,
        )
        self.tp_rank, self.tp_size = parallel.ep
        self.top_k, self.renormalize = top_k, renormalize
        self.use_grouped_topk = use_grouped_topk
        self.num_expert_group, self.topk_group = groups
        scheme = self.problem.scheme
        self.use_fp8_w8a8 = scheme.name.startswith("fp8_w8a8")
        self.activation_scheme: str | None = None
        if scheme.quantizes_activations:
            self.activation_scheme = "static" if scheme.static else "dynamic"
        self.quant_method: UnquantizedEPMoEMethod | None = None
        if not scheme.quantized:
            self.quant_method = UnquantizedEPMoEMethod()
        elif self.use_fp8_w8a8 and scheme.granularity != "channel":
            self.quant_method = Fp8EPMoEMethod(quant_config)
        self.num_experts_per_partition = num_experts // self.tp_size
        self.start_expert_id = self.tp_rank * self.num_experts_per_partition
        self.end_expert_id = self.start_expert_id + self.num_experts_per_partition - 1

    @property
    def correction_bias(self) -> torch.Tensor | None:
        """The router's selection bias (E,), or None."""
        return self.selection_bias

    @classmethod
    def from_config(
        cls, checkpoint: str | Path, layer: int | None = None, **options: Any
    ) -> FusedMoE:
        """Not supported: raises UnsupportedError. Use FusedMoE.from_config instead."""
        need = "FusedMoE.from_config(..., parallel=LayerParallel(ep=(tp_rank, tp_size)))"
        raise UnsupportedError("from_config of EPMoE", got=str(checkpoint)[:80], need=need)


def _make_parallel(
    tp_size: int | None, tp_rank: int | None, tp_group: object | None
) -> LayerParallel:
    if tp_group is None:
        return LayerParallel(ep=(tp_rank or 0, 1 if tp_size is None else tp_size))
    parallel = LayerParallel(ep_group=tp_group)
    position = tp_rank, tp_size
    for name, value, need in zip(("tp_rank", "tp_size"), position, parallel.ep, strict=True):
        if value not in (None, need):
            raise ConfigurationError(name, got=value, need=f"{need}, as in tp_group")
    return parallel


def _make_router_spec(
    top_k: int, renormalize: bool, groups: tuple[int | None, int | None] | None, has_bias: bool
) -> RouterSpec:
    if groups is None:
        if has_bias:
            need = "None, because use_grouped_topk is False"
            raise ConfigurationError("correction_bias", got="a tensor", need=need)
        return RouterSpec(top_k, renormalize=renormalize)
    num_groups, topk_groups = groups
    if num_groups is None or topk_groups is None:
        need = "two numbers, because use_grouped_topk is True"
        raise ConfigurationError("num_expert_group, topk_group", got=groups, need=need)
    return RouterSpec(
        top_k,
        score="sigmoid" if has_bias else "softmax",
        groups=num_groups,
        topk_groups=topk_groups,
        group_score="top2" if has_bias else "max",
        selection_bias=has_bias,
        renormalize=renormalize,
    )
