"""`fused_experts` and `fused_moe`: functional interfaces with separate tensors and flags.

    y_TH = fused_experts(x_TH, w1, w2, (topk_weights, topk_ids, None))
    y_TH = fused_experts(x_TH, w1, w2, topk_output, use_fp8_w8a8=True, block_shape=[128, 128],
                         w1_scale=w1_scale, w2_scale=w2_scale)

Both functions run kernels with MoEPrepareAndFinalizeNoEP and TritonExperts, or TorchExperts if
Triton is not available. torch.compile traces a call as the operator
`torch.ops.modular_kernel.outplace_fused_experts` or `inplace_fused_experts`, without a graph break.
Eager calls skip torch's dispatcher. Calls share workspaces, as `FusedMoEModularKernel.__call__`
describes.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Unpack

import torch
from torch.compiler import is_compiling

from modular_kernel.errors import ConfigurationError, LayoutError, ShapeError
from modular_kernel.integrations.fused_moe_kernels import (
    FIELDS,
    check_config,
    count_global_experts,
    count_values_per_element,
    get_kernel,
    make_weights,
)
from modular_kernel.integrations.fused_moe_options import (
    MoeRunnerConfig,
    Options,
    Quantization,
    check_backend,
    quant_of,
    split_options,
)
from modular_kernel.ops.route import route
from modular_kernel.replay import modes
from modular_kernel.spec.problem import MAX_TOP_K, Combine
from modular_kernel.spec.router import RouterSpec, StandardTopKOutput
from modular_kernel.tensors import Routing, check_leading_dims
from modular_kernel.utils.argument_checks import expect
from modular_kernel.utils.operator_library import register_operator
from modular_kernel.utils.tensor_checks import (
    check_no_gradients,
    check_strided,
    check_tensor,
    check_tensors,
    is_dense,
    needs_gradient,
)

__all__ = [
    "MoeRunnerConfig",
    "Options",
    "Quantization",
    "StandardTopKOutput",
    "fused_experts",
    "fused_moe",
    "quant_of",
]


def fused_experts(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_output: Sequence[torch.Tensor | None],
    moe_runner_config: MoeRunnerConfig | None = None,
    **options: Unpack[Options],
) -> torch.Tensor:
    """Compute the experts' output, (..., H), or (..., K, H) with no_combine.

    hidden_states: (..., H). With `inplace`, the result is written to this tensor.
    w1: (E, N, H), or packed.
    w2: (E, H, I), or packed.
    topk_output: (weights, ids, ...). The router weights are (..., K), float32 or a 16-bit dtype,
        which is converted to float32. The expert ids are (..., K); -1 skips a pair. Further values
        are ignored.
    moe_runner_config: settings of the layer. Without a config, the call is out of place,
        although the default of MoeRunnerConfig.inplace is True.
    options: keywords that `Options` lists.

    Raises ConfigurationError for an unknown keyword, the InputErrors of `FusedMoEModularKernel`,
    and IncompatibleError if no part supports the problem.
    """
    config, quantization = split_options(moe_runner_config, options)
    call = (hidden_states, w1, w2, topk_output, config, quantization)
    return modes.run_without_function_modes(_fused_experts, *call)


def _fused_experts(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_output: Sequence[torch.Tensor | None],
    config: MoeRunnerConfig,
    options: Quantization,
) -> torch.Tensor:
    extras: list[torch.Tensor | None] = [options.get(field) for field in FIELDS.values()]  # type: ignore[misc]
    weights = (w1, w2, *extras)
    tensors = [hidden_states, w1, w2, *[tensor for tensor in extras if tensor is not None]]
    can_skip_dispatcher = _may_skip_dispatcher(tensors)
    if can_skip_dispatcher:  # the kernel checks memory and weights
        check_strided("x", hidden_states)
    else:
        device = check_tensor("x", hidden_states, meta=True).device
        tensors_by_name = dict(zip(("w1", "w2", *FIELDS), weights, strict=True))
        check_tensors(tensors_by_name, optional=FIELDS, device=device, meta=True)
    if needs_gradient(tensors):
        names = ("x", "w1", "w2", *FIELDS)
        check_no_gradients(dict(zip(names, (hidden_states, *weights), strict=True)))
    x_TH = _flatten_tokens(hidden_states, inplace=config.inplace)
    leading_dims = tuple(hidden_states.shape[:-1])
    weights_TK, ids_TK = flatten_topk_output(
        topk_output,
        config,
        leading_dims,
        hidden_states.device,
        check_memory=not can_skip_dispatcher,
    )
    if config.inplace and config.no_combine:
        need = "inplace=False, because a (T, K, H) output does not fit into x"
        raise ConfigurationError("inplace", got="True with no_combine=True", need=need)
    check_backend(config, "triton")
    quant = quant_of(options)
    check_config(config, x_TH, w1, w2, options, values_per_element=count_values_per_element(quant))
    settings = (
        quant,
        _format_activation(config) if is_compiling() else _format_activation_cached(config),
        config.apply_router_weight_on_input,
        config.scale,
    )
    arguments = (x_TH, w1, w2, weights_TK, ids_TK, extras, *settings)
    skips_dispatcher = can_skip_dispatcher and _may_skip_dispatcher((weights_TK, ids_TK))
    if config.inplace:
        run = _run_in_place if skips_dispatcher else inplace_fused_experts
        run(*arguments, config.chunk_tokens)
        return hidden_states
    run_out_of_place = _run if skips_dispatcher else outplace_fused_experts
    output: torch.Tensor = run_out_of_place(*arguments, config.combine.value, config.chunk_tokens)
    if hidden_states.dim() == 2:
        return output
    return output.view(*hidden_states.shape[:-1], *output.shape[1:])


def fused_moe(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    gating_output: torch.Tensor | Sequence[torch.Tensor | None],
    moe_runner_config: MoeRunnerConfig | None = None,
    *,
    renormalize: bool = False,
    **options: Unpack[Options],
) -> torch.Tensor:
    """Route tokens with a softmax over logits, then run `fused_experts`.

    gating_output: logits (..., E), which require `top_k`; or the result of a router, as for the
        argument topk_output of `fused_experts`.
    renormalize: scale the K weights of a token to sum to 1.

    `fused_experts` describes the other arguments.
    """
    config, quantization = split_options(moe_runner_config, options)
    expect("renormalize", renormalize, bool)
    if isinstance(gating_output, list | tuple):
        if renormalize:
            need = "False, or logits as gating_output"
            raise ConfigurationError("renormalize", got="True with weights and ids", need=need)
        return _fused_experts(hidden_states, w1, w2, gating_output, config, quantization)
    need = "logits (..., E), or (weights, ids)"
    if not isinstance(gating_output, torch.Tensor):
        raise ShapeError("gating_output", got=type(gating_output).__name__, need=need)
    check_tensor("gating_output", gating_output)
    if gating_output.dim() < 2:
        raise ShapeError("gating_output", got=tuple(gating_output.shape), need=need)
    top_k, experts = config.top_k, gating_output.shape[-1]
    max_top_k = min(experts, MAX_TOP_K)
    if top_k is None or not 1 <= top_k <= max_top_k:
        need = f"1 to {max_top_k}, the smaller of {experts} experts and {MAX_TOP_K}"
        raise ConfigurationError("top_k", got=top_k, need=need)
    if config.num_fused_shared_experts:
        need = "0, or weights and ids as gating_output: a softmax cannot select shared experts"
        num_shared = config.num_fused_shared_experts
        raise ConfigurationError("num_fused_shared_experts", got=num_shared, need=need)
    if config.routing_method_type is not None:
        need = "None, or weights and ids as gating_output: logits are routed by softmax and top_k"
        got = config.routing_method_type
        raise ConfigurationError("routing_method_type", got=got, need=need)
    # `_fused_experts` raises the error for a w1 that does not have three dimensions.
    if getattr(w1, "ndim", 0) == 3 and experts != count_global_experts(w1, quantization):
        num_experts = count_global_experts(w1, quantization)
        need = f"(..., E) with E = {num_experts}, the number of experts"
        raise ShapeError("gating_output", got=tuple(gating_output.shape), need=need)
    leading_dims = tuple(getattr(hidden_states, "shape", ())[:-1])  # `_fused_experts` checks x
    check_leading_dims("gating_output", gating_output, leading_dims, "E")
    logits_TE = gating_output.reshape(-1, experts)
    routing = route(logits_TE, RouterSpec(top_k, renormalize=renormalize)).routing
    topk_output = StandardTopKOutput(routing.topk_weights_TK, routing.topk_ids_TK, gating_output)
    call = (hidden_states, w1, w2, topk_output, config, quantization)
    return modes.run_without_function_modes(_fused_experts, *call)


def _format_activation(config: MoeRunnerConfig) -> str:
    return str(config.activation_spec())


# torch.compile cannot trace the cache.
_format_activation_cached = lru_cache(maxsize=256)(_format_activation)


def _flatten_tokens(hidden_states: torch.Tensor, *, inplace: bool) -> torch.Tensor:
    """Return x as (T, H).

    inplace: require that the result shares the memory of x.
    """
    if hidden_states.dim() <= 2:
        return hidden_states
    if inplace and not hidden_states.is_contiguous():
        got = f"strides {hidden_states.stride()}"
        raise LayoutError("x of an in-place call", got=got, need="a contiguous tensor")
    return hidden_states.reshape(-1, hidden_states.shape[-1])


def flatten_topk_output(
    topk_output: Sequence[torch.Tensor | None],
    config: MoeRunnerConfig,
    leading_dims: tuple[int, ...] | None = None,
    device: torch.device | None = None,
    *,
    check_memory: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the router's weights, as float32, and its ids, both flattened to (T, K).

    leading_dims: leading dimensions of x, which the ids must also have. None skips this check.
    device: device of x, on which the weights and ids must be. None skips this check.
    check_memory: whether to check that the weights and ids have memory.
    """
    values = topk_output if isinstance(topk_output, list | tuple) else ()
    weights_TK, ids_TK = (*values, None, None)[:2]
    if not isinstance(weights_TK, torch.Tensor) or not isinstance(ids_TK, torch.Tensor):
        got = [type(value).__name__ for value in values] or type(topk_output).__name__
        raise ConfigurationError("topk_output", got=got, need="(weights, ids), both (T, K)")
    if check_memory or not (_has_memory(weights_TK) and _has_memory(ids_TK)):
        tensors_by_name = {"topk_weights": weights_TK, "topk_ids": ids_TK}
        check_tensors(tensors_by_name, device=device, meta=True)
    if needs_gradient((weights_TK,)):
        check_no_gradients({"topk_weights": weights_TK})
    if weights_TK.dtype in (torch.bfloat16, torch.float16):
        weights_TK = weights_TK.float()
    if ids_TK.dim() < 2 or config.top_k not in (None, ids_TK.shape[-1]):
        top_k = "" if config.top_k is None else f" with K = top_k = {config.top_k}"
        raise ShapeError("topk_ids", got=tuple(ids_TK.shape), need=f"(T, K){top_k}")
    if leading_dims is not None:
        check_leading_dims("topk_ids", ids_TK, leading_dims, "K")
    if ids_TK.dim() > 2 and weights_TK.shape == ids_TK.shape:
        shape = (-1, ids_TK.shape[-1])
        return weights_TK.reshape(shape), ids_TK.reshape(shape)
    return weights_TK, ids_TK


