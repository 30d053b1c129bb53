"""Cases of the agreement between ranks of a host (`HostAgreement`), for the test harness.

The harness runs every case with the kernel and with a torch reference, and compares every returned
bit (`PrepareAndFinalize.operation_cases`). The memory of both ranks is in one tensor, which already
has the headers and the flag of the other rank.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from modular_kernel.interpreter.bounds import allow_access
from modular_kernel.replay.launch.runtime import use_triton
from prepare_finalize.common.device_status import (
    CALL,
    FIELDS,
    NOT_REFUSED,
    REFUSAL,
    Capacity,
    DeviceStatus,
)
from prepare_finalize.host_then_rank.fixed_capacity import HostAgreement

_CPU = torch.device("cpu")
_HOSTS, _RANKS_PER_HOST, _LOCAL_RANK = 3, 2, 1
_WORLD = _HOSTS * _RANKS_PER_HOST
_HEADER = (7, 1, 14, 2, 2, NOT_REFUSED, 2)  # in the order of FIELDS
_LIMITS = Capacity(tokens=4, rows=4)

Tensors = Mapping[str, torch.Tensor]


def list_cases() -> Mapping[str, Callable[[], Tensors]]:
    """Return the cases by name; see `PrepareAndFinalize.operation_cases`."""
    return {
        "agreement, valid headers": partial(_agree, changed_rank=None, wait_fails=False),
        "agreement, refused by a counterpart": partial(_agree, changed_rank=5, wait_fails=False),
        "agreement, refused on this host": partial(_agree, changed_rank=2, wait_fails=False),
        "agreement, no headers": partial(_agree, changed_rank=2, wait_fails=True),
    }


def _agree(*, changed_rank: int | None, wait_fails: bool) -> Tensors:
    """Make two calls, in the second of which the header of `changed_rank` has a refusal.

    wait_fails: whether the second call's wait for the other rank fails immediately.
    """
    words = 2 * _WORLD * len(FIELDS)
    memory_RN = torch.zeros(_RANKS_PER_HOST, words + 2, dtype=torch.int64, device=_CPU)
    headers_RCWF = memory_RN[:, :words].view(_RANKS_PER_HOST, 2, _WORLD, len(FIELDS))
    flags_RL = memory_RN[:, words:].view(torch.int32)[:, :_RANKS_PER_HOST]
    stride = 8 * memory_RN.stride(0)
    deltas = [stride * (rank - _LOCAL_RANK) for rank in range(_RANKS_PER_HOST)]
    agreement = HostAgreement(
        headers_RCWF[_LOCAL_RANK],
        flags_RL[_LOCAL_RANK],
        torch.tensor(deltas, dtype=torch.int64, device=_CPU),
        torch.zeros(1, dtype=torch.int32, device=_CPU),
    )
    memory: Any = SimpleNamespace(
        failed=torch.zeros(1, dtype=torch.int32, device=_CPU),
        status=torch.zeros(1, dtype=torch.int64, device=_CPU),
        timeout_ns=10**10,
        rank=_LOCAL_RANK,
    )
    allow_access(memory_RN)  # a rank accesses the memory of the other rank by address
    status, outputs = DeviceStatus(_WORLD, _CPU), dict[str, torch.Tensor]()
    for call in (1, 2):
        headers_WF = torch.tensor([_HEADER] * _WORLD, dtype=torch.int64, device=_CPU)
        headers_WF[:, CALL] = call
        if call == 2 and changed_rank is not None:
            headers_WF[changed_rank, REFUSAL] = 3
        if call == 2 and wait_fails:
            memory.failed.fill_(1)
        headers_RCWF[_LOCAL_RANK, call % 2, ::_RANKS_PER_HOST] = headers_WF[::_RANKS_PER_HOST]
        flags_RL[_LOCAL_RANK, 0] = call
        received_HF = headers_WF[_LOCAL_RANK::_RANKS_PER_HOST]
        arguments = received_HF, headers_WF[_LOCAL_RANK].clone(), status, memory
        if use_triton(memory_RN):
            headers_HF, header_F, _, _ = arguments
            limits = status.limits(_LIMITS)
            agreement.verify(headers_HF, header_F, limits=limits, status=status, memory=memory)
        else:
            _agree_ref(agreement, headers_RCWF, flags_RL, *arguments)
        outputs |= {
            f"memory of call {call}": memory_RN.clone(),
            f"failed of call {call}": torch.cat((memory.failed, status.failed, agreement.number)),
        }
    progress = torch.tensor(status.progress(), dtype=torch.int64, device=_CPU)
    failure = status.failure()
    headers = torch.tensor(failure.headers if failure else (), dtype=torch.int64, device=_CPU)
    return {**outputs, "status": memory.status, "progress": progress, "failure": headers}


def _agree_ref(
    agreement: HostAgreement,
    headers_RCWF: torch.Tensor,
    flags_RL: torch.Tensor,
    headers_HF: torch.Tensor,
    header_F: torch.Tensor,
    status: DeviceStatus,
    memory: Any,
) -> None:
    """Torch reference of `HostAgreement.verify`, for headers that have already arrived."""
    agreement.number.add_(1)
    number, wait_failed = int(agreement.number), bool(memory.failed)
    headers_RCWF[:, number % 2, _LOCAL_RANK::_RANKS_PER_HOST] = headers_HF
    if wait_failed:
        status._count(2)  # received
        status.failed.fill_(1)
    else:
        flags_RL[:, _LOCAL_RANK] = number
        headers_WF = agreement.headers_CWF[number % 2]
        status.verify(headers_WF, header_F, status.limits(_LIMITS))
    memory.failed |= status.failed
