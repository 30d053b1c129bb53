"""BatchedTritonExperts: two grouped GEMMs over rows that lie expert by expert."""

from dataclasses import dataclass

import torch

from experts.triton.adapters import Shrunk, adapter_specs, arguments_of, shrink_batched
from experts.triton.configs.select import choose_config
from experts.triton.launch_config import LaunchConfig
from experts.triton.operands import (
    SCHEMES,
    Product,
    first_product,
    second_product,
    weight_rejections,
)
from experts.triton.tuning.space import ConfigSpace
from modular_kernel import stages
from modular_kernel.contracts import PermuteExpertsUnpermute, TopKWeightAndReduce
from modular_kernel.ops.launch.launch import launch
from modular_kernel.ops.quantise import BatchedRows, quantise_rows, quantise_specs, take_quantised
from modular_kernel.roundings import Roundings
from modular_kernel.support import ExpertsRequirements, Rejection
from modular_kernel.tensors import (
    BatchedShape,
    BatchedTokens,
    Dispatched,
    DispatchShape,
    ExpertWeights,
)
from modular_kernel.types import ActivationFormat, Machine, Problem, Reduce
from modular_kernel.workspace import BufferSpec, Workspace, WorkspaceShapes
from topk_reduce import TopKWeightAndReduceDelegate, unless_kept


