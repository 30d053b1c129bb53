"""Layers over ranks for the tests of expert parallelism: one layer's inputs, shared out."""

from dataclasses import dataclass, field, fields, replace

import torch

from modular_kernel.catalog import make_kernel
from modular_kernel.reference import oracle, recipe
from modular_kernel.spec.placement import Placement
from modular_kernel.spec.problem import Parallel, Problem
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.testing.cases.inputs import Inputs, invalid_count, make_inputs
from modular_kernel.testing.verify.compare import Comparison, compare

REPLICATED = "ReplicatedEPPrepareAndFinalize"
GATHERED = "AllGatherReduceScatterPrepareAndFinalize"
ALL2ALL = "TorchAll2AllPrepareAndFinalize"
BATCHED = "TorchAll2AllBatchedPrepareAndFinalize"
PARTS = (REPLICATED, GATHERED, ALL2ALL)


@dataclass(frozen=True)
class Layer:
    """tokens_W: T of each rank (of all of them together where they are replicated)."""

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
    def whole(self) -> Problem:
        """The layer on one rank, with every rank's tokens."""
        tokens = self.tokens_W[0] if self.part == REPLICATED else sum(self.tokens_W)
        shape = {"hidden": 48, "intermediate": 40, "experts": 8, "top_k": 3}
        return Problem(tokens=tokens, **{**shape, "dtype": torch.float32, **self.fields})

    def problem(self, rank: int) -> Problem:
        tokens = max(self.tokens_W) + 1  # no rank fills its buffers
        parallel = Parallel(self.world_size, self.placement, rank)
        return replace(self.whole, tokens=tokens, parallel=parallel)

    def inputs(self) -> Inputs:
        device = torch.device("cpu")
        return make_inputs(self.whole, self.routing, device, seed=self.seed, strided=self.strided)

    def rows(self, rank: int) -> slice:
        if self.part == REPLICATED:
            return slice(0, self.tokens_W[0])
        start = sum(self.tokens_W[:rank])
        return slice(start, start + self.tokens_W[rank])

    def inputs_of(self, rank: int) -> Inputs:
        """What this rank passes: its tokens, and the weights of its experts."""
        whole, rows = self.inputs(), self.rows(rank)
        routing = whole.routing
        own = Routing(routing.topk_weights_TK[rows], routing.topk_ids_TK[rows])
        slots = self.problem(rank).placement.slots[rank]
        return Inputs(whole.x_TH[rows], weights_of(whole.weights, slots, self.whole.experts), own)

    def kernel(self, rank: int, group: object, **options):
        return make_kernel(
            self.part, self.experts_part, self.problem(rank), group=group, poison=True, **options
        )

    def exact(self) -> torch.Tensor:
        """One rank's oracle, of all tokens."""
        whole = self.inputs()
        return oracle(whole.x_TH, whole.weights, whole.routing, self.whole)

    def judge(self, outputs: list[torch.Tensor]) -> Comparison:
        """Every rank's output against one rank's oracle."""
        whole = self.inputs()
        exact = self.exact()
        plain = recipe(whole.x_TH, whole.weights, whole.routing, self.whole)
        if self.part == REPLICATED:
            for other in outputs[1:]:
                assert torch.equal(other, outputs[0]), "ranks differ in their last bits"
            out = outputs[0]
        else:
            out = torch.cat(outputs)
        return compare(out, exact, plain, self.whole)

    def invalid(self, rank: int) -> int:
        return invalid_count(self.inputs_of(rank).routing, self.whole)


def weights_of(weights: ExpertWeights, slots: tuple[int, ...], experts: int) -> ExpertWeights:
    """The rows of `slots` of everything that is given for each expert."""
    index = torch.tensor(slots)
    own: dict[str, torch.Tensor | None] = {}
    for each in fields(weights):
        tensor = getattr(weights, each.name)
        if tensor is None or tensor.shape[0] != experts or tensor.numel() == 1:
            own[each.name] = tensor
        elif tensor.element_size() == 1:  # index_select knows no float8
            own[each.name] = tensor.view(torch.uint8)[index].view(tensor.dtype)
        else:
            own[each.name] = tensor[index]
    return ExpertWeights(**own)


def call_layer(rank: int, world: int, group: object, layer: Layer) -> tuple[torch.Tensor, int]:
    """One call on one rank: its output, and the invalid ids it counted."""
    kernel = layer.kernel(rank, group)
    given = layer.inputs_of(rank)
    before = {name: tensor.clone() for name, tensor in given.tensors().items()}
    out = kernel(given.x_TH, given.weights, given.routing)
    if layer.whole.inplace:
        assert out is given.x_TH
        before.pop("x")
    for name, tensor in before.items():
        now = given.tensors()[name].contiguous().view(torch.uint8)
        assert torch.equal(now, tensor.contiguous().view(torch.uint8)), f"{name} was written"
    result = out.clone(), kernel.invalid_ids
    kernel.prepare_finalize.destroy()
    return result


def call_layers(rank: int, world: int, group: object, layers: tuple[Layer, ...]) -> list:
    return [call_layer(rank, world, group, layer) for layer in layers]
