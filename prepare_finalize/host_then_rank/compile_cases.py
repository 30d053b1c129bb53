"""Launches of the kernels of the two-level exchange on meta tensors, for `mk compile`.

`mk compile` compiles every kernel without a GPU. The meta tensors give the kernels shapes and
dtypes. The kernels that other exchanges launch in the same way are compiled with them.
"""

from types import SimpleNamespace
from typing import Any

import torch

from modular_kernel.ops.expert_slots import count_slots_per_rank
from modular_kernel.spec.problem import Parallel, Problem
from prepare_finalize.common.blocks import Blocks, Ranks, ReceivedColumns, read_blocks
from prepare_finalize.common.compile_cases import META, empty, problems_with
from prepare_finalize.common.device_status import FIELDS, DeviceStatus
from prepare_finalize.common.fixed_capacity import make_block_layouts
from prepare_finalize.host_then_rank.fixed_capacity import HostAgreement

_CHANGES: tuple[dict[str, Any], ...] = (
    {"parallel": Parallel(6, rank=1, ranks_per_host=2), "experts": 12},
    {"parallel": Parallel(32, rank=1, ranks_per_host=8), "experts": 64},
)


def problems() -> tuple[Problem, ...]:
    """Return problems with several hosts."""
    return problems_with(_CHANGES)[-len(_CHANGES) :]


def launch_all(problem: Problem) -> None:
    """Launch the kernels that read received blocks and verify the headers of all ranks."""
    layout = make_block_layouts(problem, problem.tokens)[problem.scheme.dispatched_quantized]
    parallel, k = problem.parallel, problem.top_k
    hosts = parallel.hosts
    per_host = parallel.world_size // hosts
    slots = per_host * count_slots_per_rank(problem.placement)
    ranks = Ranks(parallel.rank // per_host, hosts, slots)
    received = Blocks(empty(hosts, layout.nbytes, dtype=torch.uint8), layout, ranks, ranks.rank)
    rows = hosts * layout.block_rows
    columns = ReceivedColumns(
        slots,
        empty(rows, k),
        empty(rows, k, dtype=torch.float32),
        empty(rows, layout.scales, dtype=torch.float32) if layout.scales else None,
        empty(rows) if layout.adapters else None,
    )
    status, header_F = (
        DeviceStatus(parallel.world_size, META),
        empty(len(FIELDS), dtype=torch.int64),
    )
    limits = empty(4, dtype=torch.int64)
    read_blocks(received, columns, status=status, header_F=header_F, limits=limits, verify=False)
    agreement = HostAgreement(
        empty(2, parallel.world_size, len(FIELDS), dtype=torch.int64),
        empty(per_host),
        empty(per_host, dtype=torch.int64),
        empty(1),
    )
    memory: Any = SimpleNamespace(
        failed=empty(1), status=empty(1, dtype=torch.int64), timeout_ns=10**10, rank=0
    )
    headers_HF = received.section("header")
    agreement.verify(headers_HF, header_F, limits=limits, status=status, memory=memory)
