"""TritonExperts: contiguous tokens through Triton products, by the path its tiles say."""

from contextlib import AbstractContextManager

import torch

from experts.triton.aligned.path import AlignedPath
from experts.triton.configs.limits import MOST_TOKENS
from experts.triton.configs.select import choose_tiles, on_device, regimes_up_to, this_store
from experts.triton.dequantised import config as dequantised_config
from experts.triton.dequantised.path import DequantisedPath
from experts.triton.gemv import config as gemv_config
from experts.triton.gemv.path import SinglePath
from experts.triton.gemv_tma import config as gemv_tma_config
from experts.triton.gemv_tma.path import StreamedPath
from experts.triton.gemv_w4.path import PackedPath
from experts.triton.grouped_tma import config as grouped_tma_config
from experts.triton.grouped_tma.path import PermutedPath
from experts.triton.launch_config import ALIGNED, DEQUANTISED, PERMUTED, STREAMED, Device, TilePair
from experts.triton.operands import SCHEMES, group_rejections
from experts.triton.path import Path, PathCall, room_for
from experts.triton.tuning.space import TileSpace
from modular_kernel.contracts import PermuteExpertsUnpermute, TopKWeightAndReduce
from modular_kernel.roundings import Roundings
from modular_kernel.support import ExpertsRequirements, Rejection
from modular_kernel.tensors import (
    ContiguousShape,
    ContiguousTokens,
    Dispatched,
    DispatchShape,
    ExpertWeights,
)
from modular_kernel.types import ActivationFormat, Machine, Problem, Reduce
from modular_kernel.workspace import Workspace, WorkspaceShapes
from topk_reduce import TopKWeightAndReduceNoOp, unless_kept


class TritonExperts(PermuteExpertsUnpermute):
    """Contiguous tokens, Triton products; weights and sums over top-k itself.

    The tiles of a call say which path it takes (see experts.triton.path). Where top-k is kept, the
    second product writes the output, zeros for skipped pairs included. No atomics on
    floating-point values, so results are bitwise repeatable.
    """

    replayable = True
    requires = ExpertsRequirements(
        activation_format=ActivationFormat.STANDARD,
        packages=("triton",),
        triton=True,
        min_arch=(8, 0),
        graph_capturable=True,
        batch_invariant=True,
        reduce=Reduce.NOOP,
        keep_topk=True,
        expert_map=True,
        chunking=True,
        tf32=True,
        schemes=SCHEMES,
    )

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._paths = _paths(problem)

    @classmethod
    def tunable(cls, problem: Problem) -> TileSpace | None:
        if problem.batch_invariant:  # its tiles are fixed
            return None
        return TileSpace(problem, cls.__name__, tuple(_paths(problem)), few_rows=True)

    @classmethod
    def extra_rejections(cls, problem: Problem, machine: Machine) -> tuple[Rejection, ...]:
        return group_rejections(cls.__name__, problem)

    @classmethod
    def described(cls, machine: Machine) -> AbstractContextManager[None]:
        return on_device(Device.of(machine))

    def takes_unquantised(self, shape: DispatchShape) -> bool:
        """Where every call up to `shape` takes a path of few tokens, however weights lie."""
        assert isinstance(shape, ContiguousShape)
        if not self.problem.scheme.quantises_activations:
            return False
        return all(
            path in MOST_TOKENS
            for paths in self._choices()
            for _, path, _ in regimes_up_to(self.problem, shape.tokens, paths)
        )

    def workspace_shapes(self, shape: DispatchShape) -> WorkspaceShapes:
        """Room for any call up to shape.tokens: fewer tokens can need more of a buffer, because
        they take other paths and smaller blocks."""
        assert isinstance(shape, ContiguousShape)
        kinds = (
            self._paths[path].specs(most, block_m)
            for paths in (*self._choices(), (ALIGNED,))  # packed weights that lie otherwise
            for most, path, block_m in regimes_up_to(self.problem, shape.tokens, paths)
        )
        return room_for(self.problem, shape, kinds)

    def _choices(self) -> tuple[tuple[str, ...], ...]:
        """Return the paths among which a call chooses, whether TMA takes its tensors or not."""
        large = (PERMUTED, DEQUANTISED)
        lacking = ((), large, (STREAMED, *large))
        choices = (tuple(p for p in self._paths if p not in out) for out in lacking)
        return tuple(dict.fromkeys(choices))

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        return unless_kept(self.problem, TopKWeightAndReduceNoOp())

    def roundings(self, x_TH: torch.Tensor, weights: ExpertWeights) -> Roundings | None:
        return self._paths[self._tiles(x_TH, weights).path].roundings

    def apply(
        self,
        tokens: Dispatched,
        *,
        weights: ExpertWeights,
        workspace: Workspace,
        output: torch.Tensor,
    ) -> None:
        assert isinstance(tokens, ContiguousTokens)
        tiles = self._tiles(tokens.x_TH, weights)
        self._paths[tiles.path].run(PathCall(tokens, weights, workspace, output, tiles))

    def _tiles(self, x_TH: torch.Tensor, weights: ExpertWeights) -> TilePair:
        """Return what a call of these tensors launches."""
        tiles = choose_tiles(self.problem, len(x_TH), tuple(self._paths))
        if self._paths[tiles.path].takes(weights, x_TH):
            return tiles
        paths = tuple(name for name, path in self._paths.items() if path.takes(weights, x_TH))
        return choose_tiles(self.problem, len(x_TH), paths)


def paths_of(problem: Problem) -> tuple[str, ...]:
    """Return the names of the paths that calls of `problem` may take here, or `on_device`."""
    return tuple(_paths(problem))


def _paths(problem: Problem) -> dict[str, Path]:
    """Return the paths that can serve `problem` here, by name."""
    paths: list[Path] = [AlignedPath(problem)]
    if problem.batch_invariant:  # the others are for some numbers of tokens
        return {ALIGNED: paths[0]}
    if gemv_config.serves(problem):
        single = PackedPath if problem.scheme.packed else SinglePath
        paths.append(single(problem))
    device = this_store().device
    if gemv_tma_config.serves(problem, device):
        paths.append(StreamedPath(problem))
    if grouped_tma_config.serves(problem, device):
        paths.append(PermutedPath(problem))
    if dequantised_config.serves(problem, device):
        paths.append(DequantisedPath(problem))
    return {path.name: path for path in paths}
