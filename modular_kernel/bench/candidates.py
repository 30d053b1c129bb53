"""Layers that can be benchmarked: our pairings, torch._grouped_mm, and layers of the user.

A file given with `--peer` defines `layers()`, which returns a list of new `Layer` objects:

    import torch
    from modular_kernel.bench.candidates import Layer

    class Mine(Layer):
        name, quant = "mine", "none"  # quant: the name of a scheme

        def refusal(self, problem):  # reason why it cannot run a problem; None if it can
            return None if problem.act.kind == "silu" else "silu only"

        def setup(self, problem, weights):  # untimed, once for each shape
            import my_engine

            # w1 (e, 2I, H), gate rows first; w2 (e, H, I); problem.tokens is the maximum per call
            self.engine = my_engine.Moe(weights.w1, weights.w2, problem.top_k)

        def call(self, x_TH, routing):  # timed, the whole layer: returns y (T, H) in x's dtype
            return self.engine(x_TH, routing.topk_ids_TK, routing.topk_weights_TK)

    def layers():
        return [Mine()]

`call` runs a whole layer: index computation, quantization of x, both GEMMs, activation, and
weighted sum. It should be capturable in a CUDA graph, so without synchronization or data-dependent
shapes. The weights passed to `setup` are unquantized; `setup` quantizes them if `quant` says so.
`layers()` is called once for each shape and set of weights, and its objects must not share state.
"""

import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from modular_kernel.bench.peer_files import load_file
from modular_kernel.catalog import check, load_catalog, make_kernel, needs_triton
from modular_kernel.compatibility.support import Verdict
from modular_kernel.errors import IncompatibleError
from modular_kernel.kernel import Plan
from modular_kernel.layers.fused_moe import FusedMoE
from modular_kernel.machine import prefer_torch_reference
from modular_kernel.measure.cases import quantize
from modular_kernel.measure.prepared_weights import prepared_specs_of, prepared_tensor_bytes
from modular_kernel.measure.records import BASELINE, OURS, PEER
from modular_kernel.select.autotune import Terms, compose
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.tensors import ExpertWeights, Routing

_GROUPED_MM_BYTES = 16  # required alignment of operand rows


