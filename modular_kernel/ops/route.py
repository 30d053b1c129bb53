"""route: select K experts per token from router logits, and compute their weights, in one launch.

    routed = route(logits_TE, RouterSpec(8, renormalize=True))
    routed.routing                      # the Routing that a kernel takes

`modular_kernel.spec.router.RouterSpec` describes the rules. Three options need additional tensors
or produce an additional result:

- A selection bias is added to the scores to select experts, but does not affect the weights.
- A table assigns fixed experts to each token id of the vocabulary. They are used instead of the
  experts with the top scores.
- A zero expert returns its input. It has a logit, but no parameters.

Logits are converted to float32 first. Under torch.compile and torch.export, a call is one operator,
torch.ops.modular_kernel.route.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import index

import torch
from torch.compiler import is_compiling
from torch.multiprocessing.reductions import StorageWeakRef

from modular_kernel.errors import (
    ConfigurationError,
    DeviceError,
    DtypeError,
    LayoutError,
    ShapeError,
)
from modular_kernel.ops.count import next_power_of_2
from modular_kernel.replay.launch.launch import launch
from modular_kernel.replay.launch.runtime import use_triton
from modular_kernel.replay.operation import ReplayedOperation
from modular_kernel.replay.recording import make_weak_storage_ref
from modular_kernel.spec.problem import dtype_name
from modular_kernel.spec.router import RouterSpec
from modular_kernel.tensors import Routing, check_loaded
from modular_kernel.utils.argument_checks import format_value
from modular_kernel.utils.operator_library import register_operator
from modular_kernel.utils.tensor_checks import check_no_gradients, check_tensor

_FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_INTEGER_DTYPES = (torch.int32, torch.int64)
_LOGITS_PER_PROGRAM = 512  # for one warp, if there are enough tokens
_MAX_TOKENS_ONE_PER_PROGRAM = 1024  # maximum T for which each program handles one token
_FLOAT32_MAX = torch.finfo(torch.float32).max
_MAX_LOADED_LOCATIONS = 1 << 12  # maximum size of _loaded_locations
_launches = ReplayedOperation()
# Id of a pair whose table entry or token id is invalid. Kernels skip such a pair and count it.
INVALID_ID = -2


@dataclass(frozen=True)
class RouterTensors:
    """The tensors that a router needs in addition to its spec, on the device of the logits.

    bias_E: (E + zero experts,) float32, float16 or bfloat16, the selection bias; None unless the
        spec requires it.
    table_VK: (V, K) int32 or int64, contiguous, the experts of each token id; None unless the spec
        requires it.
    unloaded: parameters of the router that may not have been loaded. A call that torch.compile has
        traced raises StateError if one of them has not been loaded. Eager calls do not check them.
    """

    bias_E: torch.Tensor | None = None
    table_VK: torch.Tensor | None = None
    unloaded: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True)
class Routed:
    """The result of `route`.

    routing: the routing of the tokens.
    identity_T: (T,) float32, the total weight of each token's zero experts. The caller must add x
        times identity_T to the output, because a zero expert returns its input x. None if the spec
        has no zero experts.
    """

    routing: Routing
    identity_T: torch.Tensor | None = None


def route(
    logits_TE: torch.Tensor,
    spec: RouterSpec,
    tensors: RouterTensors | None = None,
    *,
    token_ids_T: torch.Tensor | None = None,
    ids_dtype: torch.dtype = torch.int32,
) -> Routed:
    """Select top_k experts per token, and compute their weights.

    logits_TE: (T, E + zero experts) float32, float16 or bfloat16, with contiguous rows.
    spec: rules for selecting and weighting experts.
    tensors: tensors that the spec requires.
    token_ids_T: (T,) int32 or int64, required if the spec has a table. A pair with an invalid token
        id or table entry gets the id -2, which kernels skip and count.
    ids_dtype: dtype of the ids, torch.int32 or torch.int64.

    Raises InputError for invalid arguments, and for tensors that require grad.
    """
    tensors = RouterTensors() if tensors is None else tensors
    _check_arguments(logits_TE, spec, tensors, token_ids_T, ids_dtype)
    if is_compiling():
        return _route_traced(logits_TE, spec, tensors, token_ids_T, ids_dtype)
    return _route_eager(logits_TE, spec, tensors, token_ids_T, ids_dtype)


def _route_eager(
    logits_TE: torch.Tensor,
    spec: RouterSpec,
    tensors: RouterTensors,
    token_ids_T: torch.Tensor | None,
    ids_dtype: torch.dtype,
) -> Routed:
    tokens, device = logits_TE.shape[0], logits_TE.device
    weights_TK = torch.empty(tokens, spec.top_k, dtype=torch.float32, device=device)
    ids_TK = torch.empty(tokens, spec.top_k, dtype=ids_dtype, device=device)
    identity_T: torch.Tensor | None = None
    if spec.zero_experts:
        identity_T = torch.empty(tokens, dtype=torch.float32, device=device)
    routed = Routed(Routing(weights_TK, ids_TK), identity_T)
    if tokens == 0:
        return routed
    if use_triton(logits_TE):
        optional_tensors = (
            logits_TE,
            tensors.bias_E,
            tensors.table_VK,
            token_ids_T,
            weights_TK,
            ids_TK,
        )
        launch_tensors = [
            tensor for tensor in (*optional_tensors, identity_T) if tensor is not None
        ]
        _launches.run(
            spec,
            launch_tensors,
            lambda: _launch(logits_TE, spec, tensors, token_ids_T, routed),
        )
    else:
        route_ref(logits_TE, spec, tensors, token_ids_T, routed)
    return routed


# ----------------------------------------------------------------------------- torch operator


def _make_fake_routing(logits_TE, bias_E, table_VK, token_ids_T, unloaded, spec, wide_ids):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
    """Return empty tensors with the shapes and dtypes of the outputs of `route_op`."""
    parsed_spec, tokens = parse_spec(spec), logits_TE.shape[0]
    shape = (tokens, parsed_spec.top_k)
    return (
        logits_TE.new_empty(shape, dtype=torch.float32),
        logits_TE.new_empty(shape, dtype=torch.int64 if wide_ids else torch.int32),
        logits_TE.new_empty((tokens if parsed_spec.zero_experts else 0,), dtype=torch.float32),
    )


@register_operator("route", _make_fake_routing)
def route_op(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    table_VK: torch.Tensor | None,
    token_ids_T: torch.Tensor | None,
    unloaded: Sequence[torch.Tensor],
    spec: str,
    wide_ids: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (weights (T, K), ids (T, K), identity (T,)), as in `Routed`.

    Without zero experts, identity has the shape (0,), because an operator cannot return None.

    spec: a string from `format_spec`.
    wide_ids: whether ids are int64 instead of int32.

    Raises the errors of `route`.
    """
    parsed_spec = parse_spec(spec)
    tensors = RouterTensors(bias_E, table_VK)
    _check_loaded_once(unloaded)
    ids_dtype = torch.int64 if wide_ids else torch.int32
    _check_arguments(logits_TE, parsed_spec, tensors, token_ids_T, ids_dtype)
    routed = _route_eager(logits_TE, parsed_spec, tensors, token_ids_T, ids_dtype)
    identity_T = routed.identity_T
    if identity_T is None:
        identity_T = torch.empty(0, dtype=torch.float32, device=logits_TE.device)
    return routed.routing.topk_weights_TK, routed.routing.topk_ids_TK, identity_T


