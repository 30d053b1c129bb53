"""Fuzz targets: calls with tensors in unusual memory: freed, overlapping, misaligned, expanded.

Calls must compute the correct output or raise an error of this package. Freed memory and
overlapping outputs must be refused.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st

from modular_kernel.testing.stress.fuzz.calls import (
    CallCase,
    build_call,
    call_cases,
    check_call,
)
from modular_kernel.testing.stress.fuzz.outcome import (
    INVALID_ACCEPTED,
    TYPED_ERROR,
    FuzzOutcome,
    run_or_classify,
)
from modular_kernel.testing.stress.fuzz.random_problems import CallInputs
from modular_kernel.testing.stress.fuzz.target import Target

# Maps (tensor, amount) to a tensor of the same shape in other memory. The amount is a random number
# that varies details of the layout.
Layout = Callable[[torch.Tensor, int], torch.Tensor]


def _free_memory(tensor: torch.Tensor, _: int) -> torch.Tensor:
    copy = tensor.clone()
    copy.untyped_storage().resize_(0)
    return copy


def _shrink_storage(tensor: torch.Tensor, amount: int) -> torch.Tensor:
    """Return a copy whose storage was resized to hold fewer values than its shape needs."""
    copy = tensor.clone()
    storage = copy.untyped_storage()
    storage.resize_(amount % storage.nbytes())
    return copy


def _end_storage_before_view(tensor: torch.Tensor, amount: int) -> torch.Tensor:
    """Return a view whose storage was resized to end where the view begins."""
    offset = 1 + amount % 7
    flat = torch.cat([tensor.new_zeros(offset), tensor.flatten()])
    view = flat[offset:].view(tensor.shape)
    flat.untyped_storage().resize_(offset * tensor.itemsize)
    return view


def _misalign(tensor: torch.Tensor, amount: int) -> torch.Tensor:
    """Return a view that starts at a misaligned address, between NaN values."""
    offset = 1 + amount % 17
    flat = _surround(tensor.flatten(), offset)
    return flat[offset : offset + tensor.numel()].view(tensor.shape)


def _surround(flat: torch.Tensor, offset: int) -> torch.Tensor:
    padding = flat.new_zeros(offset)
    padding = padding.fill_(torch.nan) if padding.is_floating_point() else padding.fill_(7)
    return torch.cat([padding, flat, padding])


def _transpose(tensor: torch.Tensor, _: int) -> torch.Tensor:
    return tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor


def _permute(tensor: torch.Tensor, amount: int) -> torch.Tensor:
    """Return a tensor with the same values, whose dimensions are stored in another order."""
    order = torch.randperm(tensor.dim(), generator=torch.Generator().manual_seed(amount)).tolist()
    inverse = [order.index(d) for d in range(tensor.dim())]
    return tensor.permute(order).contiguous().permute(inverse)


def _embed_in_wide_rows(tensor: torch.Tensor, amount: int) -> torch.Tensor:
    """Return a view of the first columns of longer rows, whose other columns are NaN."""
    extra = 1 + amount % 5
    padding = tensor.new_zeros(*tensor.shape[:-1], extra)
    padding = padding.fill_(torch.nan) if padding.is_floating_point() else padding.fill_(7)
    return torch.cat([tensor, padding], -1)[..., : tensor.shape[-1]]


def _expand(tensor: torch.Tensor, _: int) -> torch.Tensor:
    """Return the first entry repeated, with stride 0."""
    return tensor[:1].expand(tensor.shape) if len(tensor) else tensor


def _space_elements(tensor: torch.Tensor, amount: int) -> torch.Tensor:
    step = 2 + amount % 3
    return torch.stack([tensor] * step, -1)[..., amount % step]


def _flip(tensor: torch.Tensor, _: int) -> torch.Tensor:
    return tensor.flip(0)


def _use_arbitrary_strides(tensor: torch.Tensor, amount: int) -> torch.Tensor:
    """Return a view whose dimensions of size 1 have arbitrary strides."""
    strides = [
        [0, 1, 3, 10**6, 2**40][amount % 5] if size == 1 else stride
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    return tensor.as_strided(tensor.shape, strides, tensor.storage_offset())


_INVALID_LAYOUTS: dict[str, Layout] = {
    "freed": _free_memory,
    "storage too small": _shrink_storage,
    "storage ends before it": _end_storage_before_view,
}  # fmt: skip
_VALID_LAYOUTS: dict[str, Layout] = {
    "misaligned": _misalign, "transposed": _transpose, "permuted": _permute,
    "in wide rows": _embed_in_wide_rows, "expanded": _expand, "spaced": _space_elements,
    "flipped": _flip, "odd strides": _use_arbitrary_strides,
}  # fmt: skip
_ALL_LAYOUTS = _INVALID_LAYOUTS | _VALID_LAYOUTS


@dataclass(frozen=True)
class LayoutCase:
    """A call with tensors in other memory.

    changes: (index of the tensor, name of the layout, amount) for each change.
    """

    call: CallCase
    changes: list[tuple[int, str, int]]


def check_layouts(case: LayoutCase) -> FuzzOutcome:
    """Call with tensors in unusual memory. The output must be correct, or the error typed."""
    call_or_outcome = build_call(case.call)
    if isinstance(call_or_outcome, FuzzOutcome):
        return call_or_outcome
    kernel, description, inputs = call_or_outcome
    tensors, must_refuse = _list_tensors(inputs), False
    for index, layout, amount in case.changes:
        name = sorted(tensors)[index % len(tensors)]
        if layout in _INVALID_LAYOUTS and not tensors[name].numel():
            continue
        tensors[name] = _ALL_LAYOUTS[layout](tensors[name], amount)
        must_refuse |= layout in _INVALID_LAYOUTS
        description += f", {name} {layout} ({amount})"
        if layout in _INVALID_LAYOUTS:
            break
    changed = _replace_tensors(inputs, tensors)
    if not must_refuse:
        return check_call(kernel, changed, case.call.mode, description, refusable=True)
    run = kernel.plan() if case.call.mode == "plan" else kernel
    result = run_or_classify(
        description, lambda: run(changed.x_TH, changed.weights, changed.routing)
    )
    return result if isinstance(result, FuzzOutcome) else FuzzOutcome(INVALID_ACCEPTED, description)


def _list_tensors(inputs: CallInputs) -> dict[str, torch.Tensor]:
    routing = inputs.routing
    tensors = {name: tensor for name, tensor in vars(inputs.weights).items() if tensor is not None}
    call_tensors = {
        "x": inputs.x_TH,
        "ids": routing.topk_ids_TK,
        "topk_weights": routing.topk_weights_TK,
    }
    return tensors | call_tensors


def _replace_tensors(inputs: CallInputs, tensors: dict[str, torch.Tensor]) -> CallInputs:
    names = vars(inputs.weights).keys() & tensors.keys()
    return replace(
        inputs,
        x_TH=tensors["x"],
        weights=replace(inputs.weights, **{name: tensors[name] for name in names}),
        routing=replace(
            inputs.routing, topk_ids_TK=tensors["ids"], topk_weights_TK=tensors["topk_weights"]
        ),
    )


@dataclass(frozen=True)
class OverlapCase:
    """A call whose output shares memory with itself or with an argument.

    kind: what the output shares memory with.
    amount: random number that determines which tensor and which bytes are shared.
    """

    call: CallCase
    kind: str
    amount: int


def check_overlapping_output(case: OverlapCase) -> FuzzOutcome:
    """Pass an output that shares memory with itself or with an argument. It must be refused."""
    call_or_outcome = build_call(case.call)
    if isinstance(call_or_outcome, FuzzOutcome):
        return call_or_outcome
    kernel, description, inputs = call_or_outcome
    problem = kernel.problem
    shape = (len(inputs.x_TH), *problem.output_shape[1:])
    out = torch.empty(shape, dtype=problem.dtype)
    if out.numel() < 2 or problem.inplace:
        return FuzzOutcome(TYPED_ERROR, description)
    description = f"{description}, out overlaps {case.kind} ({case.amount})"
    if case.kind == "itself":
        dims = [d for d, size in enumerate(shape) if size > 1]
        strides = list(out.stride())
        strides[dims[case.amount % len(dims)]] = 0
        out = out.as_strided(shape, strides)
    else:
        tensors = _list_tensors(inputs)
        name = sorted(tensors)[case.amount % len(tensors)]
        tensor = tensors[name]
        if not tensor.numel():
            return FuzzOutcome(TYPED_ERROR, description)
        # Put the tensor and the output into one block of memory, so that they share the first or
        # the last bytes of the tensor.
        size = tensor.numel() * tensor.itemsize
        is_at_end = case.amount % 2 and size > 64
        start = (size - 1) // 64 * 64 if is_at_end else 0
        shared_memory = torch.zeros(
            start + size + out.numel() * out.itemsize + 64, dtype=torch.uint8
        )
        view = shared_memory[:size].view(tensor.dtype).view(tensor.shape)
        view.copy_(tensor)
        tensors[name] = view
        out = shared_memory[start : start + out.numel() * out.itemsize].view(out.dtype).view(shape)
        inputs = _replace_tensors(inputs, tensors)
        description = f"{description}: {name}, from byte {start}"
    run = kernel.plan() if case.call.mode == "plan" else kernel
    result = run_or_classify(
        description, lambda: run(inputs.x_TH, inputs.weights, inputs.routing, out=out)
    )
    return result if isinstance(result, FuzzOutcome) else FuzzOutcome(INVALID_ACCEPTED, description)


_MODES = ("call", "plan")
_LAYOUTS = st.builds(
    LayoutCase,
    call=call_cases(("call", "plan", "twice", "start")),
    changes=st.lists(
        st.tuples(
            st.integers(0, 59),
            st.one_of(
                st.sampled_from(sorted(_VALID_LAYOUTS)), st.sampled_from(sorted(_ALL_LAYOUTS))
            ),
            st.integers(0, 10**6),
        ),
        min_size=1,
        max_size=3,
    ),
)
_OVERLAPS = st.builds(
    OverlapCase,
    call=call_cases(_MODES),
    kind=st.sampled_from(("itself", "an argument", "an argument")),
    amount=st.integers(0, 10**6),
)
TARGETS: tuple[Target[Any], ...] = (
    Target("layouts", 4, _LAYOUTS, check_layouts, launches=True),
    Target("overlapping_outputs", 1, _OVERLAPS, check_overlapping_output, launches=True),
)
