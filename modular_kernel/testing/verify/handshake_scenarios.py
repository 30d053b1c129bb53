"""Checks for the "misunderstood" fault scenario: calls without an agreement on the host.

Usually, the hosts of all ranks agree on the number of rows before each call. With `checked=False`
they agree only in the first call of a layer. Later calls exchange blocks of a fixed capacity, and
the headers of the blocks are compared on the device.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch

from modular_kernel.contracts import CallState
from modular_kernel.errors import CommunicationError
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.testing.cases.ranks import PLACEMENTS
from modular_kernel.testing.cases.scenario_names import (
    can_skip_host_handshakes,
    find_manager_class,
)
from modular_kernel.testing.verify.call_scenarios import check_nearest_copies
from modular_kernel.testing.verify.failure_scenarios import SimulatedManager
from modular_kernel.testing.verify.manager_scenarios import has_builtin_classes
from modular_kernel.testing.verify.operation_cases import check_operation_cases
from modular_kernel.testing.verify.problem_scenarios import NEED_SAME_CALL, Outcomes
from modular_kernel.testing.verify.scenario_context import ScenarioContext, capture_outcome
from modular_kernel.workspace import Workspace

# The fields of a header: the numbers of the layer and of the call, a hash of the order of
# exchanges, the number of tokens, the maximum number of rows for one rank, the code of an error
# that refused the call (or -1), and the number of rows in this block.
_HEADER = {"layer": 4, "call": 3, "order": 77, "tokens": 3, "rows": 2, "refusal": -1, "sent": 0}
_MAX_TOKENS, _MAX_ROWS = 5, 4
_ALIGNMENT = 16  # bytes; sections of rows and blocks begin at a multiple of it
_RANK, _WORLD_SIZE = 2, 6  # of the simulated manager
_CHANGED_RANK = 3  # the rank whose header is changed
_SAME_CALL = "one layer, call and order"
# Changes of the headers of all ranks. Errors must not name ranks whose values are at a limit.
_BASES: tuple[Mapping[str, int], ...] = (
    {},
    {"tokens": 0, "rows": 0},
    {"tokens": _MAX_TOKENS, "rows": _MAX_ROWS},
)
# Each row has the changes of one rank's header, whether all ranks must have the same number of
# tokens, and the expected `got` and `need` of the error. Both are "" if the headers are valid.
_HEADERS: tuple[tuple[Mapping[str, int], bool, str, str], ...] = (
    ({}, True, "", ""),
    ({"tokens": 0, "rows": 0, "sent": 99}, False, "", ""),
    ({"tokens": _MAX_TOKENS, "rows": _MAX_ROWS}, False, "", ""),
    ({"layer": 5}, False, "layer 4, 4, 4, 5, 4, 4 by rank", _SAME_CALL),
    ({"call": 2}, False, "call 3, 3, 3, 2, 3, 3 by rank", _SAME_CALL),
    ({"order": 78}, False, "a different order of earlier exchanges", _SAME_CALL),
    ({"tokens": 2}, True, "T = 3, 3, 3, 2, 3, 3 by rank", "the same tokens on all"),
    ({"tokens": -1}, False, "-1 tokens from rank 3", f"0 to {_MAX_TOKENS}"),
    ({"tokens": _MAX_TOKENS + 1}, False, "6 tokens from rank 3", f"0 to {_MAX_TOKENS}"),
    ({"rows": -1}, False, "-1 rows for one rank from rank 3", f"0 to {_MAX_ROWS}"),
    ({"rows": _MAX_ROWS + 1}, False, "5 rows for one rank from rank 3", f"0 to {_MAX_ROWS}"),
    (
        {"refusal": 0, "layer": 5},
        False,
        "rank 3 refused its call 3 of layer 5 with an error",
        "calls that every rank accepts",
    ),
    (
        {"refusal": 5},
        False,
        "rank 3 refused its call 3 of layer 4 with DtypeError",
        "calls that every rank accepts",
    ),
)


def check_calls_without_agreement(context: ScenarioContext) -> Outcomes:
    """Run the operations alone, then make calls with blocks of a fixed capacity.

    The calls belong to layers whose blocks have different sizes.
    """
    yield from check_operation_cases(context.part)
    if not can_skip_host_handshakes(context.part):
        return
    manager_class = find_manager_class(context.part)
    manager = manager_class(None, checked=False)
    parallel, tokens = context.case.problem.parallel, context.case.problem.tokens
    with_copies = PLACEMENTS["copies"](context.case.problem.experts, context.world_size)
    changes: tuple[dict[str, Any], ...] = (
        {},
        {"parallel": replace(parallel, placement=with_copies, rank=0), "dtype": torch.float16},
        {"max_received": context.world_size * tokens + 1, "tokens": tokens + 1},
        {"quant": "fp8_w8a8_block:block=16x16", "dtype": torch.bfloat16},
        {"quant": "fp8_w8a8_tensor", "max_received": context.world_size * tokens},
        {"quant": "int8_w8a8_channel", "apply_router_weight_on_input": True, "top_k": 1},
        {"lora": "adapters=3,rank=7"},
        {"lora": "adapters=3,rank=7", "max_received": context.world_size * tokens},
    )
    for change in changes:
        changed_context = context.with_changed_problem(**change)
        if changed_context is None:
            continue
        kernel = changed_context.make_kernel_on(manager)
        for _ in range(2):  # the ranks agree on the host in the first call only
            yield changed_context.make_correct_call(kernel)
        yield from check_device_handshake(changed_context, kernel)
        yield from _check_alignment(changed_context, kernel)
        yield from _check_call_state(changed_context, kernel)
    yield from _call_different_layers(context, manager)
    yield from check_nearest_copies(context, manager)
    manager.destroy()


def _check_alignment(context: ScenarioContext, kernel: FusedMoEModularKernel) -> Outcomes:
    """Check that the sections of packed rows and of blocks are aligned, without unused space."""
    part: Any = kernel.prepare_finalize
    if not has_builtin_classes(context) or not hasattr(part, "rows"):
        return
    for layout in (part.rows.layout(quantized=False), *part._layouts.values()):
        starts = [start for start, *_ in layout.sections.values()]
        sizes = [
            math.prod((shape,) if isinstance(shape, int) else shape) * dtype.itemsize
            for _, shape, dtype in layout.sections.values()
        ]
        ends = [*starts[1:], starts[-1] + sizes[-1]]
        unused = [end - start - size for start, end, size in zip(starts, ends, sizes, strict=True)]
        is_aligned = not any(start % _ALIGNMENT for start in (*starts, layout.nbytes))
        is_aligned &= all(0 <= size < _ALIGNMENT for size in unused)
        yield f"{starts}: {is_aligned}", f"{starts}: True"


class _RecordingWorkspace:
    """A workspace that records the shape of each buffer that is taken."""

    def __init__(self, workspace: Workspace, shapes: dict[str, tuple[int, ...]]) -> None:
        self._workspace, self._shapes = workspace, shapes

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        self._shapes[name] = tuple(shape)
        return self._workspace.take(name, shape)


def _check_call_state(context: ScenarioContext, kernel: FusedMoEModularKernel) -> Outcomes:
    """Check that `CallState.peers_notified` is set in time, and check the sizes of the buffers.

    The flag must be set before the first exchange on a GPU. Otherwise, an error after this exchange
    would be reported as a refusal, which is an exchange that the other ranks do not make. On a CPU,
    ranks exchange values earlier, which already sets the flag, so the check clears it first.

    The buffers that a call takes must have the shapes that an exchange of fixed capacity declares.
    """
    if not has_builtin_classes(context):
        return
    part: Any = kernel.prepare_finalize
    handshake = _get_handshake(part)
    exchange: Any = getattr(part, "fixed_capacity", None)
    original_begin, calls, flags = handshake.begin, list[CallState](), list[bool]()
    shapes = dict[str, tuple[int, ...]]()

    def begin_on_gpu(call: CallState, *args: Any) -> Any:
        step = original_begin(call, *args)
        calls.append(call)
        call.peers_notified = False
        call.workspace = cast("Workspace", _RecordingWorkspace(call.workspace, shapes))
        return step

    def reduce_amax(*args: Any) -> Any:
        flags.append(calls[-1].peers_notified)
        return type(exchange).reduce_amax(exchange, *args)

    handshake.begin = begin_on_gpu
    if exchange is not None:
        exchange.reduce_amax = reduce_amax
    yield context.make_correct_call(kernel)
    del handshake.begin
    if exchange is not None:
        del exchange.reduce_amax
        specs = exchange.specs((exchange._layout,))
        declared = {name: tuple(spec.shape) for name, spec in specs.items()}
        yield str({name: shapes.get(name) for name in declared}), str(declared)
    flags += [call.peers_notified for call in calls]
    yield f"{len(calls)} call, known: {all(flags)}", "1 call, known: True"


def _call_different_layers(context: ScenarioContext, manager: Any) -> Outcomes:
    """On rank 1, make or refuse the first call of a layer, while the others call another layer.

    The others have made calls of their layer before, so that they exchange other values. Every rank
    must raise an error, and the next calls must be correct.
    """
    if not has_builtin_classes(context):
        return
    kernels = [context.make_kernel_on(manager) for _ in range(2)]
    numbers = [cast("Any", kernel.prepare_finalize).layer.number for kernel in kernels]
    yield context.make_correct_call(kernels[0])
    kernel, layer, call = (
        (kernels[1], numbers[1], 1) if context.is_faulty_rank else (kernels[0], numbers[0], 2)
    )
    outcome = capture_outcome(lambda: context.compare(context.call(kernel)))
    properties = (
        "another dtype, scheme, placement, activation, pairing or adapters"
        if context.is_faulty_rank
        else "blocks of another size, or the first call of a layer"
    )
    got = (
        f"{context.format_by_rank('layer', *numbers)}; {context.format_by_rank('call', 2, 1)}; "
        f"{properties}"
    )
    yield (
        outcome,
        context.format_call_number_error(
            got, NEED_SAME_CALL, layer=layer, call=call, step=manager.step
        ),
    )
    x_TH = context.sample.inputs.x_TH.double()  # another dtype, which rank 1 refuses
    outcome = capture_outcome(lambda: context.compare(context.call(kernel, x_TH=x_TH)))
    got = f"rank 1 refused its call 1 of layer {numbers[1]} with DtypeError"
    yield (
        outcome,
        "DtypeError"
        if context.is_faulty_rank
        else context.format_call_number_error(
            got, "calls that every rank accepts", layer=layer, call=call, step=manager.step
        ),
    )
    for kernel in kernels:
        yield context.make_correct_call(kernel)


def _get_handshake(part: Any) -> Any:
    """Return the device handshake of a part that makes calls without an agreement."""
    handshake = getattr(part, "_device_handshake", None)
    return part.fixed_capacity._handshake if handshake is None else handshake


def check_device_handshake(context: ScenarioContext, kernel: FusedMoEModularKernel) -> Outcomes:
    """Compare headers of a simulated group of six ranks on the device, and check the limits.

    kernel: has made a call on a manager with `checked=False`.
    """
    part: Any = kernel.prepare_finalize
    if not has_builtin_classes(context):
        return
    handshake = _get_handshake(part)
    for base_changes in _BASES:
        for changes, equal_tokens, reason, need in _HEADERS:
            if not base_changes or "from rank" in reason:
                header = _HEADER | dict(base_changes)
                yield _verify_headers(
                    handshake, part.manager, header, changes, equal_tokens, reason, need
                )
    problem, replicated = context.case.problem, context.part.requires.replicated_input
    rows = problem.tokens
    if problem.max_received is not None:  # the same number of rows from each rank
        rows = min(rows, problem.max_received // context.world_size)
    limits = [problem.tokens, 0 if replicated else rows, int(replicated), 1]
    yield f"limits {handshake.limits.tolist()}", f"limits {limits}"


def _verify_headers(
    handshake: Any,
    manager: Any,
    header: Mapping[str, int],
    changes: Mapping[str, int],
    equal_tokens: bool,
    reason: str,
    need: str,
) -> tuple[str, str]:
    """Compare headers, first with a changed one, then valid ones; return (actual, expected).

    header: the header of the other ranks.
    """
    status_class = type(handshake.status)
    status = status_class(_WORLD_SIZE, torch.device(manager.device))
    simulated = SimulatedManager(manager, {}).manager
    simulated.device_status = status
    handshake_copy = copy.copy(handshake)
    handshake_copy.layer = replace(handshake.layer, manager=simulated)
    changed_header = {**header, **changes}
    headers_WF = torch.tensor([[*header.values()]] * _WORLD_SIZE)
    local_header_F = headers_WF[0].clone()
    headers_WF[_CHANGED_RANK] = torch.tensor([*changed_header.values()])
    limits = torch.tensor([_MAX_TOKENS, _MAX_ROWS, int(equal_tokens), 1])
    status.verify(headers_WF, local_header_F, limits)
    outcomes = [f"failed {int(status.failed)}", _raise_failure(handshake_copy)]
    outcomes.append(capture_outcome(lambda: str(handshake_copy.raise_failure())))  # raised once
    outcomes.append(f"closed: {simulated._communicator.group is None}")
    outcomes.append(capture_outcome(lambda: str(handshake_copy.check())).partition(", need")[0])
    # A later call does not replace the headers of the first one that failed.
    status.verify(local_header_F.expand_as(headers_WF).contiguous(), local_header_F, limits)
    outcomes.append(f"failed {int(status.failed)}")
    kept_failure = status.failure()
    outcomes.append(
        "none" if kept_failure is None else str(kept_failure.headers[_CHANGED_RANK][:3])
    )
    if not reason:
        return "; ".join(outcomes), "failed 0; no error; None; closed: False; None; failed 0; none"
    position = changed_header["layer"], changed_header["call"], changed_header["order"]
    got = f"{reason}; rank 3: on host b"
    first_error = f"({_CHANGED_RANK},) dispatch of call 3 of layer 4: {got}, {need}"
    later_error = (
        f"({_RANK}, 'dispatch', 0, 0, 0, (3,)) exchange between ranks: got a manager that failed "
        f"before: {reason}"
    )
    expected = f"failed 1; {first_error}; None; closed: True; {later_error}; failed 1; {position}"
    return "; ".join(outcomes), expected


def _raise_failure(handshake: Any) -> str:
    """Return the error of the handshake, with the ranks and the call that it names."""
    try:
        handshake.raise_failure()
    except CommunicationError as error:
        call = f"call {error.call} of layer {error.layer}"
        return f"{error.peers} {error.phase} of {call}: {error.got}, {error.need}"
    return "no error"
