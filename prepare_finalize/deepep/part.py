"""DeepEPPart: base of the three exchange components ("parts") over DeepEP.

The library requires the same number of experts on each rank, in the order of their ids. The parts
therefore pass expert numbers instead of expert ids. A slot is the index of an expert in the weights
of its rank. Expert numbers count the slots of all ranks (`modular_kernel.ops.expert_slots`).
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from modular_kernel.compatibility.support import Rejection
from modular_kernel.contracts import TopKWeightAndReduce
from modular_kernel.ops.expert_slots import count_slots_per_rank
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.tensors import Handle
from modular_kernel.workspace import BufferSpec
from prepare_finalize.common.group_part import FusedDispatchPart, PartHandle
from prepare_finalize.common.tokens import has_shared_scale, reduce_rows, token_specs
from prepare_finalize.deepep.group import DeepEPGroup
from prepare_finalize.deepep.library import (
    CPP_MODULE_OF_DEEPEP_1,
    check_torch_settings,
    get_version,
    ids_dtype,
    load_deepep,
)

BF16 = frozenset({torch.bfloat16})
HOPPER = (9, 0)  # the library's kernels use TMA


@dataclass(frozen=True)
class DeepEPHandle(PartHandle):
    """Handle of a dispatch of DeepEP.

    library_handle: the library's handle.
    weights: router weights of the received rows. In the low-latency part, the router weights of
        this rank's tokens.
    """

    library_handle: Any
    weights: torch.Tensor


class DeepEPPart(FusedDispatchPart[DeepEPGroup]):
    """Base of parts over the buffers of a DeepEPGroup.

    Creating and destroying a part is collective. Raise ConfigurationError if the library or the
    group cannot be used, and CommunicationError unless every rank creates the same part with the
    same problem.
    """

    manager_class = DeepEPGroup
    generation = 1  # of the library's interface: 1 is Buffer, 2 is ElasticBuffer
    ids_dtype = torch.int64  # replaced by the dtype that the library was built for
    max_experts: int | None = None  # limit for all ranks together; None means no limit

    def __init__(self, problem: Problem, group: object | None = None) -> None:
        self.library = load_deepep(self.generation)
        self.ids_dtype = ids_dtype(self.library)
        super().__init__(problem, group)
        self.num_slots = count_slots_per_rank(problem.placement)
        properties = _list_common_properties(type(self).__name__, problem)
        release = {"deep_ep": get_version(self.library), "ids_dtype": self.ids_dtype}
        self.manager.check_equal({**properties, **release})
        self.make_buffer()

    @classmethod
    def extra_rejections(cls, problem: Problem, machine: Machine) -> tuple[Rejection, ...]:
        rejections = list(super().extra_rejections(problem, machine))
        name = cls.__name__
        parties = (name, "problem")
        if has_shared_scale(problem):
            got = f"{problem.quant}: one computed scale for all ranks' tokens"
            need = "a scale of each token or group, or a static one"
            hint = "this library does not reduce the maximum over ranks before a dispatch"
            rejections.append(Rejection("dispatch_quant", parties, got, need, hint))
        slots, max_slots = count_slots_per_rank(problem.placement), cls.max_slots(problem)
        if max_slots is not None and slots > max_slots:
            need = f"<= {max_slots} experts on a rank"
            rejections.append(Rejection("max_experts", parties, f"{slots} on one", need))
        total_experts = slots * problem.parallel.world_size
        if cls.max_experts is not None and total_experts > cls.max_experts:
            need = f"<= {cls.max_experts} in all"
            rejections.append(Rejection("max_experts", parties, f"{total_experts} in all", need))
        if cls.generation != 1 and CPP_MODULE_OF_DEEPEP_1 in machine.packages:
            hint = "deep_ep 1 and 2 have one package name; deep_ep 2 has the interfaces of both"
            parties = (name, "machine")
            rejections.append(Rejection("package", parties, "deep_ep 1", "deep_ep 2", hint))
        return tuple(rejections)

    @classmethod
    def max_slots(cls, problem: Problem) -> int | None:
        """Return the maximum number of experts on a rank; None means no limit."""
        return None

    def check_call(self, device: torch.device) -> None:
        """Raise a typed error for a device or a setting of torch that a dispatch does not support.

        device: device of the call's tensors.
        """
        self.manager.check_device(device)
        check_torch_settings(self.library)

    @abstractmethod
    def make_buffer(self) -> None:
        """Create the buffer of the manager for the sizes of this part, unless it exists."""

    @property
    def world_size(self) -> int:
        return self.problem.parallel.world_size

    @property
    def num_experts(self) -> int:
        """Number of expert slots of all ranks together, which the library treats as experts."""
        return self.world_size * self.num_slots


class DeepEPRowsPart(DeepEPPart):
    """Base of parts that send a row to each rank with one of its experts.

    Each of these ranks returns one row, the weighted sum of the outputs of its experts. The library
    adds the returned rows in a tensor that it allocates.
    """

    allocates_output = True

    def row_specs(self, tokens: int, rows: int) -> dict[str, BufferSpec]:
        """Return the buffers for quantizing `tokens` tokens and summing `rows` received rows."""
        problem = self.problem
        return {
            **token_specs(problem, tokens),
            **self.pair_specs(tokens),
            "rows_sum": BufferSpec((rows, problem.hidden), problem.dtype),
        }

    def finalize(
        self,
        expert_output: torch.Tensor,
        *,
        handle: Handle,
        reduce: TopKWeightAndReduce,
        out: torch.Tensor,
    ) -> None:
        out.copy_(self.finalize_to_new_tensor(expert_output, handle=handle, reduce=reduce))

    def finalize_to_new_tensor(
        self, expert_output: torch.Tensor, *, handle: Handle, reduce: TopKWeightAndReduce
    ) -> torch.Tensor:
        part_handle = self.check_handle(handle, DeepEPHandle)
        check_torch_settings(self.library)
        rows_RH = reduce_rows(
            expert_output, part_handle.weights, self.problem, part_handle.call, reduce
        )
        return self.combine_ranks(rows_RH, part_handle.library_handle)

    @abstractmethod
    def combine_ranks(self, rows_RH: torch.Tensor, library_handle: Any) -> torch.Tensor:
        """Send rows back and return the sums over ranks for this rank's tokens, (T, H).

        library_handle: handle from the library's dispatch.
        """


def _list_common_properties(part: str, problem: Problem) -> dict[str, object]:
    """Return the properties that must be equal on all ranks, by name."""
    names = (
        "tokens",
        "hidden",
        "intermediate",
        "experts",
        "top_k",
        "dtype",
        "quant",
        "act",
        "bias",
        "apply_router_weight_on_input",
        "routed_scaling_factor",
        "combine",
    )
    slots = problem.placement.slots
    return {"part": part, **{n: getattr(problem, n) for n in names}, "placement": slots}
