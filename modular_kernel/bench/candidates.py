"""The layers that `mk bench` and `make bench` compare, with the common interface `Layer`.

The layers are our pairings, `FusedMoE`, the layer that `mk.compose` builds, torch._grouped_mm, and
peers (layers of other libraries). A --peer file defines `layers()`, which returns a list of new
`Layer` objects:

    import torch
    from modular_kernel.bench.candidates import Layer

    class Mine(Layer):
        name, quant = "mine", "none"  # quant: the name of a scheme

        def refusal(self, problem):  # the reason why it cannot run this problem, or None
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
weighted sum. `call` should be capturable in a CUDA graph, that is, it must not synchronize, and its
shapes must not depend on data. The weights passed to `setup` are unquantized, and `setup` quantizes
them to the scheme `quant`. `layers()` is called once for each shape and set of weights, and its
objects must not share state.
"""

import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from modular_kernel.bench.peer_files import load_peer_file
from modular_kernel.catalog import check, load_catalog, make_kernel, needs_triton
from modular_kernel.compatibility.support import Verdict
from modular_kernel.errors import IncompatibleError
from modular_kernel.kernel import Plan
from modular_kernel.layers.fused_moe import FusedMoE
from modular_kernel.machine import prefer_torch_reference
from modular_kernel.measure.cases import quantize
from modular_kernel.measure.prepared_weights import prepared_specs_of, prepared_tensor_bytes
from modular_kernel.measure.records import BASELINE, OURS, PEER
from modular_kernel.select.autotune import MeasurementOptions, compose
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.tensors import ExpertWeights, Routing

_GROUPED_MM_ALIGNMENT = 16  # bytes, of each operand's rows


class Layer(ABC):
    """Base class of benchmarked layers, which compute y from x and its routing.

    name: the layer's name in tables.
    quant: name of its quantization scheme.
    graph: whether to capture calls in a CUDA graph, if possible.
    interpreted: whether the layer runs in Triton's interpreter, so that its time is meaningless.
    tuned: whether `setup` or `tune` times kernels. Other work on the GPU would distort these times.
    """

    name: str
    quant: str = "none"
    graph: bool = True
    interpreted: bool = False
    tuned: bool = False

    def refusal(self, problem: Problem) -> str | None:
        """Return the reason why the layer cannot run this problem, or None if it can."""
        return None

    def setup_bytes(self, problem: Problem) -> int:
        """Return the bytes that `setup` allocates for each set of weights, besides the weights."""
        return 0

    @abstractmethod
    def setup(self, problem: Problem, weights: ExpertWeights) -> None:
        """Set up the layer for these weights. Not timed. problem.tokens is the maximum per call."""

    def tune(self, problem: Problem) -> None:  # noqa: B027  most layers have nothing to tune
        """Tune the layer for problem.tokens tokens, before the first call with them. Not timed."""

    def note(self, problem: Problem) -> str:
        """Return the text of the `note` column for calls with problem.tokens tokens."""
        return ""

    @abstractmethod
    def call(self, x_TH: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Run the layer and return y, (T, H) in the dtype of x. Timed."""


@dataclass(frozen=True)
class Candidate:
    """A layer to compare, which `make` creates once for each shape and set of weights.

    For quant, origin, prepared and library, see measure.records.Row.
    """

    name: str
    quant: str
    origin: str
    make: Callable[[], Layer]
    prepared: bool = False
    library: str = ""


class PairingLayer(Layer):
    """One of our pairings, run through a `Plan` (preallocated buffers for one number of tokens).

    prepared: whether `setup` prepares the weights, that is, changes their layout for the kernels.
    """

    def __init__(
        self,
        prepare_finalize: str,
        experts: str,
        quant: str,
        machine: Machine,
        prepared: bool = False,
    ) -> None:
        self.pairing, self.prepared = (prepare_finalize, experts), prepared
        self.name, self.quant, self.machine = f"{prepare_finalize}+{experts}", quant, machine
        self.interpreted = machine.interpreter and needs_triton(prepare_finalize, experts)
        self._uses_torch_references = machine.interpreter and not self.interpreted

    def refusal(self, problem: Problem) -> str | None:
        quantized_problem = replace(problem, quant=self.quant)
        verdict = check(*self.pairing, quantized_problem, self.machine)
        if verdict.ok and self.prepared and not self.setup_bytes(problem):
            return f"{self.pairing[1]} does not prepare weights of this problem"
        return "; ".join(map(str, verdict.rejections)) or None

    def setup_bytes(self, problem: Problem) -> int:
        quantized_problem = replace(problem, quant=self.quant)
        return prepared_tensor_bytes(self.pairing[1], quantized_problem) if self.prepared else 0

    def setup(self, problem: Problem, weights: ExpertWeights) -> None:
        self.problem = replace(problem, quant=self.quant)
        self.graph = check(*self.pairing, replace(self.problem, graph=True), self.machine).ok
        self.weights = quantize(weights, self.problem)
        if self.prepared:
            kernel = make_kernel(*self.pairing, self.problem, machine=self.machine)
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
        self._plan = None  # free the buffers of the old plan before allocating new ones
        problem = self.problem.with_tokens(tokens)
        kernel = make_kernel(*self.pairing, problem, machine=self.machine, auto_prepare=False)
        self._plan = kernel.plan()
        return self._plan


class DefaultLayer(Layer):
    """FusedMoE with default arguments.

    prepared: as in PairingLayer.
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
            device="meta",  # set_weights replaces the parameters
        )
        self.layer.set_weights(quantize(weights, problem))
        if self.prepared:
            self.layer.prepare_weights()

    def call(self, x_TH: torch.Tensor, routing: Routing) -> torch.Tensor:
        y_TH: torch.Tensor = self.layer(x_TH, routing)
        return y_TH