class Layer(ABC):
    """Base class of benchmarked layers, which map x and routing to y.

    name: name in the tables. quant: name of the quantization scheme. graph: whether to try to
    capture calls in a CUDA graph. interpreted: whether the layer runs in Triton's interpreter, so
    that its time is meaningless. tuned: whether `setup` or `tune` times launches, so that nothing
    else may run at the same time.
    """

    name: str
    quant: str = "none"
    graph: bool = True
    interpreted: bool = False
    tuned: bool = False

    def refusal(self, problem: Problem) -> str | None:
        """Return the reason why the layer cannot run this problem; None if it can."""
        return None

    def kept_bytes(self, problem: Problem) -> int:
        """Return the bytes that `setup` keeps per set of weights, in addition to the weights."""
        return 0

    @abstractmethod
    def setup(self, problem: Problem, weights: ExpertWeights) -> None:
        """Set up the layer for these weights; untimed. problem.tokens is the maximum per call."""

    def tune(self, problem: Problem) -> None:  # noqa: B027  most layers have nothing to tune
        """Prepare for calls with problem.tokens tokens; untimed, before the first of them."""

    def note(self, problem: Problem) -> str:
        """Return the note in the row of this layer for calls of problem.tokens tokens."""
        return ""

    @abstractmethod
    def call(self, x_TH: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Run the layer and return y, (T, H) in the dtype of x; this is timed."""


@dataclass(frozen=True)
class BenchOffer:
    """A factory of benchmarked layers.

    quant, origin, library: see measure.records.Row. prepared: whether the layers' `setup` prepares
    the weights.
    """

    name: str
    quant: str
    origin: str
    make: Callable[[], Layer]
    prepared: bool = False
    library: str = ""


class PairLayer(Layer):
    """One of our pairings, with a plan for the number of tokens of the last call.

    prepared: whether to prepare the weights once, in `setup`.
    """

    def __init__(
        self,
        prepare_finalize: str,
        experts: str,
        quant: str,
        machine: Machine,
        prepared: bool = False,
    ) -> None:
        self.pair, self.prepared = (prepare_finalize, experts), prepared
        self.name, self.quant, self.machine = f"{prepare_finalize}+{experts}", quant, machine
        self.interpreted = machine.interpreter and needs_triton(prepare_finalize, experts)
        self._uses_torch_references = machine.interpreter and not self.interpreted

    def refusal(self, problem: Problem) -> str | None:
        quantized_problem = replace(problem, quant=self.quant)
        verdict = check(*self.pair, quantized_problem, self.machine)
        if verdict.ok and self.prepared and not self.kept_bytes(problem):
            return f"{self.pair[1]} does not prepare such weights"
        return "; ".join(map(str, verdict.rejections)) or None

    def kept_bytes(self, problem: Problem) -> int:
        quantized_problem = replace(problem, quant=self.quant)
        return prepared_tensor_bytes(self.pair[1], quantized_problem) if self.prepared else 0

    def setup(self, problem: Problem, weights: ExpertWeights) -> None:
        self.problem = replace(problem, quant=self.quant)
        self.graph = check(*self.pair, replace(self.problem, graph=True), self.machine).ok
        self.weights = quantize(weights, self.problem)
        if self.prepared:
            kernel = make_kernel(*self.pair, self.problem, machine=self.machine)
            with prefer_torch_reference(enabled=self._uses_torch_references):
                self.weights = kernel.prepare_weights(self.weights)
        self._plan: Plan | None = None

    def call(self, x_TH: torch.Tensor, routing: Routing) -> torch.Tensor:
        if self._uses_torch_references:
            with prefer_torch_reference():
                return self._call_plan(x_TH, routing)
        return self._call_plan(x_TH, routing)

    def _call_plan(self, x_TH: torch.Tensor, routing: Routing) -> torch.Tensor:
        plan = self._plan
        if plan is None or plan.problem.tokens != len(x_TH):
            plan = self._make_plan(len(x_TH))
        return plan(x_TH, self.weights, routing)

    def _make_plan(self, tokens: int) -> Plan:
        self._plan = None  # frees its buffers before others are allocated
        problem = self.problem.with_tokens(tokens)
        kernel = make_kernel(*self.pair, problem, machine=self.machine, auto_prepare=False)
        self._plan = kernel.plan()
        return self._plan


class DefaultLayer(Layer):
    """FusedMoE with default arguments.

    prepared: whether to prepare the weights once, in `setup`.
    """

    name = "FusedMoE"

    def __init__(self, quant: str, prepared: bool = False) -> None:
        self.quant, self.prepared = quant, prepared

    def setup(self, problem: Problem, weights: ExpertWeights) -> None:
        problem = replace(problem, quant=self.quant)
        self.layer = FusedMoE(
            problem.experts,
            problem.hidden,
            problem.intermediate,
            top_k=problem.top_k,
            quant_config=None if self.quant == "none" else self.quant,
            params_dtype=problem.dtype,
            device="meta",  # the parameters are replaced
        )
        self.layer.set_weights(quantize(weights, problem))
        if self.prepared:
            self.layer.prepare_weights()

    def call(self, x_TH: torch.Tensor, routing: Routing) -> torch.Tensor:
        y_TH: torch.Tensor = self.layer(x_TH, routing)
        return y_TH


class ComposedLayer(Layer):
    """The layer that `compose` builds for the token counts `tokens`.

    budget: seconds that `compose` may take for its timings. prepared: whether to prepare the
    weights once, in `setup`.
    """

    name, tuned = "compose", True

    def __init__(
        self,
        quant: str,
        machine: Machine,
        tokens: tuple[int, ...],
        budget: float,
        prepared: bool = False,
    ) -> None:
        self.quant, self.machine, self.prepared = quant, machine, prepared
        self.terms = Terms(tokens=tokens, budget=budget)

    def setup(self, problem: Problem, weights: ExpertWeights) -> None:
        problem = replace(problem, quant=self.quant)
        kernel = compose(problem, self.machine, terms=self.terms)
        self.weights = quantize(weights, problem)
        if self.prepared:
            self.weights = kernel.prepare_weights(self.weights)
        self.kernel, self.plan = kernel, kernel.plan()

    def note(self, problem: Problem) -> str:
        """Name the pairing that was selected for this number of tokens."""
        return self.kernel.kernel(problem.tokens).pairing

    def call(self, x_TH: torch.Tensor, routing: Routing) -> torch.Tensor:
        return self.plan(x_TH, self.weights, routing)


class TorchGroupedMm(Layer):
    """A plain SwiGLU layer in bfloat16 built on torch._grouped_mm.

    Steps: sort, gather, GEMM, SiLU and multiply, GEMM, scatter, weighted sum.
    """

    name = "torch_grouped_mm"

    def refusal(self, problem: Problem) -> str | None:
        simplified = replace(
            problem, tokens=1, hidden=1, intermediate=1, experts=1, top_k=1, graph=False,
            deterministic=False, ids_dtype=None,
        )  # fmt: skip
        if simplified != Problem(1, 1, 1, 1, 1, problem.dtype):
            return "plain SwiGLU layers only"
        if problem.dtype is not torch.bfloat16:
            return "bfloat16 only"
        rows = [n * problem.dtype.itemsize for n in (problem.hidden, problem.intermediate)]
        if any(row % _GROUPED_MM_BYTES for row in rows):
            return f"rows of {_GROUPED_MM_BYTES} bytes only"
        if not hasattr(torch, "_grouped_mm"):
            return "this torch has no _grouped_mm"
        return None

    def setup(self, problem: Problem, weights: ExpertWeights) -> None:
        self.problem = problem
        self.w1_eHN, self.w2_eIH = weights.w1.mT, weights.w2.mT
        self.ones_P = torch.ones(1, dtype=torch.int32, device=weights.w1.device)

    def call(self, x_TH: torch.Tensor, routing: Routing) -> torch.Tensor:
        problem, ids_P = self.problem, routing.topk_ids_TK.flatten()
        order_P = torch.sort(ids_P, stable=True).indices
        counts_e = torch.zeros(problem.experts, dtype=torch.int32, device=x_TH.device)
        counts_e.scatter_add_(0, ids_P.long(), self.ones_P.expand(len(ids_P)))
        ends_e = counts_e.cumsum(0, dtype=torch.int32)
        h_PN = torch._grouped_mm(x_TH[order_P // problem.top_k], self.w1_eHN, offs=ends_e)
        gate_PI, up_PI = h_PN.chunk(2, dim=1)
        h_PI = torch.nn.functional.silu(gate_PI) * up_PI
        rows_PH = torch._grouped_mm(h_PI, self.w2_eIH, offs=ends_e)
        y_PH = torch.empty_like(rows_PH)
        y_PH[order_P] = rows_PH
        y_TKH = y_PH.view(len(x_TH), problem.top_k, problem.hidden)
        weights_T1K = routing.topk_weights_TK.to(x_TH.dtype)[:, None]
        return torch.bmm(weights_T1K, y_TKH).squeeze(1)


def pair_offers(
    prepare_finalize: str | None,
    experts: str | None,
    problems: Sequence[Problem],
    machine: Machine,
    *,
    prepared: bool = False,
) -> list[BenchOffer]:
    """Return offers of our pairings.

    An offer is named after its experts part if no other pairing uses that part.

    prepare_finalize, experts: names of parts; None stands for all parts. problems: a pairing is
    offered for the scheme of each of them that it is valid for. prepared: whether to add, after
    each pairing whose experts part prepares weights, a second offer with prepared weights. Raises
    IncompatibleError with every reason if both names are given and the pairing is valid for no
    problem.
    """
    catalog = load_catalog()
    pfs = catalog.names("prepare_finalize")
    if prepare_finalize is not None:
        pfs = (catalog.prepare_finalize(prepare_finalize).__name__,)
    all_experts = catalog.names("experts")
    if experts is not None:
        all_experts = (catalog.experts(experts).__name__,)
    valid: list[tuple[str, str, str]] = []
    preparing: set[tuple[str, str]] = set()
    refused: list[Verdict] = []
    for pf, ex in itertools.product(pfs, all_experts):
        for problem in problems:
            verdict = check(pf, ex, problem, machine)
            if not verdict.ok:
                refused.append(verdict)
                continue
            if (pf, ex, problem.quant) not in valid:
                valid.append((pf, ex, problem.quant))
            if prepared and (ex, problem.quant) not in preparing and prepared_specs_of(ex, problem):
                preparing.add((ex, problem.quant))
    if prepare_finalize is not None and experts is not None and not valid and refused:
        raise IncompatibleError(refused[0].pairing, refused[0].rejections)
    pairings_by_experts = Counter(ex for _, ex in {(pf, ex) for pf, ex, _ in valid})
    return [
        BenchOffer(
            with_prepared(name) if with_weights else name,
            quant,
            OURS,
            partial(PairLayer, pf, ex, quant, machine, with_weights),
            with_weights,
            library_of(ex),
        )
        for pf, ex, quant in valid
        for name in [ex if pairings_by_experts[ex] == 1 else f"{pf}+{ex}"]
        for with_weights in ([False, True] if (ex, quant) in preparing else [False])
    ]


# Parts whose GEMMs are torch's. Those that run other libraries declare a provider.
_TORCH_GEMM_PARTS = frozenset({"GroupedGemmExperts", "NaiveBatchedExperts", "TorchExperts"})


def library_of(experts: str) -> str:
    """Return the library whose GEMMs an experts part runs; "" for this project's kernels."""
    if experts in _TORCH_GEMM_PARTS:
        return "torch"
    return ", ".join(probe.name for probe in load_catalog().experts(experts).requires.providers)


def with_prepared(name: str) -> str:
    """Return the name of a pairing's offer with prepared weights."""
    return f"{name} prepared"


def baseline_offers() -> list[BenchOffer]:
    """Return the built-in baselines."""
    return [BenchOffer(TorchGroupedMm.name, TorchGroupedMm.quant, BASELINE, TorchGroupedMm)]


def peer_offers(path: Path) -> list[BenchOffer]:
    """Load the layers that a --peer file defines.

    Raises ConfigurationError or BrokenPartError, with the name of the file, if that fails.
    """
    layers, loaded = load_file(path, "layers", Layer)
    return [
        BenchOffer(
            layer.name, str(QuantScheme.parse(layer.quant)), PEER, partial(_nth, layers, index)
        )
        for index, layer in enumerate(loaded)
    ]


def _nth(layers: Callable[[], list[Layer]], index: int) -> Layer:
    return layers()[index]
