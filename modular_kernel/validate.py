"""Checks of a call's tensors against the problem, before anything is launched.

Most checks read only shapes, dtypes, devices and strides, and therefore do not synchronize. Checks
for checked mode (`FusedMoEModularKernel(checked=True)`) read values, which synchronizes.
"""

import torch

from modular_kernel.errors import (
    CapacityError,
    ConfigurationError,
    DeviceError,
    DtypeError,
    LayoutError,
    RoutingError,
    ShapeError,
    WeightsError,
)
from modular_kernel.quant.quantized_weights import SCALE_FIELDS, check_weights_quantized
from modular_kernel.spec.lora import NO_ADAPTERS
from modular_kernel.spec.problem import Combine, Problem, dtype_name
from modular_kernel.tensors import ExpertWeights, Routing, check_activation_scales
from modular_kernel.text import format_count
from modular_kernel.utils.tensor_checks import (
    check_no_gradients,
    check_storage,
    check_strided,
    is_dense,
    is_overlapping,
)

_ID_DTYPES = (torch.int32, torch.int64)
# Shapes of the adapter tensors; dimension letters as in `modular_kernel.tensors`.
ADAPTER_TENSORS = {
    "lora_a13": "(L, e or 1, 2R or R, H)",
    "lora_b13": "(L, e, N, R)",
    "lora_a2": "(L, e, R, I)",
    "lora_b2": "(L, e or 1, H, R)",
}


def count_tokens(x_TH: object) -> int:
    """Return T. Raises ShapeError unless x is a dense (T, H) tensor."""
    check_strided("x", x_TH)
    assert isinstance(x_TH, torch.Tensor)
    if x_TH.dim() != 2:
        raise ShapeError("x", got=tuple(x_TH.shape), need="(T, H)")
    return x_TH.shape[0]


def check_dense(x_TH: object, routing: Routing, out: object) -> None:
    """Check that x, the routing tensors and `out` are strided, not sparse. `out` may be None."""
    if type(routing) is Routing and routing.adapters_T is None and out is None:
        for tensor in (x_TH, routing.topk_weights_TK, routing.topk_ids_TK):
            if not is_dense(tensor):
                break
        else:  # fast path: all tensors are dense
            return
    check_strided("x", x_TH)
    if not isinstance(routing, Routing):
        raise RoutingError("routing", got=type(routing).__name__, need="a Routing")
    check_strided("topk_weights", routing.topk_weights_TK)
    check_strided("topk_ids", routing.topk_ids_TK)
    adapters: object = routing.adapters_T
    if isinstance(adapters, str) and adapters != NO_ADAPTERS:
        raise RoutingError("adapters", got=repr(adapters[:80]), need='a tensor, "none" or None')
    if not (adapters is None or isinstance(adapters, str)):
        check_strided("adapters", adapters)
    if out is not None:
        check_strided("out", out)


def check_adapters_present(routing: Routing, problem: Problem) -> None:
    """Check that routing.adapters_T is set if and only if the problem has adapters.

    If the problem has adapters but no token of the call uses one, routing.adapters_T must be "none"
    instead of None. A caller who forgets to pass the adapters therefore gets an error.
    """
    has_adapters = routing.adapters_T is not None
    if has_adapters != (problem.adapters is not None):
        got, need = "None", f'(T,) int32 slots for lora={problem.lora}, or "none"'
        if has_adapters:
            got, need = "slots", "None, because the problem has no adapters"
        raise RoutingError("adapters", got=got, need=need)


def check_memory(x_TH: torch.Tensor, routing: Routing, out: torch.Tensor | None) -> None:
    """Check that x, the routing tensors and `out` have storage, unlike meta and fake tensors."""
    check_storage("x", x_TH)
    check_storage("topk_weights", routing.topk_weights_TK)
    check_storage("topk_ids", routing.topk_ids_TK)
    if (slots_T := routing.slots_T) is not None:
        check_storage("adapters", slots_T)
    if out is not None:
        check_storage("out", out)


def _check_shape(what: str, tensor: torch.Tensor, need: tuple[int, ...], dim_names: str) -> None:
    if tensor.shape != need:
        raise _make_shape_error(what, tensor, need, dim_names)


def _make_shape_error(
    what: str, tensor: torch.Tensor, need: tuple[int, ...], dim_names: str
) -> ShapeError:
    return ShapeError(what, got=tuple(tensor.shape), need=f"{dim_names} = {need}")


