"""What can stand in the table: our pairings, torch's grouped products, and a user's own layers.

A file given with `--peer` defines `layers()`, which returns a list of new `Layer` objects:

    import torch
    from modular_kernel.bench.candidates import Layer

    class Mine(Layer):
        name, quant = "mine", "none"  # quant: the name of a scheme

        def refusal(self, problem):  # why it cannot run a problem; None if it can
            return None if problem.act.kind == "silu" else "silu only"

        def setup(self, problem, weights):  # untimed, once for each shape
            import my_engine

            # w1 (e, 2I, H), gate rows first; w2 (e, H, I); problem.tokens is the most of a call
            self.engine = my_engine.Moe(weights.w1, weights.w2, problem.top_k)

        def call(self, x_TH, routing):  # timed, the whole layer: returns y (T, H) in x's dtype
            return self.engine(x_TH, routing.topk_ids_TK, routing.topk_weights_TK)

    def layers():
        return [Mine()]

A whole layer: index work, quantization of x, both products, activation, weighted sum.
`call` should be capturable in a CUDA graph: no synchronization, no shape that depends on data. The
weights arrive unquantized whatever `quant` says: quantizing them is `setup`'s work. `layers()` is
called once for each shape and set of weights: what one object keeps, the next must not share.
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
from modular_kernel.machine import torch_twins
from modular_kernel.measure.cases import quantized
from modular_kernel.measure.prepared_weights import declared_bytes, declared_specs
from modular_kernel.measure.records import BASELINE, OURS, PEER
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.tensors import ExpertWeights, Routing

_GROUPED_MM_BYTES = 16  # rows of its operands must start on such multiples


class Layer(ABC):
    """A whole layer from x and routing to y. name: in the table. quant: its scheme.

    graph: whether to try to capture its calls. interpreted: it runs in Triton's interpreter, so
    that its time says nothing about a GPU.
    """

    name: str
    quant: str = "none"
    graph: bool = True
    interpreted: bool = False

    def refusal(self, problem: Problem) -> str | None:
        """Why it cannot run this problem; None if it can."""
        return None

    def kept_bytes(self, problem: Problem) -> int:
        """Bytes that `setup` keeps of one set of weights, beside them in the scheme's format."""
        return 0

    @abstractmethod
    def setup(self, problem: Problem, weights: ExpertWeights) -> None:
        """Take the weights; problem.tokens is the most tokens of a call. Untimed."""

    @abstractmethod
    def call(self, x_TH: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Return the layer's output, (T, H) in x's dtype; this is timed."""


@dataclass(frozen=True)
class BenchOffer:
    """A layer that can be made as often as needed. prepared: its weights are, in `setup`."""

    name: str
    quant: str
    origin: str
    make: Callable[[], Layer]
    prepared: bool = False


class PairLayer(Layer):
    """One of our pairings, planned for the number of tokens at hand.

    prepared: with weights that the kernel prepares once, in `setup`.
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
        self._as_torch = machine.interpreter and not self.interpreted

    def refusal(self, problem: Problem) -> str | None:
        own = replace(problem, quant=self.quant)
        verdict = check(*self.pair, own, self.machine)
        if verdict.ok and self.prepared and not self.kept_bytes(problem):
            return f"{self.pair[1]} prepares nothing of these weights"
        return "; ".join(map(str, verdict.rejections)) or None

    def kept_bytes(self, problem: Problem) -> int:
        own = replace(problem, quant=self.quant)
        return declared_bytes(self.pair[1], own) if self.prepared else 0

    def setup(self, problem: Problem, weights: ExpertWeights) -> None:
        self.problem = replace(problem, quant=self.quant)
        self.graph = check(*self.pair, replace(self.problem, graph=True), self.machine).ok
        self.weights = quantized(weights, self.problem)
        if self.prepared:
            kernel = make_kernel(*self.pair, self.problem, machine=self.machine)
            with torch_twins(wanted=self._as_torch):
                self.weights = kernel.prepare_weights(self.weights)
        self._plan: Plan | None = None

    def call(self, x_TH: torch.Tensor, routing: Routing) -> torch.Tensor:
        if self._as_torch:
            with torch_twins():
                return self._called(x_TH, routing)
        return self._called(x_TH, routing)

    def _called(self, x_TH: torch.Tensor, routing: Routing) -> torch.Tensor:
        plan = self._plan
        if plan is None or plan.problem.tokens != len(x_TH):
            plan = self._planned(len(x_TH))
        return plan(x_TH, self.weights, routing)

    def _planned(self, tokens: int) -> Plan:
        self._plan = None  # its buffers go first
        problem = self.problem.with_tokens(tokens)
        self._plan = make_kernel(*self.pair, problem, machine=self.machine).plan()
        return self._plan


class TorchGroupedMm(Layer):
    """torch._grouped_mm: sort, gather, product, SiLU and multiply, product, scatter, sum."""

    name = "torch_grouped_mm"

    def refusal(self, problem: Problem) -> str | None:
        plain = replace(
            problem, tokens=1, hidden=1, intermediate=1, experts=1, top_k=1, graph=False,
            deterministic=False, ids_dtype=None,
        )  # fmt: skip
        if plain != Problem(1, 1, 1, 1, 1, problem.dtype):
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
    """Every pairing that the names, where given, leave and that is valid for a problem.

    problems: their `quant` says in which schemes. prepared: behind each whose experts prepare
    weights of a problem, the same with prepared ones. Called by its experts where no other pairing
    has those. IncompatibleError with every reason if both names are given and never fit.
    """
    catalog = load_catalog()
    pfs = catalog.names("prepare_finalize")
    if prepare_finalize is not None:
        pfs = (catalog.prepare_finalize(prepare_finalize).__name__,)
    all_experts = catalog.names("experts")
    if experts is not None:
        all_experts = (catalog.experts(experts).__name__,)
    found: list[tuple[str, str, str]] = []
    preparing: set[tuple[str, str]] = set()
    refused: list[Verdict] = []
    for pf, ex in itertools.product(pfs, all_experts):
        for problem in problems:
            verdict = check(pf, ex, problem, machine)
            if not verdict.ok:
                refused.append(verdict)
                continue
            if (pf, ex, problem.quant) not in found:
                found.append((pf, ex, problem.quant))
            if prepared and (ex, problem.quant) not in preparing and declared_specs(ex, problem):
                preparing.add((ex, problem.quant))
    if prepare_finalize is not None and experts is not None and not found and refused:
        raise IncompatibleError(refused[0].pairing, refused[0].rejections)
    hosts = Counter(ex for _, ex in {(pf, ex) for pf, ex, _ in found})
    return [
        BenchOffer(
            with_prepared(name) if once else name,
            quant,
            OURS,
            partial(PairLayer, pf, ex, quant, machine, once),
            once,
        )
        for pf, ex, quant in found
        for name in [ex if hosts[ex] == 1 else f"{pf}+{ex}"]
        for once in ([False, True] if (ex, quant) in preparing else [False])
    ]


def with_prepared(name: str) -> str:
    """Name the row of a pairing whose weights are prepared."""
    return f"{name} prepared"


def baseline_offers() -> list[BenchOffer]:
    """Return what this package brings to compare with."""
    return [BenchOffer(TorchGroupedMm.name, TorchGroupedMm.quant, BASELINE, TorchGroupedMm)]


def peer_offers(path: Path) -> list[BenchOffer]:
    """Load the layers of a user's file.

    Raise an error that names the file if there are none to be had.
    """
    layers, made = load_file(path, "layers", Layer)
    return [
        BenchOffer(
            layer.name, str(QuantScheme.parse(layer.quant)), PEER, partial(_nth, layers, index)
        )
        for index, layer in enumerate(made)
    ]


def _nth(layers: Callable[[], list[Layer]], index: int) -> Layer:
    return layers()[index]
