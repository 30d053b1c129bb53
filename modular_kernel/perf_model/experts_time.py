"""Microseconds of the experts on one GPU: from what must be computed and moved, and three measured
numbers for each number format.

    t = a + ((m / em) ** p + (c / ec) ** p) ** (1 / p),  p = 2.5

    m   bytes / bandwidth: weights of the touched experts once; the activations between the
        products and the experts' rows, each written and read; x and y
    c   2 * rows * elements / peak: rows are the pairs and, for each touched expert, half a tile
        computed in vain; tile = rows of an expert, rounded up to a power of two, 16 to 128
    a   microseconds of launches and of their first bytes, whatever is computed
    em, ec   the parts of the bandwidth and of the peak that are reached

No launch that unpacks or orders weights of 4 bits in each call is in it, so that prepared weights
change nothing here.

p lies between a sum (nothing overlaps) and a maximum (all does). a, em and ec were fitted to 12
cells of each format (FITTED shapes, 1 to 16384 tokens, one H200, planned kernels in CUDA graphs;
docs/benchmarks/h200-layers.json); p is the one of 2, 2.5 and 3 that fits all formats best.
"""

import math
from dataclasses import dataclass

from modular_kernel.measure.adapter_roofline import whole_work
from modular_kernel.measure.roofline import expert_bytes, operand_type
from modular_kernel.perf_model.hardware import Gpu
from modular_kernel.perf_model.load import EstimatedLoad
from modular_kernel.spec.problem import Problem
from modular_kernel.spec.quantization import QuantScheme

FITTED = ("dsv3_ep8", "qwen3_30b")
_P = 2.5
_LEAST_TILE, _MOST_TILE = 16, 128


@dataclass(frozen=True)
class Efficiency:
    """a: seconds. memory, compute: of the bandwidth and of the peak."""

    start: float
    memory: float
    compute: float


# Of TritonExperts. By the operands: a scheme without numbers of its own takes those beside it.
MEASURED = {
    "none": Efficiency(4.0e-6, 0.91, 0.82),
    "fp8_w8a8_channel": Efficiency(10.0e-6, 0.84, 0.73),
    "fp8_w8a8_block": Efficiency(7.5e-6, 0.82, 0.61),
}
PART = "TritonExperts"


@dataclass(frozen=True)
class ExpertsTime:
    """seconds: in all. memory, compute: what each alone would take. source: whose efficiency."""

    seconds: float
    memory: float
    compute: float
    source: str

    @property
    def bound(self) -> str:
        return "compute" if self.compute > self.memory else "memory"


def efficiency(scheme: QuantScheme) -> tuple[Efficiency, str]:
    """Return the efficiency of a scheme, and whether it was measured or is that of the nearest."""
    if scheme.name in MEASURED:
        return MEASURED[scheme.name], f"measured, of scheme {scheme.name}"
    nearest = "fp8_w8a8_channel" if scheme.activation != "none" else "none"
    return MEASURED[nearest], f"not measured, as of scheme {nearest}"


def experts_time(problem: Problem, load: EstimatedLoad, gpu: Gpu) -> ExpertsTime:
    """Return the time of the rank with that load. problem.tokens: of one rank."""
    scheme = problem.scheme
    used, source = efficiency(scheme)
    elements = (problem.w1_rows + problem.intermediate) * problem.hidden
    per_expert = load.pairs / max(load.touched, 1e-9)
    power = math.ceil(math.log2(max(per_expert, 1.0)))
    tile = min(max(2**power, _LEAST_TILE), _MOST_TILE)
    rows = load.pairs + load.touched * tile / 2
    rate = gpu.flops.get(operand_type(problem, scheme)) or min(gpu.flops.values())
    flops = 2 * rows * elements + whole_work(problem, rows, load.touched).flops
    compute = flops / rate / used.compute
    memory = _bytes(problem, load) / gpu.bandwidth / used.memory
    seconds = used.start + (memory**_P + compute**_P) ** (1 / _P)
    return ExpertsTime(seconds, memory, compute, source)


def _bytes(problem: Problem, load: EstimatedLoad) -> float:
    """Return the bytes moved to and from the GPU's memory."""
    size, scheme = problem.dtype.itemsize, problem.scheme
    between = size if scheme.activation == "none" else 1
    weights = load.touched * expert_bytes(problem, scheme)
    weights += whole_work(problem, load.pairs, load.touched).bytes
    each = 2 * problem.intermediate * between + 2 * problem.hidden * size
    return weights + load.pairs * each + 2 * load.tokens * problem.hidden * size