def _route_traced(
    logits_TE: torch.Tensor,
    spec: RouterSpec,
    tensors: RouterTensors,
    token_ids_T: torch.Tensor | None,
    ids_dtype: torch.dtype,
) -> Routed:
    """Call the operator, which torch.compile adds to the graph."""
    weights_TK, ids_TK, identity_T = torch.ops.modular_kernel.route.default(
        logits_TE,
        tensors.bias_E,
        tensors.table_VK,
        token_ids_T,
        list(tensors.unloaded),
        format_spec(spec),
        ids_dtype is torch.int64,
    )
    return Routed(Routing(weights_TK, ids_TK), identity_T if spec.zero_experts else None)


def format_spec(spec: RouterSpec) -> str:
    """Return a spec as JSON, using only operations that torch.compile can trace."""
    numbers = [
        f'"{name}": {index(value)}'
        for name, value in (
            ("top_k", spec.top_k),
            ("groups", spec.groups),
            ("topk_groups", spec.topk_groups),
            ("zero_experts", spec.zero_experts),
        )
    ]
    strings = [
        f'"{name}": "{value}"'
        for name, value in (
            ("score", spec.score),
            ("order", spec.order),
            ("group_score", spec.group_score),
        )
    ]
    flags = [
        f'"{name}": {"true" if value else "false"}'
        for name, value in (
            ("selection_bias", spec.selection_bias),
            ("renormalize", spec.renormalize),
            ("table", spec.table),
        )
    ]
    floats = [f'"eps": {float(spec.eps)!r}', f'"floor": {float(spec.floor)!r}']
    return "{" + ", ".join([*numbers, *strings, *flags, *floats]) + "}"


