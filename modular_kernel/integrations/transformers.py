"""Run the experts of a transformers model on a pairing of this toolkit.

    from modular_kernel.integrations.transformers import register

    register()                                                    # or another pairing and name
    model = AutoModelForCausalLM.from_pretrained(..., experts_implementation="modular_kernel")
    model.set_experts_implementation("modular_kernel")            # or later, and "eager" to go back

It serves every experts module that transformers itself can dispatch: gate_up_proj or up_proj and
down_proj in one dtype, unquantised. What such a module computes between its two projections is
found by probing it, not by its name; a module that computes anything else is refused with an
UnsupportedError. Weights are read where they lie at each call, never copied. Forward only: call
the model under torch.no_grad() or inference_mode().
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import product
from math import isfinite
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch

from modular_kernel.catalog import load_catalog, make_kernel, this_machine
from modular_kernel.contracts import PermuteExpertsUnpermute, PrepareAndFinalize
from modular_kernel.errors import ConfigurationError, UnsupportedError
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.reference import activation
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.types import GATED, UNGATED, ActivationSpec, Problem

# Earlier releases have the interface, but refuse names that they do not know themselves.
_OLDEST = (5, 8)
_NEED = 'transformers >= {}.{}: pip install "modular-kernel[transformers]"'.format(*_OLDEST)

try:
    import transformers
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface
except ImportError as error:
    raise ImportError(f"modular_kernel.integrations.transformers needs {_NEED}") from error
if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < _OLDEST:
    raise ImportError(f"transformers {transformers.__version__} is too old, need {_NEED}")

# A kernel serves up to its problem's tokens, a power of two and at least this.
_SMALLEST_CAPACITY = 16
_PROBE_PAIRS = 4096

Facts = tuple[object, ...]


def register(
    prepare_finalize: str | type[PrepareAndFinalize] = "MoEPrepareAndFinalizeNoEP",
    experts: str | type[PermuteExpertsUnpermute] | None = None,
    *,
    name: str = "modular_kernel",
) -> str:
    """Make a pairing known to transformers as the experts implementation `name`; returns `name`.

    experts: None means TritonExperts on a GPU and TorchExperts on a CPU. Several pairings can be
    registered under different names; registering a name again replaces its pairing.
    """
    catalog = load_catalog()
    catalog.prepare_finalize(prepare_finalize)
    if experts is not None:
        catalog.experts(experts)
    taken = ALL_EXPERTS_FUNCTIONS.get(name)
    if name == "eager" or not (taken is None or isinstance(taken, Registration)):
        need = "a name that transformers does not use itself"
        raise ConfigurationError("experts implementation", got=name, need=need)
    ExpertsInterface.register(name, Registration(prepare_finalize, experts))
    return name


def registration(name: str = "modular_kernel") -> "Registration":
    """Return what runs under `name`: its pairing, and the kernels it has built so far."""
    found = ALL_EXPERTS_FUNCTIONS.get(name)
    if isinstance(found, Registration):
        return found
    raise ConfigurationError("experts implementation", got=name, need="a name given to register")


@dataclass(frozen=True)
class Layer:
    """What is remembered of an experts module: its activation, and the facts it was found from."""

    facts: Facts
    activation: ActivationSpec


class Registration:
    """One pairing, and everything kept for the modules that run on it.

    Layers of one shape share kernels, one for each power of two of tokens: a kernel holds no
    buffers, each call brings its own, so layers and threads never meet in one.
    """

    def __init__(
        self,
        prepare_finalize: str | type[PrepareAndFinalize],
        experts: str | type[PermuteExpertsUnpermute] | None,
    ) -> None:
        self.prepare_finalize = prepare_finalize
        self.experts = experts
        self.kernels: dict[tuple[Problem, torch.device], FusedMoEModularKernel] = {}
        self.layers: WeakKeyDictionary[torch.nn.Module, Layer] = WeakKeyDictionary()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(
        self,
        module: torch.nn.Module,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        """Run the experts' forward, as transformers calls it.

        hidden_states: (T, H). top_k_index: (T, K), ids past the last expert are skipped.
        top_k_weights: (T, K), any float dtype. Returns a new (T, H) tensor like hidden_states.
        """
        weights = weights_of(module)
        problem = Problem(
            tokens=_capacity(hidden_states.shape[0]),
            hidden=weights.w2.shape[1],
            intermediate=weights.w2.shape[2],
            experts=weights.w1.shape[0],
            top_k=top_k_index.shape[-1],
            dtype=hidden_states.dtype,
            activation=self._activation(module, weights),
            bias=weights.b1 is not None,
        )
        with _current(hidden_states.device):
            kernel = self._kernel(problem, hidden_states.device)
            ids = _ids(module, top_k_index, kernel)
            routing = Routing(top_k_weights.to(torch.float32).contiguous(), ids)
            return kernel(hidden_states.contiguous(), weights, routing)

    def _activation(self, module: torch.nn.Module, weights: ExpertWeights) -> ActivationSpec:
        facts = _facts(module)
        layer = self.layers.get(module)
        if layer is None or layer.facts != facts:
            layer = Layer(facts, activation_of(module, weights))
            self.layers[module] = layer
        return layer.activation

    def _kernel(self, problem: Problem, device: torch.device) -> FusedMoEModularKernel:
        key = (problem, device)
        if key not in self.kernels:
            kind: Literal["cuda", "cpu"] = "cuda" if device.type == "cuda" else "cpu"
            experts = self.experts or ("TritonExperts" if kind == "cuda" else "TorchExperts")
            self.kernels[key] = make_kernel(
                self.prepare_finalize, experts, problem, machine=this_machine(device=kind)
            )
        return self.kernels[key]


def weights_of(module: torch.nn.Module) -> ExpertWeights:
    """Return the module's parameters as they lie.

    w1 is (e, N, H) and w2 is (e, H, I); they are views if transposed.
    """
    if getattr(module, "has_post_expert_norm", False):
        raise _unsupported(module, "a norm after each expert", "experts without one")
    gated = getattr(module, "has_gate", True)
    first = "gate_up_proj" if gated else "up_proj"
    w1, w2 = _tensor(module, first), _tensor(module, "down_proj")
    if getattr(module, "is_transposed", False):
        w1, w2 = w1.transpose(1, 2), w2.transpose(1, 2)
    if w1.dim() != 3 or w2.dim() != 3 or w1.shape[1] != w2.shape[2] * (1 + gated):
        got = f"{first} {tuple(w1.shape)} and down_proj {tuple(w2.shape)}"
        raise _unsupported(module, got, f"(e, {'2I' if gated else 'I'}, H) and (e, H, I)")
    if getattr(module, "num_experts", w1.shape[0]) != w1.shape[0]:
        got = f"num_experts {module.num_experts} and weights of {w1.shape[0]} experts"
        raise _unsupported(module, got, "as many of one as of the other")
    if not getattr(module, "has_bias", False):
        return ExpertWeights(w1, w2)
    return ExpertWeights(
        w1, w2, b1=_tensor(module, f"{first}_bias"), b2=_tensor(module, "down_proj_bias")
    )


def _tensor(module: torch.nn.Module, name: str) -> torch.Tensor:
    tensor: object = getattr(module, name, None)
    # A subclass of Tensor may be sharded or quantised: its values are not what its shape says.
    if isinstance(tensor, torch.Tensor) and type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return tensor
    got = f"{name} of type {type(tensor).__name__}"
    raise _unsupported(module, got, "a plain tensor, neither sharded nor quantised")


def activation_of(module: torch.nn.Module, weights: ExpertWeights) -> ActivationSpec:
    """Find what the module computes between its projections, by comparing it with every rule.

    The module's own `_apply_gate`, or `act_fn` if it has no gate, is called once with float32
    values from 0 to +-10000, close around its limits too. Synchronises with the device.
    """
    gated = getattr(module, "has_gate", True)
    function: Callable[[torch.Tensor], torch.Tensor] = getattr(module, _label(module))
    numbers = _numbers(module)
    probe = _probe(weights.w1.shape[1], numbers["limit"])
    try:
        with torch.no_grad():
            found = function(probe.to(weights.w1.device, torch.float32))
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        got = f"{_label(module)} that raised {type(e).__name__}: {e}"
        raise _unsupported(module, got, "a function of (rows, columns) values") from e
    found = found.detach().to("cpu", torch.float64)
    for spec in _candidates(gated, numbers):
        if _same(found, probe, spec):
            return spec
    need = f"one of {', '.join(GATED if gated else UNGATED)}"
    raise _unsupported(module, f"{_label(module)} that computes something else", need)


def _facts(module: torch.nn.Module) -> Facts:
    """Whatever, once changed, may change the activation."""
    gate = getattr(module, "_apply_gate", None)
    act = getattr(module, "act_fn", None)
    numbers = tuple(tuple(values) for values in _numbers(module).values())
    return getattr(gate, "__func__", gate), act, numbers


def _numbers(module: torch.nn.Module) -> dict[str, list[float]]:
    """Return the module's attributes that can be an activation's alpha or limit."""
    found: dict[str, list[float]] = {"alpha": [], "limit": []}
    for name, value in vars(module).items():
        if isinstance(value, (int, float)) and isfinite(value) and value > 0:
            for kind, values in found.items():
                if kind in name:
                    values.append(float(value))
    return found


def _candidates(gated: bool, numbers: dict[str, list[float]]) -> Iterator[ActivationSpec]:
    if not gated:
        yield from (ActivationSpec(kind) for kind in UNGATED)
        return
    for interleaved in (False, True):
        for kind in GATED:
            alphas = numbers["alpha"] if kind == "swiglu_oai" else [None]
            limits = numbers["limit"] if kind.startswith("swiglu") else [None]
            for alpha, limit in product(alphas, limits):
                yield ActivationSpec(kind, alpha, limit, interleaved)


def _probe(columns: int, limits: list[float]) -> torch.Tensor:
    """(rows, columns) float64 of float32 values: small and large ones, and some around limits."""
    large = torch.logspace(-3, 4, 64, dtype=torch.float64)
    near = [limit * factor for limit in limits for factor in (0.5, 0.99, 1.0, 1.01, 2.0)]
    positive = torch.cat([large, torch.linspace(0, 10, 128), torch.tensor(near)])
    values = torch.cat([positive, -positive]).float().double()
    rows = -(-2 * _PROBE_PAIRS // columns)
    generator = torch.Generator().manual_seed(0)  # leaves the caller's random numbers alone
    return values[torch.randint(len(values), (rows, columns), generator=generator)]


def _same(found: torch.Tensor, probe: torch.Tensor, spec: ActivationSpec) -> bool:
    """Whether `found` is `spec` of the probe, up to what float32 loses in 1 + tanh(-x)."""
    want = activation(probe, spec)
    if found.shape != want.shape:
        return False
    half = probe.abs() + 1
    if spec.gated:
        split = (half[:, 0::2], half[:, 1::2]) if spec.interleaved else half.chunk(2, dim=1)
        half = split[0] * split[1]
    return bool(((found - want).abs() <= 1e-5 * want.abs() + 1e-6 * half).all())


def _ids(
    module: torch.nn.Module, ids_TK: torch.Tensor, kernel: FusedMoEModularKernel
) -> torch.Tensor:
    """(T, K) contiguous, -1 where an expert-parallel router says "not on this rank"."""
    # Releases without the attribute may pass such ids too.
    if getattr(module, "_is_expert_parallel", True):
        ids_TK = ids_TK.masked_fill(ids_TK >= kernel.problem.experts, -1)
    dtype = kernel.prepare_finalize.topk_indices_dtype()
    return ids_TK.to(dtype or ids_TK.dtype).contiguous()


def _capacity(tokens: int) -> int:
    return max(_SMALLEST_CAPACITY, 1 << max(tokens - 1, 0).bit_length())


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels are launched on the current GPU, which a model spread over several may not set."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _label(module: torch.nn.Module) -> str:
    return "_apply_gate" if getattr(module, "has_gate", True) else "act_fn"


def _unsupported(module: torch.nn.Module, got: str, need: str) -> UnsupportedError:
    return UnsupportedError(f"experts module {type(module).__name__}", got=got, need=need)
