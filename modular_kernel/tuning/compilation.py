"""Compilation of choices (launch configurations) in worker processes, before they are timed.

A worker calls a layer with meta tensors, which have the shapes, strides and dtypes of a real call,
and compiles every kernel that the call would launch. The process that times the kernels loads them
from Triton's disk cache. Workers use no GPU.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, TimeoutError
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import TYPE_CHECKING

import torch

from modular_kernel.catalog import load_catalog, make_kernel
from modular_kernel.contracts import Choice, Tunable
from modular_kernel.errors import ConfigurationError
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.quant.quantized_weights import get_default_scale_dtype, weight_specs
from modular_kernel.settings import hide_gpus
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.tuning.search import Refusal
from modular_kernel.workspace import Workspace

if TYPE_CHECKING:
    from modular_kernel.testing.compile.report import CompileRecord

_META = torch.device("meta")
# Several choices per task, because queueing a task takes as long as loading a compiled kernel.
_CHOICES_PER_TASK = 3
_MAX_WAIT_SECONDS = 300.0  # for one choice, including the choices before it in the queue


@dataclass(frozen=True)
class TunedPair:
    """The pair of parts to tune, and the machine.

    prepare_finalize: name of the PrepareAndFinalize.
    experts: name of the experts part, whose launches are tuned.
    prepared: whether calls use prepared weights.
    """

    prepare_finalize: str
    experts: str
    machine: Machine
    prepared: bool = False

    def make_search_space(self, problem: Problem) -> Tunable:
        """Return the search space of the experts part for a problem.

        Raises ConfigurationError if launches of the part cannot be tuned.
        """
        space = load_catalog().experts(self.experts).tunable(problem)
        if space is not None and self.prepared:
            space = space.for_prepared_weights()
        if space is None:
            suffix = " with prepared weights" if self.prepared else ""
            need = f"a part whose launches can be tuned{suffix}"
            got = "no tunable launches"
            raise ConfigurationError(f"experts part {self.experts}", got=got, need=need)
        return space


@dataclass(frozen=True)
class CompileTask:
    """Choices to compile for one problem, in one worker process.

    space: the search space, which the main process creates, because it may depend on the GPU.
    """

    pair: TunedPair
    space: Tunable
    problem: Problem
    choices: tuple[Choice, ...]

    def run(self) -> list[str]:
        """Return the result of `compile_choice` for each choice."""
        return [compile_choice(self, choice) for choice in self.choices]


def compile_choice(task: CompileTask, choice: Choice) -> str:
    """Compile a choice. Return "", or the reason why it should not be timed.

    The reason is an error of the compiler, spilled registers, or too much shared memory.
    """
    from modular_kernel.testing.compile.report import check

    pair, problem = task.pair, task.problem
    assert pair.machine.arch is not None
    target = "sm_{}{}".format(*pair.machine.arch)
    try:
        with task.space.using(choice):
            names = pair.prepare_finalize, pair.experts
            kernel = make_kernel(*names, problem, machine=pair.machine)
            records = compile_kernels(kernel, target, prepared=pair.prepared)
    # The compiler can raise any exception, which must not end the tuning.
    except Exception as error:  # noqa: BLE001
        return f"does not compile: {type(error).__name__}: {str(error)[:200]}"
    return "; ".join(reason for record in records for reason in check(record))


def compile_kernels(
    kernel: FusedMoEModularKernel, target: str, *, prepared: bool = False
) -> "list[CompileRecord]":
    """Compile the kernels that one call launches, and return a record of each compilation.

    target: the GPU architecture, such as "sm_90".
    prepared: whether the call uses prepared weights.
    """
    from modular_kernel.testing.compile.report import record_compiles

    problem = kernel.problem
    workspace = Workspace(kernel.workspace_specs(problem.tokens), _META)
    x_TH, weights, routing = make_meta_inputs(problem)
    if prepared:
        prepared_specs = kernel.experts.prepared_specs().items()
        weights = replace(
            weights, **{n: _make_empty(spec.shape, spec.dtype) for n, spec in prepared_specs}
        )
    out = torch.empty(problem.output_shape, dtype=problem.dtype, device=_META)
    with record_compiles(target) as records:
        kernel.start_checked(x_TH, weights, routing, out, workspace).finish()
    return records


def make_meta_inputs(problem: Problem) -> tuple[torch.Tensor, ExpertWeights, Routing]:
    """Return x_TH, weights and routing of a call as meta tensors.

    Scales have the dtype that `quantize_weights` uses by default.
    """
    specs = weight_specs(problem)
    dtypes = {name: spec.dtypes[0] for name, spec in specs.items()}
    if problem.scheme.quantized:
        dtypes |= dict.fromkeys(("w1_scale", "w2_scale"), get_default_scale_dtype(problem))
    tensors = {name: _make_empty(spec.shape, dtypes[name]) for name, spec in specs.items()}
    if problem.bias:
        tensors["b1"] = _make_empty((problem.e, problem.w1_rows), problem.dtype)
        tensors["b2"] = _make_empty((problem.e, problem.hidden), problem.dtype)
    if problem.expert_map:
        tensors["expert_map"] = _make_empty((problem.experts,), torch.int32)
    pairs = (problem.tokens, problem.top_k)
    routing = Routing(
        _make_empty(pairs, torch.float32), _make_empty(pairs, problem.ids_dtype or torch.int32)
    )
    x_TH = _make_empty((problem.tokens, problem.hidden), problem.dtype)
    return x_TH, ExpertWeights(**tensors), routing


def _make_empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=_META)


class Compiler:
    """Compiles choices in `workers` processes, which end when the context exits."""

    def __init__(self, workers: int) -> None:
        context = get_context("spawn")
        self._pool = ProcessPoolExecutor(workers, mp_context=context, initializer=hide_gpus)
        self._futures: dict[tuple[TunedPair, Problem, Choice], tuple[Future[list[str]], int]] = {}

    def __enter__(self) -> "Compiler":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def submit(
        self, pair: TunedPair, space: Tunable, problem: Problem, choices: Sequence[Choice]
    ) -> None:
        """Start to compile the choices that were not submitted before."""
        unqueued = [c for c in dict.fromkeys(choices) if (pair, problem, c) not in self._futures]
        for start in range(0, len(unqueued), _CHOICES_PER_TASK):
            task = CompileTask(
                pair, space, problem, tuple(unqueued[start : start + _CHOICES_PER_TASK])
            )
            future = self._pool.submit(task.run)
            for index, choice in enumerate(task.choices):
                self._futures[pair, problem, choice] = future, index

    def wait_compiled(
        self, pair: TunedPair, space: Tunable, problem: Problem, choice: Choice
    ) -> Refusal | None:
        """Wait until a choice is compiled. Return None, or a refusal if it should not be timed."""
        self.submit(pair, space, problem, [choice])
        future, index = self._futures[pair, problem, choice]
        try:
            reason = future.result(timeout=_MAX_WAIT_SECONDS)[index]
        except TimeoutError:
            reason = f"not compiled in {_MAX_WAIT_SECONDS:.0f} s"
        return Refusal(reason) if reason else None