@lru_cache(maxsize=256)
def parse_spec(text: str) -> RouterSpec:
    """Parse a string from `format_spec`; raise ConfigurationError for any other string."""
    try:
        return RouterSpec(**json.loads(text))
    except (ValueError, TypeError) as error:
        if isinstance(error, ConfigurationError):
            raise
        need = "the JSON of a RouterSpec"
        raise ConfigurationError("router spec", got=text[:80], need=need) from None


# Maps the location of each parameter known to be loaded to its storage. References are weak, and
# entries with an expired storage are ignored: a new tensor may have the address of a freed one.
_loaded_locations = dict[tuple[object, ...], StorageWeakRef]()


def _check_loaded_once(tensors: Sequence[torch.Tensor]) -> None:
    """Raise StateError for parameters that are not loaded.

    A parameter that passed the check is not checked again while its storage exists.
    """
    storages, cache = [make_weak_storage_ref(tensor) for tensor in tensors], _loaded_locations
    locations = [
        (storage.cdata, tensor.storage_offset(), tensor.shape)
        for storage, tensor in zip(storages, tensors, strict=True)
    ]
    cached_storages = [cache.get(location) for location in locations]
    if not any(storage is None or storage.expired() for storage in cached_storages):  # type: ignore[no-untyped-call]
        return
    check_loaded({f"parameter {index} of the router": t for index, t in enumerate(tensors)})
    if len(cache) > _MAX_LOADED_LOCATIONS:
        cache.clear()
    cache.update(zip(locations, storages, strict=True))


