"""FusedMoE, an nn.Module for the experts of one layer, with or without its router.

    layer = FusedMoE(128, 2048, 768, top_k=8, router=RouterSpec(8, renormalize=True))
    layer.set_weights(weights)              # or `layer.load(...)`, or `layer.weight_loader(...)`
    y_TH = layer(x_TH, router_logits)

The experts can be distributed over expert-parallel (EP) and tensor-parallel (TP) ranks. Layers of
the same shape share kernels and plans. Each call returns a newly allocated tensor. After `warm_up`
with every number of tokens in use, a call can be captured in a CUDA graph.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.compiler import is_compiling

from modular_kernel.catalog import check, load_catalog, make_kernel
from modular_kernel.checkpoints.formats import format_of
from modular_kernel.checkpoints.inspection import read_layer_config
from modular_kernel.checkpoints.loading import (
    check_quantizable,
    load_experts,
    parse_quantize,
)
from modular_kernel.errors import (
    ConfigurationError,
    IncompatibleError,
    ShapeError,
    UnsupportedError,
)
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.layers.parallel import LayerParallel, all_reduce, resolve_placement
from modular_kernel.layers.parameters import ExpertParameters
from modular_kernel.layers.rank_share import Share
from modular_kernel.layers.router import Router
from modular_kernel.layers.routing import (
    check_router,
    check_selection_bias,
    flatten_logits,
    get_router_spec,
    normalize_routing,
    resolve_top_k,
)
from modular_kernel.layers.weight_loading import ExpertLoader, make_expert_params_mapping
from modular_kernel.operators.experts import EXPERTS_FORWARD, register_prepared
from modular_kernel.operators.kernel_cache import (
    NO_EP,
    Experts,
    KernelCache,
    KernelsBySize,
    Pairing,
    PrepareFinalize,
    convert_ids,
    current_device,
    describe_pairing,
    detect_machine,
    select_default_experts,
)
from modular_kernel.operators.pairing import Pairing as TracedPairing
from modular_kernel.ops.route import Routed, RouterTensors, route
from modular_kernel.replay import modes
from modular_kernel.spec.intermediate_split import IntermediateSplit, split_intermediate
from modular_kernel.spec.placement import Placement
from modular_kernel.spec.problem import ActivationSpec, Parallel, Problem, dtype_name, parse_dtype
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.spec.router import RouterSpec
from modular_kernel.tensors import ExpertWeights, Routing, check_loaded
from modular_kernel.utils.argument_checks import Count, expect
from modular_kernel.utils.tensor_checks import check_tensor

RoutingLike = Routing | tuple[torch.Tensor | None, ...] | torch.Tensor | None
# (x_TH, routing) -> (output of the experts, output of the shared experts or None)
ComputeExperts = Callable[[torch.Tensor, Routing], tuple[torch.Tensor, torch.Tensor | None]]
# Shared by all layers of the process, so that layers of the same shape use the same buffers.
_plan_cache = KernelCache()
# Constructor arguments that `from_config` reads from the checkpoint.
CHECKPOINT_OPTIONS = frozenset(
    {
        "num_experts",
        "hidden_size",
        "intermediate_size",
        "layer_id",
        "quant_config",
        "activation",
        "bias",
        "apply_router_weight_on_input",
        "routed_scaling_factor",
    }
)
# Reasons for which torch.compile does not trace a call.
_COMMUNICATES = (
    "a FusedMoE that exchanges tokens or sums over ranks is not traced: the graph breaks at its "
    "call. Without prepare_finalize and reduce_results, it is traced as an operator"
)
_REQUIRES_GRAD = "a FusedMoE is not traced if x or the router weights require grad"
_WRONG_DTYPE = "a FusedMoE is not traced if x has another dtype than params_dtype"
_PARTS_REPLACED = (
    "a FusedMoE whose problem, prepare_finalize or experts was replaced is not traced: the graph "
    "breaks at its call"
)


class FusedMoE(ExpertParameters):
    """The experts of one layer, or this rank's share of them.

    num_experts: E of the whole model.
    hidden_size: H.
    intermediate_size: I of a whole expert. Each TP rank holds I / TP columns. If I / TP is not an
        integer, or would split a quantization group, each rank holds whole groups instead, and
        ranks with fewer columns are padded with zero weights to the same number of columns,
        problem.intermediate.
    layer_id: number of the layer, used by `describe` and as the default of `load`.
    top_k: K. Defaults to the router's K.
    quant_config: the quantization_config of a checkpoint, for `weight_loader`; or the name of a
        scheme, as in Problem.quant; or None for unquantized weights.
    params_dtype: dtype of unquantized weights and of x. Defaults to torch's default dtype.
    router: determines the argument `routing` of `forward`: None for a Router, which the layer
        applies to x; logits for a RouterSpec; a Routing or (weights, ids) without a router.
    selection_bias: (E + zero experts,), required if a RouterSpec has a selection bias.
    shared_experts: module that is applied to x (T, H), and whose output is added. With an
        asynchronous prepare/finalize part, it runs between dispatch and combine.
    shared_partial: True if shared_experts returns this rank's partial sum, as the experts do. False
        if it returns the complete output on every rank; the output is then added once.
    parallel: this rank's position and its process groups.
    reduce_results: whether to all-reduce the partial sums of the ranks. If False, a rank returns
        its own partial sum.
    prepare_finalize: a prepare/finalize part that exchanges the tokens of the EP ranks over
        ep_group, and sums over them. None exchanges no tokens; every EP rank must then be called
        with all tokens.
    experts: the experts part. On a GPU, None selects TritonExperts, or TritonOrDeepGemmExperts for
        fp8 weights with block scales if DeepGEMM can be loaded.
    placement: the experts of each EP rank. None assigns contiguous blocks of experts.
    max_tokens: maximum number of tokens of one rank in a call; required by a prepare/finalize part
        that spans ranks.
    prefix: name of the layer in messages and profiles.

    The parameters are w13_weight (e, 2I, H) with the gate rows first, w2_weight (e, H, I), and
    others that depend on the scheme and on `bias` (see PARAMETERS). Until parameters are loaded,
    they are NaN, and a call raises StateError. Gradients are not supported. `ExpertParameters`
    describes moves and casts.

    torch.compile and torch.export trace a layer that does not communicate with other ranks as two
    operators, the router and `torch.ops.modular_kernel.experts_forward`. The shared experts are
    traced as ordinary torch code.
    """

    selection_bias: torch.Tensor | None

    def __init__(  # noqa: PLR0913 (the names, and the order of the first six, are the field's)
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        layer_id: int | None = None,
        top_k: int | None = None,
        quant_config: str | Mapping[str, object] | None = None,
        *,
        params_dtype: torch.dtype | str | None = None,
        activation: ActivationSpec | str = "silu",
        bias: bool = False,
        apply_router_weight_on_input: bool = False,
        routed_scaling_factor: float | None = None,
        router: Router | RouterSpec | None = None,
        selection_bias: torch.Tensor | None = None,
        shared_experts: Callable[[torch.Tensor], torch.Tensor] | None = None,
        shared_partial: bool = False,
        parallel: LayerParallel | None = None,
        reduce_results: bool = False,
        prepare_finalize: PrepareFinalize | None = None,
        experts: Experts | None = None,
        placement: Placement | None = None,
        max_tokens: int | None = None,
        chunk_tokens: int | None = None,
        device: torch.device | str | None = None,
        prefix: str = "",
    ) -> None:
        expect("hidden_size", hidden_size, Count)
        expect("intermediate_size", intermediate_size, Count)
        expect("layer_id", layer_id, int | None)
        expect("router", router, Router | RouterSpec | None)
        expect("parallel", parallel, LayerParallel | None)
        expect("placement", placement, Placement | None)
        expect("num_experts", num_experts, Count)
        expect("prepare_finalize", prepare_finalize, str | type | None)
        expect("max_tokens", max_tokens, Count | None)
        expect("params_dtype", params_dtype, torch.dtype | str | None)
        expect("shared_experts", shared_experts, Callable | None)
        expect("reduce_results", reduce_results, bool)
        expect("shared_partial", shared_partial, bool)
        if experts is not None:
            load_catalog().experts(experts)
        prepare_finalize, parallel = prepare_finalize or NO_EP, parallel or LayerParallel()
        spans_ranks, (ep_rank, ep_size) = _spans_ranks(prepare_finalize), parallel.ep
        placement = resolve_placement(placement, num_experts, ep_size, over_ranks=spans_ranks)
        sums_ep = ep_size > 1 and not spans_ranks
        # A single rank whose placement reorders the experts also needs a map.
        uses_expert_map = sums_ep or not (spans_ranks or placement.is_linear)
        act = ActivationSpec.parse(activation)
        if act.up_first:
            need = "gate rows first, or interleaved rows, as in loaded weights"
            raise ConfigurationError("activation", got=str(act), need=need)
        sizes = num_experts, hidden_size, intermediate_size
        row_layout = act.gated, act.interleaved
        make_share = partial(Share, *sizes, parallel.ep, parallel.tp, placement, *row_layout)
        loader, quant = _make_loader(quant_config, make_share, bias=bias)
        problem = Problem(
            tokens=_resolve_tokens(max_tokens, over_ranks=spans_ranks),
            hidden=hidden_size,
            intermediate=_split_intermediate(intermediate_size, parallel.tp[1], quant).width,
            experts=num_experts,
            local_experts=len(placement.slots[ep_rank]) if uses_expert_map else None,
            top_k=resolve_top_k(top_k, router, num_experts),
            dtype=parse_dtype(params_dtype or torch.get_default_dtype()),
            quant=quant,
            activation=act,
            bias=bias,
            expert_map=uses_expert_map,
            apply_router_weight_on_input=apply_router_weight_on_input,
            routed_scaling_factor=1.0 if routed_scaling_factor is None else routed_scaling_factor,
            chunk_tokens=chunk_tokens,
            parallel=Parallel(ep_size, placement, ep_rank) if spans_ranks else Parallel(),
        )
        super().__init__(problem, placement, parallel, loader, device)
        self.layer_id, self.prefix = layer_id, prefix
        self.num_experts, self.intermediate_size = num_experts, intermediate_size
        self.reduce_results, self.shared_partial = reduce_results, shared_partial
        self.router, self.shared_experts = router, shared_experts
        self.prepare_finalize, self.experts = prepare_finalize, experts
        check_selection_bias(selection_bias, router, num_experts)
        self.register_buffer("selection_bias", selection_bias)
        # Look up the process groups now, so that a missing group raises here instead of in a call.
        self._sums_over_ep = sums_ep
        self._groups = parallel.groups(ep=sums_ep) if reduce_results else ()
        # Default experts by device, used if `experts` is None.
        self._default_experts = dict[torch.device, tuple[Problem, Experts]]()
        self._kernels_by_device = dict[torch.device, tuple[object, KernelsBySize]]()
        self._exchange_kernel = (
            self._make_exchange_kernel(problem, parallel.ep_group) if spans_ranks else None
        )
        self._counts = [0, 0]  # calls and tokens
        part = load_catalog().prepare_finalize(prepare_finalize)
        self._ids_dtype = part.requires.topk_indices_dtype or torch.int32
        self._traced_pairing = str(
            TracedPairing(prepare_finalize, experts, fall_back_to_torch=True)
        )
        self._traced_parts = prepare_finalize, experts
        self._bias_unloaded = False  # whether selection_bias may still hold its initial NaN

    @classmethod
    def from_config(
        cls,
        checkpoint: str | Path,
        layer: int | None = None,
        *,
        quantize: QuantScheme | str | None = None,
        **options: Any,
    ) -> "FusedMoE":
        """Create the layer that a checkpoint describes, without its weights, which `load` reads.

        checkpoint: a config.json, or a folder with a config.json. Tensors are not needed.
        layer: number of the layer, which becomes layer_id. None sets no layer_id, and requires that
            all layers with experts have the same scheme.
        quantize: a scheme to quantize unquantized files to. Pass the same scheme to `load`.
        options: other arguments of the constructor. `router` or `top_k` replaces the checkpoint's
            router. params_dtype defaults to the checkpoint's dtype, or to bfloat16 if the
            checkpoint has none.

        The checkpoint determines the sizes, activation, biases, scheme, router (as a RouterSpec)
        and routed_scaling_factor. If the router has a selection bias and no bias is passed,
        `layer.selection_bias` is NaN, and calls raise StateError until the bias has been copied to
        it.

        Raises ConfigurationError for an unknown model_type; for an unknown router, unless `router`
        or `top_k` is given; for an option that the checkpoint determines; and for a `quantize` that
        `load_experts` refuses.
        """
        expect("checkpoint", checkpoint, str | Path)
        expect("layer", layer, int | None)
        scheme = parse_quantize(quantize)
        for name in sorted(options.keys() & CHECKPOINT_OPTIONS):
            got = f"{name}={str(options[name])[:80]}"
            need = f"no {name}, because the checkpoint determines it"
            raise ConfigurationError("option of from_config", got=got, need=need)
        parallel = options.get("parallel")
        expect("parallel", parallel, LayerParallel | None)
        dtype = options.pop("params_dtype", None)
        config = read_layer_config(
            checkpoint,
            layer,
            tp=1 if parallel is None else parallel.tp[1],
            dtype=None if dtype is None else dtype_name(parse_dtype(dtype)),
        )
        fields, bias_unset = config.problem_fields, False
        check_quantizable(str(checkpoint), config.format, scheme)
        if scheme is not None:
            fields = fields | {"quant": str(scheme)}
        if options.keys().isdisjoint({"router", "top_k"}):
            if config.router is None:
                got = f"model_type {config.model_type!r}, whose router is unknown"
                raise ConfigurationError("router", got=got, need="the argument router or top_k")
            options["router"] = config.router
            bias_unset = config.router.selection_bias and options.get("selection_bias") is None
            if bias_unset:
                columns = config.router.columns(fields["experts"])
                options["selection_bias"] = torch.full(
                    (columns,), torch.nan, dtype=torch.float32, device=options.get("device")
                )
        module = cls(
            fields["experts"],
            fields["hidden"],
            config.intermediate,
            layer,
            quant_config=None if fields["quant"] == "none" else fields["quant"],
            params_dtype=fields.get("dtype", "bfloat16"),
            activation=fields["activation"],
            bias=fields["bias"],
            apply_router_weight_on_input=fields["apply_router_weight_on_input"],
            routed_scaling_factor=fields.get("routed_scaling_factor"),
            **options,
        )
        module._bias_unloaded = bias_unset
        return module

    make_expert_params_mapping = staticmethod(make_expert_params_mapping)

    def load(
        self,
        checkpoint: str | Path,
        layer: int | None = None,
        *,
        quantize: QuantScheme | str | None = None,
    ) -> None:
        """Load this rank's share of one layer of a checkpoint, with `load_experts`.

        The tensors of the router are not read.

        checkpoint: a folder or file, as for `load_experts`.
        layer: number of the layer; None uses layer_id.
        quantize: the layer's scheme, to quantize unquantized weights while loading. None loads
            weights as they are stored.

        Raises ConfigurationError if the checkpoint's sizes, scheme, activation, biases or
        routed_scaling_factor differ from the layer's, or if the layer has a router that differs
        from the checkpoint's router. Also raises every error of `load_experts`. If an error is
        raised, nothing is loaded.
        """
        layer_number = self.layer_id if layer is None else layer
        if layer_number is None:
            need = "the number of the layer, because the layer was created without a layer_id"
            raise ConfigurationError("layer", got=None, need=need)
        loaded = load_experts(
            checkpoint,
            layer_number,
            ep=self.parallel.ep,
            tp=self.parallel.tp,
            dtype=self.problem.dtype,
            device=next(self.parameters()).device,
            placement=self.placement,
            quantize_inputs=self.problem.scheme.scales_by_expert,
            quantize=quantize,
        )
        # The sizes must be compared too, because different sizes may be padded to the same width.
        if loaded.intermediate != self.intermediate_size:
            raise ConfigurationError(
                "intermediate_size of the checkpoint",
                got=loaded.intermediate,
                need=self.intermediate_size,
            )
        checkpoint_problem = replace(self.problem, **loaded.problem_fields)
        for field in loaded.problem_fields:
            got, need = getattr(checkpoint_problem, field), getattr(self.problem, field)
            if got != need:
                raise ConfigurationError(f"{field} of the checkpoint", got=got, need=need)
        spec = get_router_spec(self.router)
        if spec is not None:
            check_router(loaded.router, spec)
        self.set_weights(loaded.weights)

    def local_expert(self, expert_id: int) -> int:
        """Return the slot of an expert on this rank, or -1 if the expert is on another rank."""
        expect("expert_id", expert_id, int)
        if not 0 <= expert_id < self.num_experts:
            need = f"0 to {self.num_experts - 1}"
            raise ConfigurationError("expert_id", got=expert_id, need=need)
        local_experts = self.placement.slots[self.parallel.ep[0]]
        return local_experts.index(expert_id) if expert_id in local_experts else -1

    def describe(self) -> str:
        """Describe this rank's share, the slots of all experts, and the parts that run."""
        (ep_rank, ep_size), (tp_rank, tp_size) = self.parallel.ep, self.parallel.tp
        local_experts = len(self.placement.slots[ep_rank])
        first, last = _split_intermediate(
            self.intermediate_size, tp_size, self.problem.quant
        ).columns(tp_rank)
        share = f"{last - first} of {self.intermediate_size} intermediate columns"
        if last - first < self.problem.intermediate:
            share += f", padded to {self.problem.intermediate}"
        slots = ", ".join(f"{e} -> {self.local_expert(e)}" for e in range(self.num_experts))
        name, spec = "?" if self.layer_id is None else self.layer_id, get_router_spec(self.router)
        reduction = "summed over ranks" if self._groups else "not summed over ranks"
        kernel, device = self._exchange_kernel, next(self.parameters()).device
        pairing = self.prepare_finalize, self.experts if kernel is None else type(kernel.experts)
        return "\n".join(
            [
                f"layer {name}: {self.problem}",
                f"EP rank {ep_rank} of {ep_size}: {local_experts} of {self.num_experts} experts",
                f"TP rank {tp_rank} of {tp_size}: {share}",
                f"global -> local: {slots}",
                f"router: {'none, the caller passes the routing' if spec is None else spec}",
                f"parts: {describe_pairing(pairing, self.problem, device)}; output {reduction}",
            ]
        )

    def extra_repr(self) -> str:
        """Return the layer id and this rank's position, for torch's module representation."""
        return f"layer_id={self.layer_id}, ep={self.parallel.ep}, tp={self.parallel.tp}"

    # ------------------------------------------------------------------------------ execution

    def forward(
        self,
        hidden_states: torch.Tensor,
        routing: RoutingLike = None,
        *,
        token_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the layer's output, (..., H), with the shape of hidden_states.

        hidden_states: (..., H).
        routing: None if the layer has a Router; logits (..., E) if the layer has a RouterSpec;
            otherwise a Routing or (weights, ids, ...), each (..., K).
        token_ids: (...), required if the router has a table.

        Raises an InputError before any kernel is launched if a tensor does not match.
        """
        if is_compiling() and self._find_untraced_reason():
            reason = self._find_untraced_reason()
            return modes.run_with_graph_break(
                self.forward, reason, hidden_states, routing, token_ids=token_ids
            )
        call = (self.computed, hidden_states, routing)
        if self.shared_experts is None:
            return modes.run_without_function_modes(self.forward_with, *call, token_ids=token_ids)
        # Shared experts are the caller's code and may rely on a mode such as a default device.
        return self.forward_with(*call, token_ids=token_ids)

    def forward_with(
        self,
        computed: ComputeExperts,
        hidden_states: torch.Tensor,
        routing: RoutingLike,
        *,
        token_ids: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run `forward`, with the function `computed` in place of the method `computed`."""
        check_tensor("x", hidden_states)
        if hidden_states.dim() < 2 or hidden_states.shape[-1] != self.problem.hidden:
            need = f"(..., H) with H = {self.problem.hidden}"
            raise ShapeError("x", got=tuple(hidden_states.shape), need=need)
        is_flat = hidden_states.dim() == 2
        x_TH = hidden_states if is_flat else hidden_states.reshape(-1, self.problem.hidden)
        if token_ids is not None:
            check_tensor("token_ids", token_ids)
        token_ids_T = None if token_ids is None else token_ids.reshape(-1)
        routed = self._route(x_TH, routing, token_ids_T, tuple(hidden_states.shape[:-1]))
        y_TH, shared_TH = computed(x_TH, routed.routing)
        if routed.identity_T is not None and self._adds_complete_terms():
            factor = routed.identity_T[:, None] * self.problem.routed_scaling_factor
            y_TH += factor * x_TH
        if shared_TH is None:
            all_reduce(y_TH, self._groups)
        elif self._groups and not self.shared_partial:  # every rank has the complete output
            all_reduce(y_TH, self._groups)
            y_TH += shared_TH
        else:
            if self.shared_partial or self._adds_complete_terms():
                y_TH += shared_TH
            all_reduce(y_TH, self._groups)
        return y_TH if is_flat else y_TH.view(hidden_states.shape)

    def warm_up(self, *tokens: int) -> None:
        """Create the kernels and plans for calls with these numbers of tokens.

        This is not needed for layers whose prepare/finalize part spans ranks.
        """
        device = next(self.parameters()).device
        for number in tokens:
            problem = self.problem.with_tokens(number)
            _plan_cache.warm_up(self._select_pairing(device), problem, device)

    def prepare_weights(self) -> None:
        """Prepare the weights after loading (FusedMoEModularKernel.prepare_weights).

        On a GPU, the first call of the layer prepares the weights by default, with fewer checks
        than this method. If a parameter is replaced, the prepared tensors are dropped.

        Raises StateError if parameters were not loaded.
        """
        weights, kernel = self.plain_weights(), self._exchange_kernel
        device = weights.w2.device
        with current_device(device):
            if kernel is None:
                kernel = _plan_cache.kernel(self._select_pairing(device), self.problem, device)
            self.keep_prepared(kernel.prepare_weights(weights))
        if self._layer_text:
            register_prepared(self.weights(), self._layer_text, self._traced_pairing)

    def counters(self) -> dict[str, object]:
        """Return the numbers of calls and tokens of this layer so far, for monitoring.

        Calls of a compiled or exported graph are counted only by the kernels (`kernels`). If
        threads call the layer concurrently, several calls may be counted as one.
        """
        calls, tokens = self._counts
        return {"calls": calls, "tokens": tokens}

    def kernels(self) -> list[FusedMoEModularKernel]:
        """Return the kernels that calls of this layer have used. Other layers may share them."""
        if self._exchange_kernel is not None:
            return [self._exchange_kernel]
        entries = tuple(self._kernels_by_device.values())
        return [kernel for _, by_size in entries for kernel in by_size.kernels()]

    def destroy(self) -> None:
        """Release the resources of a prepare/finalize part that spans ranks.

        Every rank must call this method. The layer cannot be called afterwards.
        """
        if self._exchange_kernel is not None:
            part = self._exchange_kernel.prepare_finalize
            getattr(part, "destroy", lambda: None)()

    def _route(
        self,
        x_TH: torch.Tensor,
        routing: RoutingLike,
        token_ids_T: torch.Tensor | None,
        leading_dims: tuple[int, ...],
    ) -> Routed:
        router = self.router
        if isinstance(router, Router):
            if routing is not None:
                need = "None, because the layer has a Router"
                raise ConfigurationError("routing", got=type(routing).__name__, need=need)
            return router.route(x_TH, token_ids_T, ids_dtype=self._ids_dtype)
        if router is not None:
            logits = flatten_logits(routing, router.columns(self.num_experts), leading_dims)
            return route(
                logits,
                router,
                self._get_router_tensors(),
                token_ids_T=token_ids_T,
                ids_dtype=self._ids_dtype,
            )
        if token_ids_T is not None:
            need = "None, because the layer has no router"
            raise ConfigurationError("token_ids", got="a tensor", need=need)
        return Routed(normalize_routing(routing, leading_dims))

    def computed(
        self,
        x_TH: torch.Tensor,
        routing: Routing,
        *,
        adapters: tuple[Problem, ExpertWeights] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (output of the experts, output of the shared experts or None), newly allocated.

        adapters: a problem and weights with LoRA adapters, to use instead of the layer's problem
            and weights. Only for layers whose prepare/finalize part does not span ranks; the others
            call `run_exchange`.
        """
        if is_compiling():
            return self._run_operator(x_TH, routing)
        weights, shared = self.weights(), self.shared_experts
        if self._exchange_kernel is not None:
            return self.run_exchange(self._exchange_kernel, x_TH, weights, routing)
        if self._groups:
            self.parallel.check_process()  # before anything is launched
        problem, weights = adapters or (self.problem, weights)
        kernels = self._get_kernels(x_TH.device, problem)
        y_TH = kernels.run(x_TH, weights, routing, self._counts)
        return y_TH, None if shared is None else shared(x_TH)

    def run_exchange(
        self,
        kernel: FusedMoEModularKernel,
        x_TH: torch.Tensor,
        weights: ExpertWeights,
        routing: Routing,
        *,
        same_on_ranks: str = "",
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run `computed` with a kernel that exchanges tokens between ranks, and with its weights.

        same_on_ranks: text that ranks compare, as in `FusedMoEModularKernel.start`.
        """
        if self._groups:
            self.parallel.check_process()  # before anything is launched
        shared = self.shared_experts
        self._counts[0] += 1
        self._counts[1] += x_TH.shape[0]
        with current_device(x_TH.device):
            out = None if kernel.prepare_finalize.allocates_output else torch.empty_like(x_TH)
            pending = kernel.start(
                x_TH,
                weights,
                convert_ids(kernel, routing),
                out=out,
                same_on_ranks=same_on_ranks,
            )
            shared_TH = None
            try:
                shared_TH = None if shared is None else shared(x_TH)
            finally:  # even if shared_experts raises, because the other ranks wait for this rank
                y_TH = pending.finish()
        return y_TH, shared_TH

    def _get_router_tensors(self) -> RouterTensors:
        bias = self.selection_bias
        if bias is None or not self._bias_unloaded:
            return RouterTensors(bias)
        if is_compiling():
            return RouterTensors(bias, unloaded=(bias,))
        check_loaded({"selection_bias": bias})
        self._bias_unloaded = False
        return RouterTensors(bias)

    def _find_untraced_reason(self) -> str:
        """Return why torch.compile cannot trace a call as an operator, or "" if it can."""
        if self._exchange_kernel is not None or self._groups:
            return _COMMUNICATES
        if self._operator_problem is not self.problem:
            return _PARTS_REPLACED
        prepare_finalize, experts = self._traced_parts
        are_parts_unchanged = prepare_finalize == self.prepare_finalize and experts == self.experts
        return "" if are_parts_unchanged else _PARTS_REPLACED

    def _run_operator(
        self, x_TH: torch.Tensor, routing: Routing
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run `computed` as an operator that torch.compile can trace."""
        weights_TK, ids_TK = routing.topk_weights_TK, routing.topk_ids_TK
        reason = ""
        if torch.is_grad_enabled() and (x_TH.requires_grad or weights_TK.requires_grad):
            reason = _REQUIRES_GRAD
        elif x_TH.dtype != self.problem.dtype:
            reason = _WRONG_DTYPE
        if reason:  # the eager call raises the error, which torch 2.11 cannot raise in a graph
            return modes.run_with_graph_break(self.computed, reason, x_TH, routing)
        params, fields = self.operands()
        y_TH: torch.Tensor = EXPERTS_FORWARD(
            x_TH.contiguous(),
            ids_TK,
            weights_TK,
            params,
            fields,
            self._layer_text,
            self._traced_pairing,
        )
        shared = self.shared_experts
        return y_TH, None if shared is None else shared(x_TH)

    def _adds_complete_terms(self) -> bool:
        """Return whether this rank adds terms that are complete on every rank.

        Only one of the ranks whose outputs are summed may add such terms.
        """
        return self.parallel.tp[0] == 0 and (self.parallel.ep[0] == 0 or not self._sums_over_ep)

    def _select_pairing(self, device: torch.device, problem: Problem | None = None) -> Pairing:
        experts = self.experts
        if experts is None:
            problem = problem or self.problem
            cached = self._default_experts.get(device)
            if cached is not None and cached[0] is problem:
                return self.prepare_finalize, cached[1]
            experts = select_default_experts(self.prepare_finalize, problem, device)
            self._default_experts[device] = problem, experts
        return self.prepare_finalize, experts

    def _get_kernels(self, device: torch.device, problem: Problem) -> KernelsBySize:
        parts = self.prepare_finalize, self.experts
        entry = self._kernels_by_device.get(device)
        if entry is None or entry[0] != parts or entry[1].problem is not problem:
            pairing = self._select_pairing(device, problem)
            entry = parts, _plan_cache.kernels_by_size(pairing, problem, device)
            self._kernels_by_device[device] = entry
        return entry[1]

    def make_adapter_exchange_kernel(self, problem: Problem) -> FusedMoEModularKernel | None:
        """Create a kernel that exchanges tokens with their adapters, and shares connections.

        Returns None if the prepare/finalize part does not span ranks.

        problem: the problem of the layer with adapters.

        Raises UnsupportedError if the ranks do not compare every call, and IncompatibleError if a
        part does not support adapters.
        """
        if self._exchange_kernel is None:
            return None
        part, machine = self._exchange_kernel.prepare_finalize, self._exchange_kernel.machine
        pairing = self._select_pairing(torch.device(machine.device), problem)
        verdict = check(*pairing, problem, machine)
        if not verdict.ok:
            raise IncompatibleError(verdict.pairing, verdict.rejections)
        if not part.compares_calls():
            got = f"{type(part).__name__}, whose ranks do not compare every call"
            need = "a part whose ranks compare their adapters before they send rows"
            raise UnsupportedError("prepare_finalize", got=got, need=need)
        return self._make_exchange_kernel(problem, part.sharable_group())

    def _make_exchange_kernel(
        self, problem: Problem, group: object | None
    ) -> FusedMoEModularKernel:
        """Create the kernel for a prepare/finalize part that spans ranks."""
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
        device = torch.device(device_type)
        machine = detect_machine("cuda" if device_type == "cuda" else "cpu")
        kernel = make_kernel(
            *self._select_pairing(device, problem), problem, group=group, machine=machine
        )
        kernel.label = self.prefix or ("" if self.layer_id is None else f"layer {self.layer_id}")
        return kernel

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle or copy. A copy looks up its own kernels."""
        return super().__getstate__() | {"_kernels_by_device": {}, "_counts": [0, 0]}

    def _dtype_after(self, fn: Callable[..., torch.Tensor]) -> torch.dtype:
        dtype = super()._dtype_after(fn)
        if self._exchange_kernel is not None and dtype is not self.problem.dtype:
            got = f"{dtype_name(dtype)} for a layer that exchanges tokens between ranks"
            need = f"{dtype_name(self.problem.dtype)}, because its buffers have that dtype"
            raise UnsupportedError("cast of a layer", got=got, need=need)
        return dtype

    def _reset_after_to_empty(self) -> None:
        super()._reset_after_to_empty()
        if self.selection_bias is not None:
            self.selection_bias.fill_(torch.nan)
            self._bias_unloaded = True


def _make_loader(
    quant_config: str | Mapping[str, object] | None, make_share: Callable[[], Share], *, bias: bool
) -> tuple[ExpertLoader | None, str]:
    """Return the loader of a checkpoint's tensors, and the name of this rank's scheme.

    The loader is None if quant_config is the name of a scheme, because a scheme does not determine
    a checkpoint format.
    """
    if isinstance(quant_config, str):
        return None, quant_config
    share = make_share()
    depth = max(share.hidden, share.intermediate)
    loader = ExpertLoader(share, format_of(quant_config, depth=depth), bias=bias)
    return loader, str(loader.scheme)


def _split_intermediate(intermediate: int, ranks: int, quant: str) -> IntermediateSplit:
    return split_intermediate(intermediate, ranks, Problem(1, 1, 1, 1, 1, quant=quant).scheme)


def _resolve_tokens(max_tokens: int | None, *, over_ranks: bool) -> int:
    if over_ranks and max_tokens is None:
        need = "the maximum number of tokens per rank, which determines the buffer sizes"
        raise ConfigurationError("max_tokens", got=None, need=need)
    return max_tokens or 1


def _spans_ranks(part: PrepareFinalize) -> bool:
    return load_catalog().prepare_finalize(part).requires.world_sizes[0] > 1