def _check_dtype(what: str, tensor: torch.Tensor, *need: torch.dtype) -> None:
    if tensor.dtype not in need:
        raise _make_dtype_error(what, tensor, *need)


def _make_dtype_error(what: str, tensor: torch.Tensor, *need: torch.dtype) -> DtypeError:
    names = " or ".join(dtype_name(d) for d in need)
    return DtypeError(what, got=dtype_name(tensor.dtype), need=names)


def _check_device(what: str, tensor: torch.Tensor, need: torch.device) -> None:
    if tensor.device != need:
        raise _make_device_error(what, tensor, need)


def _make_device_error(what: str, tensor: torch.Tensor, need: torch.device) -> DeviceError:
    return DeviceError(what, got=tensor.device, need=f"{need}, as x")


def check_input(x_TH: torch.Tensor, problem: Problem, device_type: str) -> None:
    """Check the shape (T, H), the dtype, the device and the strides of x.

    T must be at most problem.tokens.

    device_type: device type of the kernel.
    """
    if x_TH.dim() != 2 or x_TH.shape[1] != problem.hidden:
        raise ShapeError("x", got=tuple(x_TH.shape), need=f"(T, H) with H = {problem.hidden}")
    if x_TH.device.type != device_type:
        raise DeviceError("x", got=x_TH.device, need=f"a {device_type} tensor for this kernel")
    _check_dtype("x", x_TH, problem.dtype)
    if x_TH.shape[0] > problem.tokens:
        raise CapacityError("tokens", got=x_TH.shape[0], need=f"<= problem.tokens {problem.tokens}")
    if x_TH.stride(1) != 1 and x_TH.shape[0] > 0 and problem.hidden > 1:
        raise LayoutError(
            "x", got=f"strides {x_TH.stride()}", need="contiguous rows (stride(-1) == 1)"
        )
    if problem.inplace and not x_TH.is_contiguous():
        got = f"strides {x_TH.stride()}"
        raise LayoutError("x of an in-place call", got=got, need="a contiguous tensor")


def check_routing(
    routing: Routing,
    x_TH: torch.Tensor,
    problem: Problem,
    ids_dtype: torch.dtype | None = None,
) -> None:
    """Check that weights (float32) and ids (integer) are contiguous (T, K), on the device of x.

    ids_dtype: the only dtype of ids that the part accepts; None accepts any.
    """
    need = (x_TH.shape[0], problem.top_k)
    for what, tensor in (
        ("topk_weights", routing.topk_weights_TK),
        ("topk_ids", routing.topk_ids_TK),
    ):
        if tensor.shape != need:
            raise _make_shape_error(what, tensor, need, "(T, K)")
        if tensor.device != x_TH.device:
            raise _make_device_error(what, tensor, x_TH.device)
        if not tensor.is_contiguous():
            raise LayoutError(what, got=f"strides {tensor.stride()}", need="contiguous (T, K)")
    weights_TK, ids_TK = routing.topk_weights_TK, routing.topk_ids_TK
    if weights_TK.dtype is not torch.float32:
        raise _make_dtype_error("topk_weights", weights_TK, torch.float32)
    # If both are set, they are equal: a compatibility rule checks this.
    required = ids_dtype or problem.ids_dtype
    allowed = _ID_DTYPES if required is None else (required,)
    if ids_TK.dtype not in allowed:
        raise _make_dtype_error("topk_ids", ids_TK, *allowed)
    check_adapters_present(routing, problem)
    if (slots_T := routing.slots_T) is not None:
        _check_shape("adapters", slots_T, (x_TH.shape[0],), "(T,)")
        _check_dtype("adapters", slots_T, torch.int32)
        _check_device("adapters", slots_T, x_TH.device)
        if not slots_T.is_contiguous():
            raise LayoutError("adapters", got=f"strides {slots_T.stride()}", need="contiguous (T,)")


def check_ids(routing: Routing, problem: Problem) -> None:
    """Raise RoutingError unless every id is in [-1, E).

    For checked mode. Synchronizes with the device.
    """
    ids = routing.topk_ids_TK
    if got := _describe_out_of_range(ids, -1, problem.experts, "id"):
        raise RoutingError("topk_ids", got=got, need=f"-1 or 0 to {problem.experts - 1}")