def _has_memory(tensor: torch.Tensor) -> bool:
    return is_dense(tensor) and not tensor.is_meta


_peek_functorch_interpreter: Callable[[], object] = torch._C._functorch.peek_interpreter_stack


def _may_skip_dispatcher(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether a call can skip torch's dispatcher to save time.

    A call cannot skip it under torch.compile, a dispatch mode or a function transform, or with
    tensor subclasses, meta tensors or tensors that are not dense.
    """
    if (
        is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or _peek_functorch_interpreter() is not None
    ):
        return False
    for tensor in tensors:  # noqa: SIM110  runs in every call; a generator is slower
        if not is_dense(tensor) or tensor.is_meta:
            return False
    return True


# ------------------------------------------------------------------------------ torch operators
# extras: tensors of an ExpertWeights, in the order of FIELDS.


def _fake_output(hidden_states, w1, w2, topk_weights, topk_ids, extras, *settings):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN002, ANN202
    """Return an empty output. settings[4] is the operator's argument `combine`."""
    tokens, hidden = hidden_states.shape
    topk_dims = () if settings[4] == "sum" else (topk_ids.shape[1],)
    return hidden_states.new_empty((tokens, *topk_dims, hidden))


@register_operator("outplace_fused_experts", _fake_output)
def _run(  # noqa: PLR0913 (the arguments of the operator)
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    extras: Sequence[torch.Tensor | None],
    quant: str,
    activation: str,
    on_input: bool,
    scale: float,
    combine: str,
    chunk_tokens: int | None = None,
) -> torch.Tensor:
    routing = Routing(topk_weights, topk_ids)
    weights = make_weights(w1, w2, extras, quant)
    kernel_options = (quant, activation, on_input, scale, Combine(combine), False, chunk_tokens)
    return get_kernel(hidden_states, weights, routing, kernel_options)(
        hidden_states, weights, routing
    )


outplace_fused_experts = torch.ops.modular_kernel.outplace_fused_experts.default


def _run_in_place(  # noqa: PLR0913 (as the operator below)
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    extras: Sequence[torch.Tensor | None],
    quant: str,
    activation: str,
    on_input: bool,
    scale: float,
    chunk_tokens: int | None = None,
) -> None:
    routing = Routing(topk_weights, topk_ids)
    weights = make_weights(w1, w2, extras, quant)
    kernel_options = (quant, activation, on_input, scale, Combine.SUM, True, chunk_tokens)
    get_kernel(hidden_states, weights, routing, kernel_options)(hidden_states, weights, routing)


inplace_fused_experts = torch.library.custom_op(
    "modular_kernel::inplace_fused_experts", _run_in_place, mutates_args=("hidden_states",)
)
