"""Layers over ranks for tests of expert parallelism, with the inputs of each rank."""

from dataclasses import dataclass, field, fields, replace

import torch

from modular_kernel.catalog import make_kernel
from modular_kernel.reference import float64_reference, rounded_reference
from modular_kernel.spec.placement import Placement
from modular_kernel.spec.problem import Parallel, Problem
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.testing.cases.inputs import Inputs, count_invalid_ids, make_inputs
from modular_kernel.testing.verify.compare import Comparison, compare

REPLICATED = "ReplicatedEPPrepareAndFinalize"
GATHERED = "AllGatherReduceScatterPrepareAndFinalize"
ALL2ALL = "TorchAll2AllPrepareAndFinalize"
BATCHED = "TorchAll2AllBatchedPrepareAndFinalize"
PARTS = (REPLICATED, GATHERED, ALL2ALL)


@dataclass(frozen=True)
class Layer:
    """An expert-parallel layer over several ranks.

    tokens_W: number of tokens of each rank. The numbers are equal if the input is replicated.
    """

    part: str
    tokens_W: tuple[int, ...]
    placement: Placement | str = "linear"
    routing: str = "uniform"
    experts_part: str = "TorchExperts"
    seed: int = 0
    strided: bool = False
    fields: dict[str, object] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        return len(self.tokens_W)

    @property
    def global_problem(self) -> Problem:
        """The layer on one rank, with every rank's tokens."""
        tokens = self.tokens_W[0] if self.part == REPLICATED else sum(self.tokens_W)
        shape = {"hidden": 48, "intermediate": 40, "experts": 8, "top_k": 3}
        return Problem(tokens=tokens, **{**shape, "dtype": torch.float32, **self.fields})

    def problem(self, rank: int) -> Problem:
        tokens = max(self.tokens_W) + 1  # no rank fills its buffers
        parallel = Parallel(self.world_size, self.placement, rank)
        return replace(self.global_problem, tokens=tokens, parallel=parallel)

    def inputs(self) -> Inputs:
        device = torch.device("cpu")
        return make_inputs(
            self.global_problem, self.routing, device, seed=self.seed, strided=self.strided
        )

    def rows(self, rank: int) -> slice:
        if self.part == REPLICATED:
            return slice(0, self.tokens_W[0])
        start = sum(self.tokens_W[:rank])
        return slice(start, start + self.tokens_W[rank])

    def inputs_of(self, rank: int) -> Inputs:
        """Return the tokens of a rank and the weights of its experts."""
        inputs, rows = self.inputs(), self.rows(rank)
        routing = inputs.routing
        rank_routing = Routing(routing.topk_weights_TK[rows], routing.topk_ids_TK[rows])
        slots = self.problem(rank).placement.slots[rank]
        return Inputs(
            inputs.x_TH[rows],
            weights_of(inputs.weights, slots, self.global_problem.experts),
            rank_routing,
        )

    def kernel(self, rank: int, group: object, **options):
        return make_kernel(
            self.part, self.experts_part, self.problem(rank), group=group, poison=True, **options
        )

    def exact(self) -> torch.Tensor:
        """Return the float64 reference's output for all tokens, as on one rank."""
        inputs = self.inputs()
        return float64_reference(inputs.x_TH, inputs.weights, inputs.routing, self.global_problem)

    def compare(self, outputs: list[torch.Tensor]) -> Comparison:
        """Compare the outputs of all ranks with the float64 reference on one rank."""
        inputs = self.inputs()
        exact = self.exact()
        rounded_reference_output = rounded_reference(
            inputs.x_TH, inputs.weights, inputs.routing, self.global_problem
        )
        if self.part == REPLICATED:
            for output in outputs[1:]:
                assert torch.equal(output, outputs[0]), "ranks differ in their last bits"
            out = outputs[0]
        else:
            out = torch.cat(outputs)
        return compare(out, exact, rounded_reference_output, self.global_problem)

    def count_invalid_ids(self, rank: int) -> int:
        return count_invalid_ids(self.inputs_of(rank).routing, self.global_problem)


def weights_of(weights: ExpertWeights, slots: tuple[int, ...], experts: int) -> ExpertWeights:
    """Select the rows `slots` of every per-expert tensor. experts: number of all experts."""
    index = torch.tensor(slots)
    selected: dict[str, torch.Tensor | None] = {}
    for field_ in fields(weights):
        tensor = getattr(weights, field_.name)
        if tensor is None or tensor.shape[0] != experts or tensor.numel() == 1:
            selected[field_.name] = tensor
        elif tensor.element_size() == 1:  # index_select does not support float8
            selected[field_.name] = tensor.view(torch.uint8)[index].view(tensor.dtype)
        else:
            selected[field_.name] = tensor[index]
    return ExpertWeights(**selected)


def call_layer(rank: int, world: int, group: object, layer: Layer) -> tuple[torch.Tensor, int]:
    """Make one call on one rank; return its output and the number of invalid ids."""
    kernel = layer.kernel(rank, group)
    inputs = layer.inputs_of(rank)
    original = {name: tensor.clone() for name, tensor in inputs.tensors().items()}
    out = kernel(inputs.x_TH, inputs.weights, inputs.routing)
    if layer.global_problem.inplace:
        assert out is inputs.x_TH
        original.pop("x")
    for name, tensor in original.items():
        current = inputs.tensors()[name].contiguous().view(torch.uint8)
        assert torch.equal(current, tensor.contiguous().view(torch.uint8)), f"{name} was written"
    result = out.clone(), kernel.invalid_ids
    kernel.prepare_finalize.destroy()
    return result


def call_layers(rank: int, world: int, group: object, layers: tuple[Layer, ...]) -> list:
    return [call_layer(rank, world, group, layer) for layer in layers]
