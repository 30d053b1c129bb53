"""FusedMoE: an nn.Module of a layer's experts, over EP x TP ranks, with its router or without.

    layer = FusedMoE(128, 2048, 768, top_k=8, router=RouterSpec(8, renormalize=True))
    layer.set_weights(weights)              # or `layer.load(...)`, or `layer.weight_loader(...)`
    y_TH = layer(x_TH, router_logits)

Layers of one shape share kernels and plans. A call returns a tensor of its own; with calls of every
size made once (`warm_up`), it can be captured in a CUDA graph.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.compiler import is_compiling

from modular_kernel.catalog import load_catalog, make_kernel
from modular_kernel.checkpoints.formats import format_of
from modular_kernel.checkpoints.inspection import layer_config
from modular_kernel.checkpoints.loading import load_experts
from modular_kernel.errors import ConfigurationError, DtypeError, ShapeError, UnsupportedError
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.layers.parallel import LayerParallel, all_reduce, placed
from modular_kernel.layers.parameters import ExpertParameters
from modular_kernel.layers.rank_share import Share, share_of_intermediate
from modular_kernel.layers.router import Router
from modular_kernel.layers.routing import (
    check_router,
    check_selection_bias,
    flat_logits,
    given_routing,
    spec_of,
    top_k_of,
)
from modular_kernel.layers.weight_loading import ExpertLoader, make_expert_params_mapping
from modular_kernel.operators.experts import EXPERTS, use_prepared
from modular_kernel.operators.kernel_cache import (
    NO_EP,
    Experts,
    Pairing,
    Planned,
    PrepareFinalize,
    current,
    machine_of,
    pairing_told,
    usual_experts,
    with_ids_of,
)
from modular_kernel.operators.pairing import Pairing as TracedPairing
from modular_kernel.ops.route import Routed, RouterTensors, route
from modular_kernel.replay import modes
from modular_kernel.spec.placement import Placement
from modular_kernel.spec.problem import ActivationSpec, Parallel, Problem, dtype_name, parse_dtype
from modular_kernel.spec.router import RouterSpec
from modular_kernel.tensors import ExpertWeights, Routing, check_loaded
from modular_kernel.utils.argument_checks import Count, expect
from modular_kernel.utils.tensor_checks import check_tensor

RoutingLike = Routing | tuple[torch.Tensor | None, ...] | torch.Tensor | None
# What a layer computes of tokens and their routing: the experts' output, that of the shared ones.
Computed = Callable[[torch.Tensor, Routing], tuple[torch.Tensor, torch.Tensor | None]]
Adapted = tuple[Problem, ExpertWeights]
# What every layer of this process shares: buffers of one size for all layers of one shape.
_planned = Planned()
# Options that `from_config` takes from a checkpoint.
SETTLED = frozenset(
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
_OVER_RANKS = (
    "a FusedMoE that exchanges tokens or sums over ranks is not traced: the graph breaks at its "
    "call. Without prepare_finalize and reduce_results it is an operator"
)
_CHANGED = (
    "a FusedMoE whose problem, prepare_finalize or experts was replaced is not traced: the graph "
    "breaks at its call"
)


class FusedMoE(ExpertParameters):
    """The experts of one layer, of which this rank holds its share.

    num_experts: E of the model. intermediate_size: I of a whole expert; TP ranks hold I / TP of it.
    layer_id: what `describe` and a checkpoint call the layer. top_k: K; the router's where there is
    one. quant_config: a checkpoint's quantization_config, for `weight_loader`; or a scheme as
    Problem.quant names it; None for unquantized weights.
    router: a Router of its own, called on x; or a RouterSpec, and forward is given logits; or None,
    and forward is given a routing. selection_bias: (E + zero experts,), where a RouterSpec has one.
    shared_experts: called on x (T, H), and added. Where a prepare/finalize part is asynchronous it
    runs between dispatch and combine. shared_partial: what it returns is this rank's part of a sum
    over ranks, as the experts' is; else it is whole on every rank, and counted once.
    parallel: this rank's place. reduce_results: all-reduce the output over the ranks that hold
    parts of it; without, a rank returns its part.
    prepare_finalize: None keeps tokens where they are: every EP rank is given all of them. A part
    over ranks exchanges them over ep_group, of max_tokens at most, and its output is whole over EP.
    placement: where experts live, None for blocks. experts: None takes TritonExperts on a GPU.

    Parameters are w13_weight (e, 2I, H), gate rows first, w2_weight (e, H, I), and by PARAMETERS
    what the scheme and `bias` add; floats are NaN until they are loaded, and a call before that
    raises StateError. No gradients. Moves and casts: see `ExpertParameters`.

    torch.compile and torch.export take a call of a layer that exchanges nothing with other ranks as
    two operators, the router's and `torch.ops.modular_kernel.experts`, and the shared experts as
    the torch code that they are.
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
        over_ranks, (ep_rank, ep_size) = _over_ranks(prepare_finalize), parallel.ep
        placement = placed(placement, num_experts, ep_size, over_ranks=over_ranks)
        away = ep_size > 1 and not over_ranks
        act = ActivationSpec.parse(activation)
        if act.up_first:
            need = "gate rows first, or rows that alternate: weights are loaded so"
            raise ConfigurationError("activation", got=str(act), need=need)
        sizes = num_experts, hidden_size, intermediate_size
        rows = act.gated, act.interleaved
        held = partial(Share, *sizes, parallel.ep, parallel.tp, placement, *rows)
        loader, quant = _loader_of(quant_config, held, bias=bias)
        problem = Problem(
            tokens=max_tokens or 1,
            hidden=hidden_size,
            intermediate=share_of_intermediate(intermediate_size, parallel.tp[1], quant),
            experts=num_experts,
            local_experts=len(placement.slots[ep_rank]) if away else None,
            top_k=top_k_of(top_k, router, num_experts),
            dtype=parse_dtype(params_dtype or torch.get_default_dtype()),
            quant=quant,
            activation=act,
            bias=bias,
            expert_map=away,
            apply_router_weight_on_input=apply_router_weight_on_input,
            routed_scaling_factor=1.0 if routed_scaling_factor is None else routed_scaling_factor,
            chunk_tokens=chunk_tokens,
            parallel=Parallel(ep_size, placement, ep_rank) if over_ranks else Parallel(),
        )
        super().__init__(problem, placement, parallel, loader, device)
        self.layer_id, self.prefix = layer_id, prefix
        self.num_experts, self.intermediate_size = num_experts, intermediate_size
        self.reduce_results, self.shared_partial = reduce_results, shared_partial
        self.router, self.shared_experts = router, shared_experts
        self.prepare_finalize, self.experts = prepare_finalize, experts
        check_selection_bias(selection_bias, router, num_experts)
        self.register_buffer("selection_bias", selection_bias)
        # Who else holds parts of the output; found now, so that a missing group is told now.
        self._sums_ep = away
        self._groups = parallel.groups(ep=away) if reduce_results else ()
        self._usual = dict[torch.device, tuple[Problem, Experts]]()  # where experts is None
        self._own_kernel = self._kernel_over_ranks(max_tokens) if over_ranks else None
        part = load_catalog().prepare_finalize(prepare_finalize)
        self._ids_dtype = part.requires.topk_indices_dtype or torch.int32
        self._traced_pairing = str(TracedPairing(prepare_finalize, experts, where_served=True))
        self._traced_parts = prepare_finalize, experts
        self._bias_unloaded = False  # selection_bias may hold what it was made with

    @classmethod
    def from_config(
        cls, checkpoint: str | Path, layer: int | None = None, **options: Any
    ) -> "FusedMoE":
        """Return the layer that a checkpoint describes, to be filled by `load`.

        checkpoint: a folder with a config.json, with or without tensors beside it, or a config.json
        itself. layer: its number, which becomes layer_id; None is 0, without a layer_id.
        What the checkpoint settles is taken from there: the sizes, activation, biases, scheme, the
        router as a RouterSpec, and routed_scaling_factor, which the layer applies. options: any
        other of the constructor's, and `router` or `top_k` to have another router than the file's
        or none. params_dtype: None is the checkpoint's, else bfloat16. A selection bias that the
        router has is NaN unless it is given: copy it into `layer.selection_bias`; a call before
        that raises StateError.
        ConfigurationError for a model_type that is not known, or, unless `router` or `top_k` is
        given, whose router is not; and for an option that the checkpoint settles.
        """
        expect("checkpoint", checkpoint, str | Path)
        expect("layer", layer, int | None)
        for name in sorted(options.keys() & SETTLED):
            got, need = f"{name}={str(options[name])[:80]}", "none: the checkpoint says it"
            raise ConfigurationError("option of from_config", got=got, need=need)
        parallel = options.get("parallel")
        expect("parallel", parallel, LayerParallel | None)
        dtype = options.pop("params_dtype", None)
        found = layer_config(
            checkpoint,
            layer or 0,
            tp=1 if parallel is None else parallel.tp[1],
            dtype=None if dtype is None else dtype_name(parse_dtype(dtype)),
        )
        fields, is_unset = found.problem_fields, False
        if options.keys().isdisjoint({"router", "top_k"}):
            if found.router is None:
                got = f"model_type {found.model_type!r}, whose router is not known here"
                raise ConfigurationError("router", got=got, need="router= or top_k=")
            options["router"] = found.router
            is_unset = found.router.selection_bias and options.get("selection_bias") is None
            if is_unset:
                columns = found.router.columns(fields["experts"])
                options["selection_bias"] = torch.full(
                    (columns,), torch.nan, dtype=torch.float32, device=options.get("device")
                )
        made = cls(
            fields["experts"],
            fields["hidden"],
            found.intermediate,
            layer,
            quant_config=None if fields["quant"] == "none" else fields["quant"],
            params_dtype=fields.get("dtype", "bfloat16"),
            activation=fields["activation"],
            bias=fields["bias"],
            apply_router_weight_on_input=fields["apply_router_weight_on_input"],
            routed_scaling_factor=fields.get("routed_scaling_factor"),
            **options,
        )
        made._bias_unloaded = is_unset
        return made

    make_expert_params_mapping = staticmethod(make_expert_params_mapping)

    def load(self, checkpoint: str | Path, layer: int | None = None) -> None:
        """Load this rank's share of one layer of a checkpoint, as `load_experts` does.

        layer: its number, None for layer_id. What the checkpoint settles of the layer (sizes,
        scheme, activation, biases, routed_scaling_factor, and where the layer has a router also how
        that chooses and weighs) must be this layer's: ConfigurationError else. The router's own
        tensors are not read. Every error of `load_experts`; nothing is taken in part.
        """
        number = self.layer_id if layer is None else layer
        if number is None:
            raise ConfigurationError("layer", got=None, need="the layer's number, or a layer_id")
        found = load_experts(
            checkpoint,
            number,
            ep=self.parallel.ep,
            tp=self.parallel.tp,
            dtype=self.problem.dtype,
            device=next(self.parameters()).device,
            placement=self.placement,
            quantize_inputs=self.problem.scheme.scales_by_expert,
        )
        told = replace(self.problem, **found.problem_fields)
        for field in found.problem_fields:
            got, need = getattr(told, field), getattr(self.problem, field)
            if got != need:
                raise ConfigurationError(f"{field} of the checkpoint", got=got, need=need)
        spec = spec_of(self.router)
        if spec is not None:
            check_router(found.router, spec)
        self.set_weights(found.weights)

    def local_expert(self, expert_id: int) -> int:
        """Return the slot of an expert on this rank, -1 where it is elsewhere."""
        expect("expert_id", expert_id, int)
        if not 0 <= expert_id < self.num_experts:
            need = f"0 to {self.num_experts - 1}"
            raise ConfigurationError("expert_id", got=expert_id, need=need)
        held = self.placement.slots[self.parallel.ep[0]]
        return held.index(expert_id) if expert_id in held else -1

    def describe(self) -> str:
        """Say in words what this rank holds, where every expert is, and what runs."""
        (ep_rank, ep_size), (tp_rank, tp_size) = self.parallel.ep, self.parallel.tp
        held = self.placement.slots[ep_rank]
        share = f"{self.problem.intermediate} of {self.intermediate_size} intermediate values"
        slots = ", ".join(f"{e} -> {self.local_expert(e)}" for e in range(self.num_experts))
        name, spec = "?" if self.layer_id is None else self.layer_id, spec_of(self.router)
        after = "summed over ranks here" if self._groups else "not summed over ranks here"
        kernel, device = self._own_kernel, next(self.parameters()).device
        pairing = self.prepare_finalize, self.experts if kernel is None else type(kernel.experts)
        return "\n".join(
            [
                f"layer {name}: {self.problem}",
                f"EP rank {ep_rank} of {ep_size}: {len(held)} of {self.num_experts} experts",
                f"TP rank {tp_rank} of {tp_size}: {share}",
                f"global -> local: {slots}",
                f"router: {'none, routing is given' if spec is None else spec}",
                f"parts: {pairing_told(pairing, self.problem, device)}; output {after}",
            ]
        )

    def extra_repr(self) -> str:
        """Show where this rank stands, as torch's modules show their sizes."""
        return f"layer_id={self.layer_id}, ep={self.parallel.ep}, tp={self.parallel.tp}"

    # --------------------------------------------------------------------------------- a call

    def forward(
        self,
        hidden_states: torch.Tensor,
        routing: RoutingLike = None,
        *,
        token_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the layer's output, of the shape of hidden_states: (..., H).

        routing: None where the layer has a Router; logits (..., E) where it has a RouterSpec; else
        a Routing or (weights, ids, ...), each (..., K). token_ids: where the router has a table.
        Raises an InputError before anything is launched if a tensor does not fit.
        """
        if is_compiling() and self._untraced():
            return modes.run_untraced(
                self.forward, self._untraced(), hidden_states, routing, token_ids=token_ids
            )
        return self.forward_by(self.computed, hidden_states, routing, token_ids=token_ids)

    def forward_by(
        self,
        computed: Computed,
        hidden_states: torch.Tensor,
        routing: RoutingLike,
        *,
        token_ids: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return what `forward` does, with the experts' output as `computed` makes it."""
        check_tensor("x", hidden_states)
        if hidden_states.dim() < 2 or hidden_states.shape[-1] != self.problem.hidden:
            need = f"(..., H) with H = {self.problem.hidden}"
            raise ShapeError("x", got=tuple(hidden_states.shape), need=need)
        x_TH = hidden_states.reshape(-1, self.problem.hidden)
        if token_ids is not None:
            check_tensor("token_ids", token_ids)
        words = None if token_ids is None else token_ids.reshape(-1)
        routed = self._routed(x_TH, routing, words, tuple(hidden_states.shape[:-1]))
        y_TH, shared_TH = computed(x_TH, routed.routing)
        if routed.identity_T is not None and self._adds_once():
            factor = routed.identity_T[:, None] * self.problem.routed_scaling_factor
            y_TH += factor * x_TH
        if shared_TH is None:
            all_reduce(y_TH, self._groups)
        elif self._groups and not self.shared_partial:  # whole on every rank
            all_reduce(y_TH, self._groups)
            y_TH += shared_TH
        else:
            if self.shared_partial or self._adds_once():
                y_TH += shared_TH
            all_reduce(y_TH, self._groups)
        return y_TH.view(hidden_states.shape)

    def warm_up(self, *tokens: int) -> None:
        """Make the kernels and plans of calls of so many tokens now; not for parts over ranks."""
        device = next(self.parameters()).device
        for number in tokens:
            problem = self.problem.with_tokens(number)
            _planned.warm_up(self._pairing(device), problem, device)

    def prepare_weights(self) -> None:
        """Make once what the experts read of the weights beside them; after they are loaded.

        See FusedMoEModularKernel.prepare_weights. Parameters that are exchanged take it with them:
        prepare again. StateError as `weights`.
        """
        weights, kernel = self.plain_weights(), self._own_kernel
        device = weights.w2.device
        with current(device):
            if kernel is None:
                kernel = _planned.kernel(self._pairing(device), self.problem, device)
            self.keep_prepared(kernel.prepare_weights(weights))
        if self._layer_text:
            use_prepared(self.weights(), self._layer_text, self._traced_pairing)

    def destroy(self) -> None:
        """Close what a part over ranks holds of them: collective. The layer serves no more then."""
        if self._own_kernel is not None:
            part = self._own_kernel.prepare_finalize
            getattr(part, "destroy", lambda: None)()

    def _routed(
        self,
        x_TH: torch.Tensor,
        given: RoutingLike,
        token_ids_T: torch.Tensor | None,
        lead: tuple[int, ...],
    ) -> Routed:
        router = self.router
        if isinstance(router, Router):
            if given is not None:
                need = "None: the layer has a Router of its own"
                raise ConfigurationError("routing", got=type(given).__name__, need=need)
            return router.routed(x_TH, token_ids_T, ids_dtype=self._ids_dtype)
        if router is not None:
            logits = flat_logits(given, router.columns(self.num_experts), lead)
            return route(
                logits,
                router,
                self._router_tensors(),
                token_ids_T=token_ids_T,
                ids_dtype=self._ids_dtype,
            )
        if token_ids_T is not None:
            raise ConfigurationError("token_ids", got="a tensor", need="None without a router")
        return Routed(given_routing(given, lead))

    def computed(
        self, x_TH: torch.Tensor, routing: Routing, *, adapters: Adapted | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the experts' output, a tensor of its own, and that of the shared experts.

        adapters: the problem and the weights of a layer that has some, on one rank.
        """
        if is_compiling():
            return self._traced(x_TH, routing)
        weights, kernel, shared = self.weights(), self._own_kernel, self.shared_experts
        if self._groups:
            self.parallel.check_process()  # before anything is launched
        if kernel is None:
            problem, weights = adapters or (self.problem, weights)
            pairing = self._pairing(x_TH.device, problem)
            y_TH = _planned.run(pairing, problem, x_TH, weights, routing)
            return y_TH, None if shared is None else shared(x_TH)
        with current(x_TH.device):
            out = None if kernel.prepare_finalize.makes_output else torch.empty_like(x_TH)
            pending = kernel.start(x_TH, weights, with_ids_of(kernel, routing), out=out)
            shared_TH = None
            try:
                shared_TH = None if shared is None else shared(x_TH)
            finally:  # or other ranks wait for this one in vain
                y_TH = pending.finish()
        return y_TH, shared_TH

    def _router_tensors(self) -> RouterTensors:
        bias = self.selection_bias
        if bias is None or not self._bias_unloaded:
            return RouterTensors(bias)
        if is_compiling():
            return RouterTensors(bias, unloaded=(bias,))
        check_loaded({"selection_bias": bias})
        self._bias_unloaded = False
        return RouterTensors(bias)

    def _untraced(self) -> str:
        """Return why torch.compile cannot take a call as an operator; "" if it can."""
        if self._own_kernel is not None or self._groups:
            return _OVER_RANKS
        if self._described is not self.problem:
            return _CHANGED
        prepare_finalize, experts = self._traced_parts
        same = prepare_finalize == self.prepare_finalize and experts == self.experts
        return "" if same else _CHANGED

    def _traced(
        self, x_TH: torch.Tensor, routing: Routing
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Put what `computed` returns into a graph: the experts as one operator."""
        weights_TK, ids_TK = routing.topk_weights_TK, routing.topk_ids_TK
        if torch.is_grad_enabled() and (x_TH.requires_grad or weights_TK.requires_grad):
            got, need = "x or topk_weights that require grad", "torch.no_grad() or inference_mode()"
            raise UnsupportedError("gradients", got=got, need=need)
        if x_TH.dtype != self.problem.dtype:
            need = dtype_name(self.problem.dtype)
            raise DtypeError("x", got=dtype_name(x_TH.dtype), need=need)
        params, fields = self.operands()
        y_TH: torch.Tensor = EXPERTS(
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

    def _adds_once(self) -> bool:
        """Whether what is whole on every rank is this rank's to add, if ranks are summed later."""
        return self.parallel.tp[0] == 0 and (self.parallel.ep[0] == 0 or not self._sums_ep)

    def _pairing(self, device: torch.device, problem: Problem | None = None) -> Pairing:
        experts = self.experts
        if experts is None:
            problem = problem or self.problem
            known = self._usual.get(device)
            if known is not None and known[0] is problem:
                return self.prepare_finalize, known[1]
            experts = usual_experts(self.prepare_finalize, problem, device)
            self._usual[device] = problem, experts
        return self.prepare_finalize, experts

    def _kernel_over_ranks(self, max_tokens: int | None) -> FusedMoEModularKernel:
        """Make the kernel of a part over ranks: every rank makes it, in one order of layers."""
        if max_tokens is None:
            need = "the most tokens a rank passes: buffers of all ranks are sized for them"
            raise ConfigurationError("max_tokens", got=None, need=need)
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        device = torch.device(kind)
        machine = machine_of("cuda" if kind == "cuda" else "cpu")
        return make_kernel(
            *self._pairing(device), self.problem, group=self.parallel.ep_group, machine=machine
        )

    def _dtype_after(self, fn: Callable[..., torch.Tensor]) -> torch.dtype:
        dtype = super()._dtype_after(fn)
        if self._own_kernel is not None and dtype is not self.problem.dtype:
            got = f"{dtype_name(dtype)} for a layer over ranks"
            need = f"{dtype_name(self.problem.dtype)}, which its buffers are made for"
            raise UnsupportedError("cast of a layer", got=got, need=need)
        return dtype

    def _fill_made(self) -> None:
        super()._fill_made()
        if self.selection_bias is not None:
            self.selection_bias.fill_(torch.nan)
            self._bias_unloaded = True


def _loader_of(
    quant_config: str | Mapping[str, object] | None, held: Callable[[], Share], *, bias: bool
) -> tuple[ExpertLoader | None, str]:
    """Return what loads the tensors of a checkpoint, and their scheme.

    held: what this rank has of the layer. A scheme by its name says nothing of a checkpoint: None.
    """
    if isinstance(quant_config, str):
        return None, quant_config
    share = held()
    depth = max(share.hidden, share.intermediate)
    loader = ExpertLoader(share, format_of(quant_config, depth=depth), bias=bias)
    return loader, str(loader.scheme)


def _over_ranks(part: PrepareFinalize) -> bool:
    return load_catalog().prepare_finalize(part).requires.world_sizes[0] > 1