def check_adapter_slots(routing: Routing, problem: Problem) -> None:
    """Raise RoutingError unless every adapter slot is in [-1, L).

    For checked mode. Synchronizes with the device.
    """
    slots_T, spec = routing.slots_T, problem.adapters
    if slots_T is None or spec is None:
        return
    if got := _describe_out_of_range(slots_T, -1, spec.adapters, "slot", "of token"):
        raise RoutingError("adapters", got=got, need=f"-1 or 0 to {spec.adapters - 1}")


def check_expert_map(weights: ExpertWeights, problem: Problem) -> None:
    """Raise WeightsError unless every value of expert_map is in [-1, e).

    For checked mode. Synchronizes with the device.
    """
    expert_map_E = weights.expert_map
    if expert_map_E is None:
        return
    if got := _describe_out_of_range(expert_map_E, -1, problem.e, "value"):
        raise WeightsError("expert_map", got=got, need=f"-1 or 0 to {problem.e - 1}")


def check_w1_order(weights: ExpertWeights, problem: Problem) -> None:
    """Raise WeightsError unless every value of w1_order is in [0, H).

    For checked mode. Synchronizes with the device.
    """
    order_eH = weights.w1_order
    if order_eH is None:
        return
    if got := _describe_out_of_range(order_eH, 0, problem.hidden, "value"):
        raise WeightsError("w1_order", got=got, need=f"0 to {problem.hidden - 1}")


def check_static_scales(weights: ExpertWeights) -> None:
    """Raise WeightsError unless a1_scale and a2_scale are positive with finite inverses.

    For checked mode. Synchronizes with the device.
    """
    for name in ("a1_scale", "a2_scale"):
        scale: torch.Tensor | None = getattr(weights, name)
        if scale is not None:
            check_activation_scales(name, scale)


def _describe_out_of_range(
    values: torch.Tensor, start: int, end: int, what: str, preposition: str = "at"
) -> str:
    """Return the number of values outside [start, end) and the first such value, as text.

    Returns "" if all values are inside.

    what: noun for a value.
    preposition: preposition before the position of the value.
    """
    is_outside = (values < start) | (values >= end)
    if not bool(is_outside.any()):
        return ""
    index = tuple(is_outside.nonzero()[0].tolist())
    position = index[0] if len(index) == 1 else index
    return (
        f"{format_count(int(is_outside.sum()), what)}, the first {int(values[index])} "
        f"{preposition} {position}"
    )


def check_weights(weights: ExpertWeights, x_TH: torch.Tensor, problem: Problem) -> None:
    """Check that w1, w2, scales, biases, expert_map and adapters match the problem.

    Unquantized w1 is (e, N, H) and w2 is (e, H, I). `modular_kernel.quant.quantized_weights`
    describes the tensors of other schemes.
    """
    if not isinstance(weights, ExpertWeights):
        raise WeightsError("weights", got=type(weights).__name__, need="ExpertWeights")
    check_strided("w1", weights.w1)
    check_strided("w2", weights.w2)
    for name, tensor in vars(weights).items():
        if tensor is not None:
            check_strided(name, tensor)
            check_storage(name, tensor)
    e, n, h, i = problem.e, problem.w1_rows, problem.hidden, problem.intermediate
    if problem.scheme.quantized:
        check_weights_quantized(weights, problem, x_TH.device)
    else:
        rows = "2I" if problem.act.gated else "I"
        _check_shape("w1", weights.w1, (e, n, h), f"(e, {rows}, H)")
        _check_shape("w2", weights.w2, (e, h, i), "(e, H, I)")
        _check_dtype("w1", weights.w1, problem.dtype)
        _check_dtype("w2", weights.w2, problem.dtype)
        _check_no_scales(weights)
    _check_optional("b1", weights.b1, problem.bias, (e, n), x_TH, (torch.float32, problem.dtype))
    _check_optional("b2", weights.b2, problem.bias, (e, h), x_TH, (torch.float32, problem.dtype))
    shape = (problem.experts,)
    _check_optional(
        "expert_map", weights.expert_map, problem.expert_map, shape, x_TH, (torch.int32,)
    )
    _check_device("w1", weights.w1, x_TH.device)
    _check_device("w2", weights.w2, x_TH.device)
    _check_adapters(weights, x_TH, problem)


