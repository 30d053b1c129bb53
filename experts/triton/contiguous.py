"""TritonExperts: contiguous tokens through Triton products, by the path its configuration says."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import combinations

import torch

from experts.triton.configs.select import (
    choose_config,
    kinds_up_to,
    on_device,
    overridden,
    this_store,
)
from experts.triton.launch_config import Device, MoEConfig
from experts.triton.operands import SCHEMES, weight_rejections
from experts.triton.path import Path, PathCall, Rooms
from experts.triton.paths import BY_NAME, PATHS
from experts.triton.tuning.space import ConfigSpace
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
from modular_kernel.workspace import BufferSpec, Workspace, WorkspaceShapes
from topk_reduce import TopKWeightAndReduceNoOp, unless_kept


class TritonExperts(PermuteExpertsUnpermute):
    """Contiguous tokens, Triton products; weights and sums over top-k itself.

    The configuration of a call says which path it takes (experts.triton.paths). Where top-k is
    kept, the second product writes the output, zeros for skipped pairs included. No atomics on
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
        lora=True,
    )

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._paths = {name: BY_NAME[name](problem) for name in paths_of(problem)}
        self._choices = _choices(tuple(self._paths))
        self._prepared = tuple(
            turn for name in self._paths for turn in BY_NAME[name].turns_of_prepared(problem)
        )
        self._rooms = Rooms()
        # Calls whose tokens have no adapters take the paths, and the launches, of a layer without.
        plain = None if problem.adapters is None else replace(problem, lora="none")
        self._without = None if plain is None else TritonExperts(plain)

    @classmethod
    def tunable(cls, problem: Problem) -> ConfigSpace | None:
        return ConfigSpace.unless_fixed(problem, cls.__name__, PATHS)

    @classmethod
    def extra_rejections(cls, problem: Problem, machine: Machine) -> tuple[Rejection, ...]:
        return weight_rejections(cls.__name__, problem, machine)

    @classmethod
    def described(cls, machine: Machine) -> AbstractContextManager[None]:
        return on_device(Device.of(machine))

    def takes_unquantised(self, shape: DispatchShape) -> bool:
        """Where every call up to `shape` takes a path that quantises, however weights lie."""
        assert isinstance(shape, ContiguousShape)
        if not self.problem.scheme.quantises_activations:
            return False
        return all(BY_NAME[path].quantises_input for path, _ in self._kinds(shape.tokens))

    def workspace_shapes(self, shape: DispatchShape) -> WorkspaceShapes:
        """Room for any call up to shape.tokens: fewer tokens can need more of a buffer, because
        they take other paths and smaller blocks."""
        assert isinstance(shape, ContiguousShape)
        kinds = self._kinds_of_calls(shape.tokens)
        return self._rooms.of(self.problem, shape, kinds, lambda kind: kind.specs())

    def _kinds_of_calls(self, tokens: int) -> tuple["_Kind", ...]:
        own = (
            _Kind(self._paths[path], block_m, most)
            for (path, block_m), most in self._kinds(tokens).items()
        )
        without = () if self._without is None else self._without._kinds_of_calls(tokens)
        return (*own, *self._prepared_kinds(tokens), *without)

    def _kinds(self, tokens: int) -> dict[tuple[str, int], int]:
        """Return by (path, block_m) the most tokens of a call that meets it, as tensors may lie."""
        found: dict[tuple[str, int], int] = {}
        for paths in self._choices:
            for most, path, block_m in kinds_up_to(self.problem, tokens, paths):
                found[path, block_m] = max(most, found.get((path, block_m), 0))
        return found

    def _prepared_kinds(self, tokens: int) -> tuple["_Kind", ...]:
        """Return the kinds of calls with prepared weights, which need no room for weights."""
        ends = [*(least - 1 for least, _ in self._prepared[1:]), tokens]
        return tuple(
            _Kind(self._paths[config.path], config.gemm1.block_m, min(end, tokens), prepared=True)
            for (least, config), end in zip(self._prepared, ends, strict=bool(self._prepared))
            if least <= tokens and not overridden()
        )

    def prepared_specs(self) -> dict[str, BufferSpec]:
        own = [path.prepared_specs() for path in self._paths.values()]
        if self._without is not None:
            own.append(self._without.prepared_specs())
        return {name: spec for specs in own for name, spec in specs.items()}

    def prepare(self, weights: ExpertWeights, out: Mapping[str, torch.Tensor]) -> None:
        for path in self._paths.values():
            if path.prepared_specs():
                path.prepare(weights, out)
        if self._without is not None and self._without.prepared_specs():
            self._without.prepare(weights, out)

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        return unless_kept(self.problem, TopKWeightAndReduceNoOp())

    def roundings(self, x_TH: torch.Tensor, weights: ExpertWeights) -> Roundings | None:
        return self._paths[self._config(x_TH, weights).path].roundings

    def apply(
        self,
        tokens: Dispatched,
        *,
        weights: ExpertWeights,
        workspace: Workspace,
        output: torch.Tensor,
    ) -> None:
        assert isinstance(tokens, ContiguousTokens)
        if self._without is not None and tokens.routing.adapters_T is None:
            self._without.apply(tokens, weights=weights, workspace=workspace, output=output)
            return
        config = self._config(tokens.x_TH, weights)
        self._paths[config.path].run(PathCall(tokens, weights, workspace, output, config))

    def _config(self, x_TH: torch.Tensor, weights: ExpertWeights) -> MoEConfig:
        """Return what a call of these tensors launches."""
        if self._prepared and weights.w1_tiles is not None and not overridden():
            tokens = len(x_TH)
            for least, config in reversed(self._prepared):
                path = self._paths[config.path]
                reads = tokens >= least and path.reads_prepared(weights, tokens)
                if reads and path.takes(weights, x_TH):
                    return config
        config = choose_config(self.problem, len(x_TH), tuple(self._paths))
        if self._paths[config.path].takes(weights, x_TH):
            return config
        paths = tuple(name for name, path in self._paths.items() if path.takes(weights, x_TH))
        return choose_config(self.problem, len(x_TH), paths)


@dataclass(frozen=True)
class _Kind:
    """A kind of call that takes its own room: at most `most` tokens, in blocks of block_m rows."""

    path: Path
    block_m: int
    most: int
    prepared: bool = False

    def specs(self) -> dict[str, BufferSpec]:
        specs = self.path.specs_of_prepared if self.prepared else self.path.specs
        return specs(self.most, self.block_m)


def paths_of(problem: Problem) -> tuple[str, ...]:
    """Return the names of the paths that calls of `problem` may take here, or `on_device`."""
    device = this_store().device
    return tuple(path.name for path in PATHS if path.serves(problem, device))


def _choices(paths: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Return the paths among which a call chooses, whichever of them take its tensors."""
    refusing = [name for name in paths if BY_NAME[name].refuses]
    lacking = (out for count in range(len(refusing) + 1) for out in combinations(refusing, count))
    return tuple(tuple(name for name in paths if name not in out) for out in lacking)
