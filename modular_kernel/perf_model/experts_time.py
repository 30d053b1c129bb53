"""Time model of the experts on one GPU, with three fitted parameters per number format.

    t = a + ((m / em) ** p + (c / ec) ** p) ** (1 / p),  p = 2.5

    m   memory time, bytes / bandwidth. Weights of experts with a (token, expert) pair, x and y are
        counted once. Activations between the GEMMs and output rows of the experts are counted
        twice, because they are written and read
    c   compute time, 2 * rows * elements / peak. Rows are all pairs, and half a tile of padding for
        each expert with a pair. Elements are the elements of one expert's w1 and w2. A tile has the
        mean number of pairs per expert, rounded up to a power of two from 16 to 128
    a   time of launches and of their first bytes, independent of the work
    em, ec   efficiency: fractions of the bandwidth and of the peak that are reached

Kernels that unpack or reorder 4-bit weights in each call are not included, so prepared weights do
not change the time.

With p = 1, the formula is a sum (memory and compute do not overlap). With p = infinity, it is a
maximum (they overlap fully). Of the values 2, 2.5 and 3 of p, 2.5 has the best fit over all
formats. a, em and ec were fitted to 12 cases of each format (FITTED_SHAPES, 1 to 16384 tokens, one
H200, planned calls in CUDA graphs; data/h200-layers.json).
"""

import math
from dataclasses import dataclass

from modular_kernel.measure.adapter_roofline import total_adapter_work
from modular_kernel.measure.roofline import compute_type, expert_bytes
from modular_kernel.perf_model.hardware import Gpu
from modular_kernel.perf_model.load import EstimatedLoad
from modular_kernel.spec.problem import Problem
from modular_kernel.spec.quantization import QuantScheme

FITTED_SHAPES = ("dsv3_ep8", "qwen3_30b")  # the parameters were fitted to times of these shapes
_OVERLAP_EXPONENT = 2.5  # p in the formula above
_MIN_TILE, _MAX_TILE = 16, 128


@dataclass(frozen=True)
class Efficiency:
    """Fitted parameters of the formula.

    start: a, in seconds.
    memory: em.
    compute: ec.
    """

    start: float
    memory: float
    compute: float


# Parameters of TritonExperts by scheme. Other schemes use the entry with similar operands.
EFFICIENCIES = {
    "none": Efficiency(4.0e-6, 0.91, 0.82),
    "fp8_w8a8_channel": Efficiency(10.0e-6, 0.84, 0.73),
    "fp8_w8a8_block": Efficiency(7.5e-6, 0.82, 0.61),
}
MODELED_EXPERTS_PART = "TritonExperts"  # the model predicts its time


@dataclass(frozen=True)
class ExpertsTime:
    """Predicted time in seconds.

    seconds: total time.
    memory, compute: m / em and c / ec of the formula.
    source: description of the source of the parameters.
    """

    seconds: float
    memory: float
    compute: float
    source: str

    @property
    def bound(self) -> str:
        return "compute" if self.compute > self.memory else "memory"


def find_efficiency(scheme: QuantScheme) -> tuple[Efficiency, str]:
    """Return the parameters for a scheme, and a description of their source."""
    if scheme.name in EFFICIENCIES:
        return EFFICIENCIES[scheme.name], f"measured, of scheme {scheme.name}"
    nearest = "fp8_w8a8_channel" if scheme.activation != "none" else "none"
    return EFFICIENCIES[nearest], f"not measured, as of scheme {nearest}"


def experts_time(problem: Problem, load: EstimatedLoad, gpu: Gpu) -> ExpertsTime:
    """Return the time of the experts of the rank with this load. problem.tokens is per rank."""
    scheme = problem.scheme
    parameters, source = find_efficiency(scheme)
    elements = (problem.w1_rows + problem.intermediate) * problem.hidden
    pairs_per_expert = load.pairs / max(load.touched, 1e-9)
    power = math.ceil(math.log2(max(pairs_per_expert, 1.0)))
    tile = min(max(2**power, _MIN_TILE), _MAX_TILE)
    rows = load.pairs + load.touched * tile / 2
    rate = gpu.flops.get(compute_type(problem, scheme)) or min(gpu.flops.values())
    flops = 2 * rows * elements + total_adapter_work(problem, rows, load.touched).flops
    compute = flops / rate / parameters.compute
    memory = _compute_memory_bytes(problem, load) / gpu.bandwidth / parameters.memory
    p = _OVERLAP_EXPONENT
    seconds = parameters.start + (memory**p + compute**p) ** (1 / p)
    return ExpertsTime(seconds, memory, compute, source)


def _compute_memory_bytes(problem: Problem, load: EstimatedLoad) -> float:
    """Return the bytes read from and written to the GPU's memory."""
    size, scheme = problem.dtype.itemsize, problem.scheme
    activation_bytes = size if scheme.activation == "none" else 1
    weights = load.touched * expert_bytes(problem, scheme)
    weights += total_adapter_work(problem, load.pairs, load.touched).bytes
    bytes_per_pair = 2 * problem.intermediate * activation_bytes + 2 * problem.hidden * size
    return weights + load.pairs * bytes_per_pair + 2 * load.tokens * problem.hidden * size