class BatchedTritonExperts(PermuteExpertsUnpermute):
    """Batched rows in, batched rows out, unweighted; two launches.

    Only the first counts_e[i] rows of expert i are read or written.
    """

    replayable = True
    requires = ExpertsRequirements(
        activation_format=ActivationFormat.BATCHED_EXPERTS,
        packages=("triton",),
        triton=True,
        min_arch=(8, 0),
        graph_capturable=True,
        batch_invariant=True,
        reduce=Reduce.DELEGATE,
        keep_topk=True,
        weight_on_input=False,
        tf32=True,
        schemes=SCHEMES,
        lora=True,
    )

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        from experts.triton.kernels.batched_gemm import batched_gemm_kernel

        self._kernel = batched_gemm_kernel

    @classmethod
    def tunable(cls, problem: Problem) -> ConfigSpace | None:
        if problem.batch_invariant:  # its tiles are fixed
            return None
        return ConfigSpace(problem, cls.__name__)

    @classmethod
    def extra_rejections(cls, problem: Problem, machine: Machine) -> tuple[Rejection, ...]:
        return weight_rejections(cls.__name__, problem, machine)

    def workspace_shapes(self, shape: DispatchShape) -> WorkspaceShapes:
        assert isinstance(shape, BatchedShape)
        problem = self.problem
        rows = (shape.experts, shape.capacity)
        return WorkspaceShapes(
            workspace13=BufferSpec((*rows, problem.intermediate), problem.dtype),
            workspace2=BufferSpec((0,), problem.dtype),
            output=BufferSpec((*rows, problem.hidden), problem.dtype),
            extra=self._quantised_specs(shape) | adapter_specs(problem, rows[0] * rows[1]),
        )

    def _quantised_specs(self, shape: BatchedShape) -> dict[str, BufferSpec]:
        """GEMM 2's rows as 8-bit values, where the scheme wants them."""
        scheme, rows = self.problem.scheme, shape.experts * shape.capacity
        if not scheme.quantises_activations:
            return {}
        columns = self.problem.intermediate
        return quantise_specs("h", scheme, rows, columns, segments=shape.experts)

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        return unless_kept(self.problem, TopKWeightAndReduceDelegate())

    def roundings(self, x_TH: torch.Tensor, weights: ExpertWeights) -> Roundings:
        return Roundings()

    def apply(
        self,
        tokens: Dispatched,
        *,
        weights: ExpertWeights,
        workspace: Workspace,
        output: torch.Tensor,
    ) -> None:
        assert isinstance(tokens, BatchedTokens)
        problem = self.problem
        experts, capacity, _ = tokens.x_eCH.shape
        one, two = choose_config(problem, capacity).both(LaunchConfig)
        h_eCI = workspace.take("workspace13", (experts, capacity, problem.intermediate))
        adapters = _Adapters(tokens, weights, problem, workspace, one.block_m)
        with stages.stage(stages.GEMM1):
            shrunk = adapters.of_w1()
            product = first_product(weights, problem)
            rows = (tokens.x_eCH, tokens.scale)
            self._multiply(rows, product, one, tokens.counts_e, h_eCI, shrunk)
        h_rows = self._quantised(h_eCI, tokens, weights, workspace)
        with stages.stage(stages.GEMM2):
            shrunk = adapters.of_w2(h_eCI)
            product = second_product(weights, problem)
            self._multiply(h_rows, product, two, tokens.counts_e, output, shrunk)

    def _quantised(
        self,
        h_eCI: torch.Tensor,
        tokens: BatchedTokens,
        weights: ExpertWeights,
        workspace: Workspace,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """GEMM 2's rows and their scales; h_eCI itself where activations are not quantised."""
        scheme, (experts, capacity, columns) = self.problem.scheme, h_eCI.shape
        if not scheme.quantises_activations:
            return h_eCI, None
        with stages.stage(stages.QUANTISE):
            out = take_quantised(
                workspace,
                "h",
                scheme,
                (experts * capacity, columns),
                segments=experts,
                static_scale=weights.a2_scale,
            )
            live = BatchedRows(tokens.counts_e)
            quantise_rows(h_eCI.flatten(0, 1), scheme, out=out, live=live)
        return out.q_RK.view_as(h_eCI), out.scale

    def _multiply(
        self,
        rows: tuple[torch.Tensor, torch.Tensor | None],
        product: Product,
        tile: LaunchConfig,
        counts_e: torch.Tensor,
        out: torch.Tensor,
        shrunk: Shrunk | None,
    ) -> None:
        a_eCK, a_scale = rows
        experts, capacity, _ = a_eCK.shape
        num_m = -(-capacity // tile.block_m)
        num_n = -(-product.columns // tile.block_n)
        launch(
            self._kernel,
            (num_m * num_n, experts),
            a_ptr=a_eCK,
            out_ptr=out,
            counts_ptr=counts_e,
            capacity=capacity,
            num_m=num_m,
            stride_ase=_expert_stride(a_scale, capacity),
            **arguments_of(shrunk),
            **product.arguments(tile, self.problem.fp32_precision, a_scale),
        )


@dataclass(frozen=True)
class _Adapters:
    """A x of a call's rows, before each product; None where no row has an adapter."""

    tokens: BatchedTokens
    weights: ExpertWeights
    problem: Problem
    workspace: Workspace
    block_m: int

    def of_w1(self) -> Shrunk | None:
        matrices = self.weights.lora_a13, self.weights.lora_b13
        return self._shrunk("lora_u13", self.tokens.plain_eCH, *matrices)

    def of_w2(self, h_eCI: torch.Tensor) -> Shrunk | None:
        return self._shrunk("lora_u2", h_eCI, self.weights.lora_a2, self.weights.lora_b2)

    def _shrunk(
        self, name: str, x_eCK: torch.Tensor, a: torch.Tensor | None, b: torch.Tensor | None
    ) -> Shrunk | None:
        slots_eC, counts_e = self.tokens.adapters_eC, self.tokens.counts_e
        if slots_eC is None or a is None or b is None:
            return None
        experts, capacity, _ = x_eCK.shape
        u = self.workspace.take(name, (experts * capacity, a.shape[2]))
        return shrink_batched(u, x_eCK, slots_eC, counts_e, (a, b), self.problem, self.block_m)


def _expert_stride(a_scale: torch.Tensor | None, capacity: int) -> int:
    """From one expert's scales to the next one's; a_scale: (1,), (e * C, G) or (e, C, G)."""
    if a_scale is None or a_scale.dim() == 1:
        return 0
    return a_scale.stride(0) * (capacity if a_scale.dim() == 2 else 1)