def _launch(
    logits_TE: torch.Tensor,
    spec: RouterSpec,
    tensors: RouterTensors,
    token_ids_T: torch.Tensor | None,
    routed: Routed,
) -> None:
    from modular_kernel.ops.kernels.route import route_kernel

    tokens, columns = logits_TE.shape
    group_size = columns // spec.groups
    block_g, block_s = next_power_of_2(spec.groups), next_power_of_2(group_size)
    block_t = (
        1
        if tokens <= _MAX_TOKENS_ONE_PER_PROGRAM
        else max(1, _LOGITS_PER_PROGRAM // (block_g * block_s))
    )
    weights_TK, ids_TK = routed.routing.topk_weights_TK, routed.routing.topk_ids_TK
    launch(
        route_kernel,
        (-(-tokens // block_t),),
        logits_ptr=logits_TE,
        bias_ptr=logits_TE if tensors.bias_E is None else tensors.bias_E,
        expert_table_ptr=ids_TK if tensors.table_VK is None else tensors.table_VK,
        token_ids_ptr=ids_TK if token_ids_T is None else token_ids_T,
        topk_weights_ptr=weights_TK,
        topk_ids_ptr=ids_TK,
        zero_expert_weights_ptr=weights_TK if routed.identity_T is None else routed.identity_T,
        num_tokens=tokens,
        num_experts=columns - spec.zero_experts,
        num_columns=columns,
        vocab_size=0 if tensors.table_VK is None else tensors.table_VK.shape[0],
        stride_logits=logits_TE.stride(0),
        eps=float(spec.eps),
        floor=float(spec.floor),
        TOP_K=spec.top_k,
        SCORE=spec.score,
        TOPK_FIRST=spec.order == "topk_first",
        COMPARE_LOGITS=_compares_logits(spec),
        HAS_BIAS=spec.selection_bias,
        HAS_TABLE=spec.table,
        RENORMALIZE=spec.renormalize,
        HAS_ZERO_EXPERTS=spec.zero_experts > 0,
        GROUPS=spec.groups,
        GROUP_SIZE=group_size,
        TOPK_GROUPS=spec.topk_groups,
        TOP2_GROUP_SCORE=spec.group_score == "top2",
        BLOCK_TOKENS=block_t,
        BLOCK_GROUPS=block_g,
        BLOCK_GROUP_SIZE=block_s,
        BLOCK_TOP_K=next_power_of_2(spec.top_k),
        num_warps=1,
    )


def _compares_logits(spec: RouterSpec) -> bool:
    """Return whether experts and groups can be ordered by logits instead of scores."""
    if spec.order == "topk_first":
        return True
    grouped = spec.topk_groups < spec.groups
    return not spec.selection_bias and not (grouped and spec.group_score == "top2")


def route_ref(
    logits_TE: torch.Tensor,
    spec: RouterSpec,
    tensors: RouterTensors,
    token_ids_T: torch.Tensor | None,
    routed: Routed,
) -> None:
    """Torch reference of the kernel, which writes the results to `routed`."""
    not_nan_TE = ~logits_TE.isnan()
    # Clamp infinities to the largest finite values, so that a difference of logits is never NaN.
    logits_TE = logits_TE.float().masked_fill(~not_nan_TE, 0).clamp(-_FLOAT32_MAX, _FLOAT32_MAX)
    score_first = spec.order == "score_first"
    scores_TE = _compute_scores(logits_TE, not_nan_TE, spec) if score_first else logits_TE
    if spec.table:
        ids_TK = _read_table(spec, tensors, token_ids_T, logits_TE.shape[1])
        not_nan_TK = not_nan_TE.gather(1, ids_TK.clamp(min=0))
        ids_TK = torch.where((ids_TK >= 0) & ~not_nan_TK, -1, ids_TK)
    else:
        choice = logits_TE if _compares_logits(spec) else scores_TE
        if tensors.bias_E is not None:
            choice = choice + tensors.bias_E.float()
        choice = choice.masked_fill(~not_nan_TE | choice.isnan(), -torch.inf)
        ids_TK = _find_top_ids(_mask_other_groups(choice, spec), spec.top_k)
    chosen_TK = ids_TK >= 0
    weights_TK = scores_TE.gather(1, ids_TK.clamp(min=0))
    if not score_first:
        weights_TK = _compute_scores(weights_TK, chosen_TK, spec)
    weights_TK = weights_TK.masked_fill(~chosen_TK, 0)
    if spec.renormalize:
        divisor = (weights_TK.sum(1, keepdim=True) + spec.eps).clamp(min=spec.floor)
        weights_TK = weights_TK / torch.where(divisor > 0, divisor, 1)
    if routed.identity_T is not None:
        is_zero_expert_TK = ids_TK >= logits_TE.shape[1] - spec.zero_experts
        routed.identity_T.copy_(torch.where(is_zero_expert_TK, weights_TK, 0).sum(1))
        weights_TK, ids_TK = (
            weights_TK.masked_fill(is_zero_expert_TK, 0),
            ids_TK.masked_fill(is_zero_expert_TK, -1),
        )
    routed.routing.topk_weights_TK.copy_(weights_TK)
    routed.routing.topk_ids_TK.copy_(ids_TK)


def _compute_scores(logits: torch.Tensor, not_nan: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    """Return the score of each logit. A softmax covers only the logits in `not_nan`."""
    if spec.score == "sigmoid":
        return logits.sigmoid()
    if spec.score == "sqrtsoftplus":
        return torch.nn.functional.softplus(logits).sqrt()
    peak = logits.masked_fill(~not_nan, -_FLOAT32_MAX).amax(1, keepdim=True)
    exponentials = (logits - peak).exp().masked_fill(~not_nan, 0)
    total = exponentials.sum(1, keepdim=True)
    return exponentials / torch.where(total > 0, total, 1)


def _mask_other_groups(choice: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    """Return `choice`, with -inf for experts outside the best groups of each token."""
    if spec.topk_groups == spec.groups:
        return choice
    by_group = choice.view(len(choice), spec.groups, -1)
    best = by_group.amax(2)
    if spec.group_score == "top2":
        second = by_group.topk(2, 2).values[..., 1]
        # Halve the values, because their sum may overflow.
        best = best / 2 + torch.where(second > -torch.inf, second, 0) / 2
    best_groups = _find_top_ids(best, spec.topk_groups)
    # If a token has fewer than topk_groups groups to select from, the remaining ids are -1. They
    # mark the last column of the mask, which is dropped below.
    group = torch.where(best_groups >= 0, best_groups, spec.groups)
    mask = best.new_zeros(len(best), spec.groups + 1, dtype=torch.bool).scatter(1, group, True)
    return by_group.masked_fill(~mask[:, :-1, None], -torch.inf).flatten(1)


def _find_top_ids(choice: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ids of the `count` largest values of each row.

    If values are equal, the lower id comes first. The id of a value of -inf is -1.
    """
    values, ids = choice.sort(dim=1, descending=True, stable=True)
    return torch.where(values[:, :count] > -torch.inf, ids[:, :count], -1)


def _read_table(
    spec: RouterSpec, tensors: RouterTensors, token_ids_T: torch.Tensor | None, columns: int
) -> torch.Tensor:
    table_VK = tensors.table_VK
    assert table_VK is not None  # `_check_arguments` has checked both tensors
    assert token_ids_T is not None
    token_id_T = token_ids_T.long()
    valid_T = (token_id_T >= 0) & (token_id_T < table_VK.shape[0])
    if not table_VK.shape[0]:
        return token_id_T.new_full((len(token_id_T), spec.top_k), INVALID_ID)
    ids = table_VK[torch.where(valid_T, token_id_T, 0)].long()
    invalid = ~valid_T[:, None] | (ids < -1) | (ids >= columns)
    return ids.masked_fill(invalid, INVALID_ID)


def _check_arguments(
    logits_TE: torch.Tensor,
    spec: RouterSpec,
    tensors: RouterTensors,
    token_ids_T: torch.Tensor | None,
    ids_dtype: torch.dtype,
) -> None:
    if not isinstance(spec, RouterSpec):
        raise ConfigurationError("router", got=type(spec).__name__, need="a RouterSpec")
    if not isinstance(tensors, RouterTensors):
        raise ConfigurationError(
            "router tensors", got=format_value(tensors), need="RouterTensors or None"
        )
    check_tensor("router logits", logits_TE)
    if logits_TE.dim() != 2:
        raise ShapeError("router logits", got=tuple(logits_TE.shape), need="(T, E)")
    check_no_gradients({"router logits": logits_TE})
    tokens, columns = logits_TE.shape
    spec.columns(columns - spec.zero_experts)
    _check_dtype("router logits", logits_TE, _FLOAT_DTYPES)
    if logits_TE.stride(1) != 1 and tokens:
        got = f"strides {logits_TE.stride()}"
        raise LayoutError("router logits", got=got, need="stride(-1) == 1")
    if ids_dtype not in _INTEGER_DTYPES:
        raise DtypeError("ids_dtype", got=str(ids_dtype), need="torch.int32 or torch.int64")
    device = logits_TE.device
    _check_optional(
        "selection bias", tensors.bias_E, spec.selection_bias, (columns,), _FLOAT_DTYPES, device
    )
    table_VK = tensors.table_VK
    rows = table_VK.shape[0] if isinstance(table_VK, torch.Tensor) and table_VK.dim() else 0
    _check_optional(
        "router table", table_VK, spec.table, (rows, spec.top_k), _INTEGER_DTYPES, device
    )
    _check_optional("token_ids", token_ids_T, spec.table, (tokens,), _INTEGER_DTYPES, device)


def _check_optional(
    what: str,
    tensor: torch.Tensor | None,
    required: bool,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Check a tensor that must be passed if and only if it is required."""
    if not required:
        if tensor is not None:
            need = "None, because the router's spec does not use it"
            raise ConfigurationError(what, got="a tensor", need=need)
        return
    check_tensor(what, tensor)
    assert tensor is not None
    if tuple(tensor.shape) != shape:
        raise ShapeError(what, got=tuple(tensor.shape), need=shape)
    _check_dtype(what, tensor, dtypes)
    if tensor.device != device:
        raise DeviceError(what, got=tensor.device, need=f"{device}, as the logits")
    if not tensor.is_contiguous():
        raise LayoutError(what, got=f"strides {tensor.stride()}", need="contiguous")


def _check_dtype(what: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in dtypes:
        need = " or ".join(map(dtype_name, dtypes))
        raise DtypeError(what, got=dtype_name(tensor.dtype), need=need)