def _check_adapters(weights: ExpertWeights, x_TH: torch.Tensor, problem: Problem) -> None:
    """Check the adapter matrices. Their last dimension must be contiguous."""
    spec = problem.adapters
    if spec is None:
        present = [name for name in ADAPTER_TENSORS if getattr(weights, name) is not None]
        if present:
            need = "no adapters, as the problem declares"
            raise WeightsError("adapters", got=", ".join(present), need=need)
        return
    sizes = problem.e, problem.w1_rows, problem.hidden, problem.intermediate
    for name, shape in spec.shapes(*sizes).items():
        tensor: torch.Tensor | None = getattr(weights, name)
        if tensor is None:
            raise WeightsError(name, got="None", need=f"{shape} for lora={problem.lora}")
        _check_shape(name, tensor, shape, ADAPTER_TENSORS[name])
        _check_dtype(name, tensor, problem.dtype)
        _check_device(name, tensor, x_TH.device)
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            got = f"strides {tensor.stride()}"
            raise LayoutError(name, got=got, need="a contiguous last dimension")


def _check_no_scales(weights: ExpertWeights) -> None:
    present = [name for name in SCALE_FIELDS if getattr(weights, name) is not None]
    if present:
        need = "no scales or zero points for quant=none"
        raise WeightsError("expert weights", got=", ".join(present), need=need)


def _check_optional(
    what: str,
    tensor: torch.Tensor | None,
    required: bool,
    shape: tuple[int, ...],
    x_TH: torch.Tensor,
    dtypes: tuple[torch.dtype, ...],
) -> None:
    """Check that a tensor is given if and only if it is required, and check a given tensor."""
    if (tensor is not None) != required:
        got, need = ("a tensor", "None") if tensor is not None else ("None", f"{shape}")
        raise WeightsError(what, got=got, need=f"{need}, as the problem declares")
    if tensor is None:
        return
    _check_shape(what, tensor, shape, "shape")
    _check_dtype(what, tensor, *dtypes)
    _check_device(what, tensor, x_TH.device)
    if not tensor.is_contiguous():
        raise LayoutError(what, got=f"strides {tensor.stride()}", need="contiguous")


def check_out(out: torch.Tensor, x_TH: torch.Tensor, problem: Problem) -> None:
    """Check that out is contiguous (T, H) or (T, K, H), with the dtype and device of x.

    If the problem is inplace, out must be x.
    """
    if problem.inplace and out is not x_TH:
        need = "None, because problem.inplace writes to x"
        raise ConfigurationError("out", got="a tensor", need=need)
    tokens = x_TH.shape[0]
    middle = () if problem.combine is Combine.SUM else (problem.top_k,)
    _check_shape("out", out, (tokens, *middle, problem.hidden), "(T, [K,] H)")
    _check_dtype("out", out, problem.dtype)
    _check_device("out", out, x_TH.device)
    if not out.is_contiguous():
        raise LayoutError("out", got=f"strides {out.stride()}", need="contiguous")


def check_no_overlap(
    output: torch.Tensor,
    x_TH: torch.Tensor,
    weights: ExpertWeights,
    routing: Routing,
    *,
    inplace: bool,
) -> None:
    """Check that the tensor that a call writes does not share memory with its inputs.

    A kernel may write output elements before it has read all inputs.

    output: `out`, or x if `inplace`.
    """
    what = "x of an in-place call" if inplace else "out"
    inputs: dict[str, torch.Tensor | None] = {} if inplace else {"x": x_TH}
    inputs |= {"topk_weights": routing.topk_weights_TK, "topk_ids": routing.topk_ids_TK}
    inputs["adapters"] = routing.slots_T
    inputs |= vars(weights)
    for name, tensor in inputs.items():
        if tensor is not None and is_overlapping(output, tensor):
            need = "separate memory" + (", or inplace=True" if name == "x" else "")
            raise ConfigurationError(what, got=f"the memory of {name}", need=need)


def check_no_grad(
    x_TH: torch.Tensor, weights: ExpertWeights, routing: Routing, out: torch.Tensor | None
) -> None:
    """Raise InputError if a tensor requires grad, because kernels do not compute gradients."""
    tensors = {"x": x_TH, "topk_weights": routing.topk_weights_TK, "out": out}
    check_no_gradients(tensors | vars(weights))
