"""Checks for the "misunderstood" fault scenario: calls without an agreement on the host.

Usually, the hosts of all ranks agree on the number of rows before each call. With `checked=False`
they agree only in the first call of a layer. Later calls exchange blocks of a fixed capacity, and
the headers of the blocks are compared on the device.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

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
from modular_kernel.testing.verify.problem_scenarios import Outcomes
from modular_kernel.testing.verify.scenario_context import ScenarioContext, capture_outcome

# The fields of a header: the numbers of the layer and of the call, a hash of the order of
# exchanges, the number of tokens, the maximum number of rows for one rank, the code of an error
# that refused the call (or -1), and the number of rows in this block.
_HEADER = {"layer": 4, "call": 3, "order": 77, "tokens": 3, "rows": 2, "refusal": -1, "sent": 0}
_MAX_TOKENS, _MAX_ROWS = 5, 4
_ALIGNMENT = 16  # bytes; sections of rows and blocks begin at a multiple of it
_RANK, _WORLD_SIZE = 2, 6  # of the simulated manager
_CHANGED_RANK = 3  # the rank whose header is changed
_SAME_CALL = "one layer, call and order"
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

    The layers of the calls have different blocks.
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
        {"max_received": context.world_size * tokens, "tokens": tokens + 1},
        {"quant": "fp8_w8a8_block:block=16x16", "dtype": torch.bfloat16},
        {"quant": "fp8_w8a8_tensor", "max_received": context.world_size * tokens},
        {"quant": "int8_w8a8_channel", "apply_router_weight_on_input": True, "top_k": 1},
        {"lora": "adapters=3,rank=7"},
        {"lora": "adapters=3,rank=7", "max_received": context.world_size * tokens},
    )
    for change in changes:
        changed = context.for_changed_problem(**change)
        if changed is None:
            continue
        kernel = changed.make_kernel_on(manager)
        for _ in range(2):  # the ranks agree on the host in the first call only
            yield changed.make_correct_call(kernel)
        yield from check_device_handshake(changed, kernel)
        yield from _check_alignment(changed, kernel)
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


def check_device_handshake(context: ScenarioContext, kernel: FusedMoEModularKernel) -> Outcomes:
    """Compare headers of a simulated group of six ranks on the device.

    kernel: has made a call on a manager with `checked=False`.
    """
    part: Any = kernel.prepare_finalize
    if not has_builtin_classes(context):
        return
    handshake = getattr(part, "_device_handshake", None)
    if handshake is None:
        handshake = part.fixed_capacity._handshake
    for row in _HEADERS:
        yield _verify(handshake, part.manager, *row)


def _verify(
    handshake: Any,
    manager: Any,
    changes: Mapping[str, int],
    equal_tokens: bool,
    reason: str,
    need: str,
) -> tuple[str, str]:
    """Compare headers, first with a changed one, then valid ones; return (actual, expected)."""
    status_class = type(handshake.status)
    status = status_class(_WORLD_SIZE, torch.device(manager.device))
    simulated = SimulatedManager(manager, {}).manager
    simulated.device_status = status
    copied = copy.copy(handshake)
    copied.layer = replace(handshake.layer, manager=simulated)
    headers_WF = torch.tensor([[*_HEADER.values()]] * _WORLD_SIZE)
    local_header_F = headers_WF[0].clone()
    headers_WF[_CHANGED_RANK] = torch.tensor([*(_HEADER | {**changes}).values()])
    limits = torch.tensor([_MAX_TOKENS, _MAX_ROWS, int(equal_tokens), 1])
    status.verify(headers_WF, local_header_F, limits)
    outcomes = [f"failed {int(status.failed)}", _raise_failure(copied)]
    outcomes.append(capture_outcome(lambda: str(copied.raise_failure())))  # raised once
    outcomes.append(f"closed: {simulated._communicator.group is None}")
    outcomes.append(capture_outcome(lambda: str(copied.check())).partition(", need")[0])
    # A later call does not replace the headers of the first one that failed.
    status.verify(local_header_F.expand_as(headers_WF).contiguous(), local_header_F, limits)
    outcomes.append(f"failed {int(status.failed)}")
    kept = status.failure()
    outcomes.append("none" if kept is None else str(kept.headers[_CHANGED_RANK][:3]))
    if not reason:
        return "; ".join(outcomes), "failed 0; no error; None; closed: False; None; failed 0; none"
    position = (
        (_HEADER | {**changes})["layer"],
        (_HEADER | {**changes})["call"],
        (_HEADER | {**changes})["order"],
    )
    got = f"{reason}; rank 3: on host b"
    text = f"({_CHANGED_RANK},) dispatch of call 3 of layer 4: {got}, {need}"
    later = (
        f"({_RANK}, 'dispatch', 0, 0, 0, (3,)) exchange between ranks: got a manager that failed "
        f"before: {reason}"
    )
    expected = f"failed 1; {text}; None; closed: True; {later}; failed 1; {position}"
    return "; ".join(outcomes), expected


def _raise_failure(handshake: Any) -> str:
    """Return the error of the handshake, with the ranks and the call that it names."""
    try:
        handshake.raise_failure()
    except CommunicationError as error:
        call = f"call {error.call} of layer {error.layer}"
        return f"{error.peers} {error.phase} of {call}: {error.got}, {error.need}"
    return "no error"
