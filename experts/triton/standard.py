"""TritonExperts: experts over contiguous tokens, which run each call on one of several paths.

A path (`experts.triton.path`) is one implementation of the layer. The launch configuration of a
call names its path. The configuration comes from a tuned file for this layer and GPU, or from
defaults for the number of tokens.

Prepared weights come with a copy in a layout that some paths read faster (`prepare`).
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations

import torch

from experts.triton.base import TritonExpertsBase
from experts.triton.configs.select import (
    buffer_kinds_up_to,
    choose_config,
    current_lookup,
    is_overridden,
    on_device,
)
from experts.triton.launch_config import Device, MoEConfig
from experts.triton.operands import any_n_major
from experts.triton.path import Path, PathCall, WorkspaceCache
from experts.triton.paths import ALL_PATHS, BUILT_IN_PATHS, BY_NAME, external_paths
from experts.triton.tuning.space import ConfigSpace
from modular_kernel import path_log
from modular_kernel.contracts import PathInfo, TopKWeightAndReduce
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.spec.rounding import Roundings
from modular_kernel.tensors import (
    Dispatched,
    DispatchShape,
    ExpertWeights,
    StandardShape,
    StandardTokens,
)
from modular_kernel.workspace import BufferSpec, Workspace, WorkspaceShapes
from topk_reduce import TopKWeightAndReduceNoOp, reducer_for

_BUILT_IN_ORIGIN = "modular-kernel (experts.triton.paths)"


class TritonExperts(TritonExpertsBase):
    """Experts over contiguous tokens (T, H), which also apply router weights and sum over top-k.

    If the output keeps the top-k dimension, GEMM 2 writes the output directly, with zeros for pairs
    whose expert is not on this rank. No kernel uses floating-point atomics, so results are bitwise
    reproducible.

    replayable: a plan may record the launches of a call and repeat them without running this code.
    """

    replayable = True

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._paths = {name: BY_NAME[name](problem) for name in supported_paths(problem)}
        self._path_sets = _list_possible_path_sets(self._paths)
        prepares = any(BY_NAME[name].prepared_configs(problem) for name in self._paths)
        self._prepared_options = (False, True) if prepares else (False,)  # values of `prepared`
        self._workspace_cache = WorkspaceCache()
        self._quantized = problem.scheme.quantized
        # A call without adapters uses the paths and launches of the same problem without LoRA.
        without_lora = None if problem.adapters is None else replace(problem, lora="none")
        self._without_adapters = None if without_lora is None else TritonExperts(without_lora)

    @classmethod
    def tunable(cls, problem: Problem) -> ConfigSpace | None:
        return ConfigSpace.for_problem(problem, cls.__name__, ALL_PATHS)

    @classmethod
    def paths(cls) -> tuple[PathInfo, ...]:
        external = external_paths()
        return (
            *(PathInfo(path.name, _BUILT_IN_ORIGIN) for path in BUILT_IN_PATHS),
            *(PathInfo(usable.path.name, usable.origin) for usable in external.usable),
            *(PathInfo(broken.name, broken.origin, broken.error) for broken in external.broken),
        )

    @classmethod
    def described(cls, machine: Machine) -> AbstractContextManager[None]:
        return on_device(Device.from_machine(machine))

    def takes_unquantized(self, shape: DispatchShape) -> bool:
        """Return whether a call of at most `shape` quantizes x itself on every path it can take."""
        assert isinstance(shape, StandardShape)
        if not self.problem.scheme.quantizes_activations:
            return False
        kinds = [
            kind
            for prepared in self._prepared_options
            for kind in self._get_max_tokens_by_kind(shape.tokens, prepared)
        ]
        return all(BY_NAME[path].quantizes_input for path, _ in kinds)

    def workspace_shapes(self, shape: DispatchShape) -> WorkspaceShapes:
        """Return buffers large enough for any call of at most shape.tokens tokens.

        A call with fewer tokens can need a larger buffer, because it may take another path or use
        smaller blocks, which need more padding.
        """
        assert isinstance(shape, StandardShape)
        groups = self._list_call_groups(shape.tokens)
        return self._workspace_cache.get_or_merge(
            self.problem, shape, groups, lambda group: group.specs()
        )

    def _list_call_groups(self, tokens: int) -> tuple["_CallGroup", ...]:
        calls = (
            _CallGroup(self._paths[path], block_m, max_tokens, prepared)
            for prepared in self._prepared_options
            for (path, block_m), max_tokens in self._get_max_tokens_by_kind(
                tokens, prepared
            ).items()
        )
        calls_without_adapters = (
            ()
            if self._without_adapters is None
            else self._without_adapters._list_call_groups(tokens)
        )
        return (*calls, *calls_without_adapters)

    def _get_max_tokens_by_kind(self, tokens: int, prepared: bool) -> dict[tuple[str, int], int]:
        """Map each (path, block_m) to the number of tokens of the largest call that may use it.

        The paths that a call can take depend on the strides of its tensors, so all sets of paths
        are included.
        """
        result: dict[tuple[str, int], int] = {}
        for paths in self._path_sets:
            kinds = buffer_kinds_up_to(self.problem, tokens, paths, prepared=prepared)
            for max_tokens, path, block_m in kinds:
                result[path, block_m] = max(max_tokens, result.get((path, block_m), 0))
        return result

    def prepared_specs(self) -> dict[str, BufferSpec]:
        all_specs = [path.prepared_specs() for path in self._paths.values()]
        if self._without_adapters is not None:
            all_specs.append(self._without_adapters.prepared_specs())
        return {name: spec for specs in all_specs for name, spec in specs.items()}

    def prepare(self, weights: ExpertWeights, out: Mapping[str, torch.Tensor]) -> None:
        for path in self._paths.values():
            if path.prepared_specs():
                path.prepare(weights, out)
        if self._without_adapters is not None and self._without_adapters.prepared_specs():
            self._without_adapters.prepare(weights, out)

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        return reducer_for(self.problem, TopKWeightAndReduceNoOp())

    def roundings(self, x_TH: torch.Tensor, weights: ExpertWeights) -> Roundings | None:
        return self._paths[self._choose_config(x_TH, weights).path].roundings

    def path_name(self, x_TH: torch.Tensor, weights: ExpertWeights) -> str:
        return self._choose_config(x_TH, weights).path

    def apply(
        self,
        tokens: Dispatched,
        *,
        weights: ExpertWeights,
        workspace: Workspace,
        output: torch.Tensor,
    ) -> None:
        assert isinstance(tokens, StandardTokens)
        if self._without_adapters is not None and tokens.routing.adapters_T is None:
            self._without_adapters.apply(
                tokens, weights=weights, workspace=workspace, output=output
            )
            return
        config = self._choose_config(tokens.x_TH, weights)
        path_log.log_path(config.path, self.problem, weights)
        self._paths[config.path].run(PathCall(tokens, weights, workspace, output, config))

    @cached_property
    def _has_prepared_file(self) -> bool:
        """Return whether there is a file that was tuned with prepared weights."""
        return current_lookup().find_source(self.problem, prepared=True).prepared

    def _reads_prepared(self, weights: ExpertWeights, tokens: int) -> bool:
        """Return whether a call uses the prepared weights.

        They are used if the configuration is overridden, if it comes from a file tuned with
        prepared weights, or if they make every path faster.
        """
        if weights.w1_tiles is None or len(self._prepared_options) == 1:
            return False
        if is_overridden() or self._has_prepared_file:
            return True
        return all(path.is_faster_when_prepared(weights, tokens) for path in self._paths.values())

    def _choose_config(self, x_TH: torch.Tensor, weights: ExpertWeights) -> MoEConfig:
        """Return the configuration of a call, whose path supports the strides of these tensors."""
        paths, tokens = self._paths, len(x_TH)
        prepared = self._reads_prepared(weights, tokens)
        config = choose_config(self.problem, tokens, tuple(paths), prepared=prepared)
        # An override is not adapted to strides, even if its path is slow for them.
        n_major = not self._quantized and any_n_major(weights) and not is_overridden()
        path = paths[config.path]
        if not path.supports_tensors(weights, x_TH) or (
            n_major and not path.is_fast(weights, tokens)
        ):
            supported = tuple(
                name
                for name, path in paths.items()
                if path.supports_tensors(weights, x_TH)
                and (not n_major or path.is_fast(weights, tokens))
            )
            config = choose_config(self.problem, tokens, supported, prepared=prepared)
            path = paths[config.path]
        if not n_major:
            return config
        return path.config_for_strides(config, weights, current_lookup().device)


def config_for_strides(path: Path, config: MoEConfig, weights: ExpertWeights) -> MoEConfig:
    """Adapt `config` to the strides of unquantized weights, unless it is an override."""
    if not any_n_major(weights) or is_overridden():
        return config
    return path.config_for_strides(config, weights, current_lookup().device)


@dataclass(frozen=True)
class _CallGroup:
    """Calls of up to max_tokens tokens that need the same buffers."""

    path: Path
    block_m: int
    max_tokens: int
    prepared: bool

    def specs(self) -> dict[str, BufferSpec]:
        specs = self.path.specs_of_prepared if self.prepared else self.path.specs
        return specs(self.max_tokens, self.block_m)


def supported_paths(problem: Problem) -> tuple[str, ...]:
    """Return the names of the paths that support `problem` on the current device.

    `configs.select.on_device` sets the current device.
    """
    device = current_lookup().device
    return tuple(path.name for path in ALL_PATHS if path.supports(problem, device))


def _list_possible_path_sets(paths: Mapping[str, Path]) -> tuple[tuple[str, ...], ...]:
    """Return every subset of `paths` that can accept the tensors of a call."""
    names_that_may_reject = [name for name, path in paths.items() if path.may_reject_tensors]
    rejected = (
        rejected_paths
        for count in range(len(names_that_may_reject) + 1)
        for rejected_paths in combinations(names_that_may_reject, count)
    )
    return tuple(
        tuple(name for name in paths if name not in rejected_paths) for rejected_paths in rejected
    )