class ComposedLayer(Layer):
    """The layer that `compose` builds, which selects a pairing for each of the numbers of `tokens`.

    budget: seconds that `compose` may take to time pairings.
    prepared: as in PairingLayer.
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
        self.options = MeasurementOptions(tokens=tokens, budget=budget)

    def setup(self, problem: Problem, weights: ExpertWeights) -> None:
        problem = replace(problem, quant=self.quant)
        kernel = compose(problem, self.machine, options=self.options)
        self.weights = quantize(weights, problem)
        if self.prepared:
            self.weights = kernel.prepare_weights(self.weights)
        self.kernel, self.plan = kernel, kernel.plan()

    def note(self, problem: Problem) -> str:
        """Return the name of the pairing that was selected for this number of tokens."""
        return self.kernel.kernel(problem.tokens).pairing

    def call(self, x_TH: torch.Tensor, routing: Routing) -> torch.Tensor:
        return self.plan(x_TH, self.weights, routing)


class TorchGroupedMm(Layer):
    """A plain SwiGLU layer in bfloat16 that uses torch._grouped_mm.

    A call sorts the P = T * K (token, expert) pairs by expert, gathers rows of x, and runs the
    first GEMM with N = 2I columns (gate and up), SiLU and multiplication, the second GEMM, a
    scatter, and the weighted sum.
    """

    name = "torch_grouped_mm"

    def refusal(self, problem: Problem) -> str | None:
        # Options that this layer supports are reset to their defaults. Any other option is refused.
        other_options = replace(
            problem, tokens=1, hidden=1, intermediate=1, experts=1, top_k=1, graph=False,
            deterministic=False, ids_dtype=None,
        )  # fmt: skip
        if other_options != Problem(1, 1, 1, 1, 1, problem.dtype):
            return "plain SwiGLU layers only"
        if problem.dtype is not torch.bfloat16:
            return "bfloat16 only"
        row_bytes = [
            size * problem.dtype.itemsize for size in (problem.hidden, problem.intermediate)
        ]
        if any(nbytes % _GROUPED_MM_ALIGNMENT for nbytes in row_bytes):
            return f"rows of multiples of {_GROUPED_MM_ALIGNMENT} bytes only"
        if not hasattr(torch, "_grouped_mm"):
            return f"torch {torch.__version__} has no _grouped_mm"
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


def pairing_candidates(
    prepare_finalize: str | None,
    experts: str | None,
    problems: Sequence[Problem],
    machine: Machine,
    *,
    prepared: bool = False,
) -> list[Candidate]:
    """Return a candidate for each pairing and scheme that is valid for any of the problems.

    A candidate has the name of its experts part if no other pairing uses that part.

    prepare_finalize, experts: names of parts. None stands for all parts.
    prepared: whether each candidate whose experts part prepares weights is followed by a second
        candidate with prepared weights.

    Raises IncompatibleError with every reason if a name is given and no pairing with it is valid
    for any problem. The verdicts of several pairings are those for the first problem.
    """
    valid: list[tuple[str, str, str]] = []  # (prepare_finalize, experts, quant)
    preparable: set[tuple[str, str]] = set()  # (experts, quant)
    refused: list[Verdict] = []
    for pf_name, experts_name in _iterate_pairings(prepare_finalize, experts):
        for problem in problems:
            verdict = check(pf_name, experts_name, problem, machine)
            if not verdict.ok:
                refused.append(verdict)
                continue
            if (pf_name, experts_name, problem.quant) not in valid:
                valid.append((pf_name, experts_name, problem.quant))
            if (
                prepared
                and (experts_name, problem.quant) not in preparable
                and prepared_specs_of(experts_name, problem)
            ):
                preparable.add((experts_name, problem.quant))
    if (prepare_finalize or experts) is not None and not valid and refused:
        raise _make_refusal(" x ".join(filter(None, (prepare_finalize, experts))), refused)
    pairings_by_experts = Counter(
        experts_name
        for _, experts_name in {(pf_name, experts_name) for pf_name, experts_name, _ in valid}
    )
    candidates = []
    for pf_name, experts_name, quant in valid:
        name = (
            experts_name if pairings_by_experts[experts_name] == 1 else f"{pf_name}+{experts_name}"
        )
        library = get_gemm_library(experts_name)
        make = partial(PairingLayer, pf_name, experts_name, quant, machine)
        candidates.append(Candidate(name, quant, OURS, make, library=library))
        if (experts_name, quant) in preparable:
            make = partial(make, prepared=True)
            candidates.append(Candidate(make_prepared_name(name), quant, OURS, make, True, library))
    return candidates


def _make_refusal(names: str, verdicts: Sequence[Verdict]) -> IncompatibleError:
    """Return the error for a pairing, or for all pairings with a part, that is never valid."""
    first_verdicts = list({verdict.pairing: verdict for verdict in reversed(verdicts)}.values())
    first_verdicts.reverse()
    if len(first_verdicts) == 1:
        return IncompatibleError(first_verdicts[0].pairing, first_verdicts[0].rejections)
    rejections = [rejection for verdict in first_verdicts for rejection in verdict.rejections]
    return IncompatibleError(f"every pairing with {names}", rejections, verdicts=first_verdicts)


def _iterate_pairings(
    prepare_finalize: str | None, experts: str | None
) -> Iterator[tuple[str, str]]:
    """Yield (prepare/finalize name, experts name) of each pairing. None stands for all parts."""
    catalog = load_catalog()
    pf_names, experts_names = catalog.names("prepare_finalize"), catalog.names("experts")
    if prepare_finalize is not None:
        pf_names = (catalog.prepare_finalize(prepare_finalize).__name__,)
    if experts is not None:
        experts_names = (catalog.experts(experts).__name__,)
    yield from itertools.product(pf_names, experts_names)


# Parts that use the GEMMs of torch. A part that runs another library declares this in its
# requirements.
_TORCH_GEMM_PARTS = frozenset({"GroupedGemmExperts", "NaiveBatchedExperts", "TorchExperts"})


def get_gemm_library(experts: str) -> str:
    """Return the library whose GEMMs an experts part runs, or "" for this project's kernels."""
    if experts in _TORCH_GEMM_PARTS:
        return "torch"
    return ", ".join(probe.name for probe in load_catalog().experts(experts).requires.providers)


def make_prepared_name(name: str) -> str:
    """Return the name of the candidate with prepared weights that belongs to candidate `name`."""
    return f"{name} prepared"


def baseline_candidates() -> list[Candidate]:
    """Return the baseline, torch._grouped_mm."""
    return [Candidate(TorchGroupedMm.name, TorchGroupedMm.quant, BASELINE, TorchGroupedMm)]


def peer_candidates(path: Path) -> list[Candidate]:
    """Load a --peer file, and return a candidate for each of its layers.

    Raises ConfigurationError or BrokenPartError, with the name of the file, if that fails.
    """
    make_layers, layers = load_peer_file(path, "layers", Layer)
    return [
        Candidate(
            layer.name,
            str(QuantScheme.parse(layer.quant)),
            PEER,
            partial(_make_nth_layer, make_layers, index),
        )
        for index, layer in enumerate(layers)
    ]


def _make_nth_layer(make_layers: Callable[[], list[Layer]], index: int) -> Layer:
    return make_layers()[index]
