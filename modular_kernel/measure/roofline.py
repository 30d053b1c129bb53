"""Roofline of a layer: max(flops / peak rate, bytes / bandwidth).

flops are those of the routed pairs. bytes are those of x, y, and the weights of touched experts and
of adapters (`measure.adapter_roofline`), each counted once. The rates are measured in the same run.
The peak rate is that of the fastest of repeated 8192^3 GEMMs. The bandwidth is the higher one of a
copy and a read of 2 GiB, unless it is given.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from modular_kernel.measure.adapter_roofline import total_adapter_work
from modular_kernel.measure.routing_patterns import Load
from modular_kernel.measure.timing import time_calls
from modular_kernel.spec.problem import Problem, dtype_name
from modular_kernel.spec.quantization import QuantScheme

_GPU_SIZE, _CPU_SIZE = 8192, 512
_GPU_BYTES, _CPU_BYTES = 1 << 31, 1 << 26
_FP8, _INT8 = "float8_e4m3fn", "int8"
_WEIGHT_BITS = {
    _FP8: 8,
    _INT8: 8,
    "uint8": 8,
    "uint4": 4,
    "float4_e2m1": 4,
    "table4": 4,
    "table8": 8,
}
# Bits of a group's scale: 8 for 16 or 32 float4 values, 16 for a group of integers or of codes.
_SCALE_BITS = {"uint8": 16, "uint4": 16, "float4_e2m1": 8, "table4": 16, "table8": 16}
_TARGET_MS = 60.0
_LINK_TARGET_MS = 20.0


@dataclass(frozen=True)
class Work:
    """The work of one call, averaged over inputs. touched: number of experts with a pair."""

    flops: float
    bytes: float
    touched: float


@dataclass(frozen=True)
class Peaks:
    """Measured rates.

    flops: per second, by the operands' type, see `compute_type`. copy, read: bytes per second; a
    copy counts both directions. bandwidth: the one that rooflines use. source: of the bandwidth,
    "measured" or "given".
    """

    flops: dict[str, float]
    copy: float
    read: float
    bandwidth: float
    source: str


@dataclass(frozen=True)
class Roofline:
    """The roofline in microseconds, and what limits it: "compute" or "memory"."""

    us: float
    bound: str


def expert_bytes(problem: Problem, scheme: QuantScheme) -> float:
    """Return the bytes of one expert's matrices, group scales and biases.

    Per-tensor, per-channel and per-block scales are not counted; they are less than 1 %.
    """
    return sum(matrix_bytes(problem, scheme))


def matrix_bytes(problem: Problem, scheme: QuantScheme) -> tuple[float, float]:
    """Return the bytes of one expert's w1 and w2, each with its group scales and bias."""
    if scheme.quantized:
        bits = float(_WEIGHT_BITS[scheme.weight])
        if scheme.granularity == "group":
            bits += _SCALE_BITS[scheme.weight] / scheme.group[0]
    else:
        bits = 8.0 * problem.dtype.itemsize
    w1 = problem.w1_rows * problem.hidden * bits / 8
    w2 = problem.hidden * problem.intermediate * bits / 8
    if problem.bias:
        w1 += problem.w1_rows * problem.dtype.itemsize
        w2 += problem.hidden * problem.dtype.itemsize
    return w1, w2


def compute_work(problem: Problem, scheme: QuantScheme, loads: Sequence[Load]) -> Work:
    """Return the work of one call with `problem.tokens` tokens, averaged over `loads`.

    If the problem has adapters, every token is assumed to use one.
    """
    touched = sum(load.touched for load in loads) / len(loads)
    pairs = sum(load.pairs for load in loads) / len(loads)
    elements = (problem.w1_rows + problem.intermediate) * problem.hidden
    outputs = 1
    for size in problem.output_shape:
        outputs *= size
    values = problem.tokens * problem.hidden + outputs
    bytes_moved = touched * expert_bytes(problem, scheme) + values * problem.dtype.itemsize
    adapters = total_adapter_work(problem, pairs, touched)
    return Work(2 * pairs * elements + adapters.flops, bytes_moved + adapters.bytes, touched)


def compute_type(problem: Problem, scheme: QuantScheme) -> str:
    """Return the type whose peak rate limits the GEMMs, a key of Peaks.flops.

    It is "tf32" for float32 with that precision. Weight-only schemes compute in the problem's
    dtype. 4-bit activations count at the fp8 rate, the highest one that is measured.
    """
    if scheme.activation == "none":
        name = dtype_name(problem.dtype)
        return "tf32" if name == "float32" and problem.fp32_precision == "tf32" else name
    return _INT8 if scheme.activation == _INT8 else _FP8


def compute_roofline(work: Work, problem: Problem, scheme: QuantScheme, peaks: Peaks) -> Roofline:
    """Return the roofline of one call.

    If the rate of the operands' type could not be measured, that of the problem's dtype is used.
    """
    compute = work.flops / peak_rate(problem, scheme, peaks) * 1e6
    memory = work.bytes / peaks.bandwidth * 1e6
    return Roofline(max(compute, memory), "compute" if compute > memory else "memory")


def peak_rate(problem: Problem, scheme: QuantScheme, peaks: Peaks) -> float:
    """Return the peak flops per second of a layer's GEMMs."""
    return peaks.flops.get(compute_type(problem, scheme)) or peaks.flops[dtype_name(problem.dtype)]


def measure_peaks(
    device: torch.device,
    types: Iterable[str],
    *,
    bandwidth: float | None = None,
    size: int | None = None,
    nbytes: int | None = None,
) -> Peaks:
    """Measure the peaks of this device.

    types: as returned by `compute_type`; those that the device does not support are omitted.
    bandwidth: bytes per second for rooflines; None uses the measured one. size: rows and columns of
    the matrices to multiply. nbytes: of the tensor to copy. By default, both are large enough to
    reach the peaks of a GPU, and small on a CPU.
    """
    on_gpu = device.type == "cuda"
    size = size or (_GPU_SIZE if on_gpu else _CPU_SIZE)
    nbytes = nbytes or (_GPU_BYTES if on_gpu else _CPU_BYTES)
    rates = {}
    for name in dict.fromkeys(types):
        rate = _gemm_rate(name, device, size)
        if rate is not None:
            rates[name] = rate
    copy, read = _memory_rates(device, nbytes)
    bandwidth_used = bandwidth or max(copy, read)
    return Peaks(rates, copy, read, bandwidth_used, "given" if bandwidth else "measured")


Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _gemm_rate(name: str, device: torch.device, size: int) -> float | None:
    """Return the flops per second of the fastest (size, size) product; None if unsupported."""
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        product = _make_gemm(name, device)
        calls = [
            partial(product, _make_operand(name, device, size), _make_operand(name, device, size))
            for _ in range(2)
        ]
        timing = time_calls(calls, device, target_ms=_TARGET_MS)
    except (RuntimeError, NotImplementedError):
        return None
    finally:
        torch.set_float32_matmul_precision(precision)
    return 2 * size**3 / timing.us_min * 1e6


def _make_operand(name: str, device: torch.device, size: int) -> torch.Tensor:
    values = torch.randn(size, size, device=device)
    if name == _INT8:
        return (values * 32).round().clamp(-127, 127).to(torch.int8)
    dtype: torch.dtype = getattr(torch, "float32" if name == "tf32" else name)
    return values.to(dtype)


def _make_gemm(name: str, device: torch.device) -> Product:
    """Return a function that computes a (M, K), b (N, K) -> a b^T (M, N)."""
    if name == _FP8:
        unit_scale = torch.ones((), device=device)

        def scaled(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            product: torch.Tensor = torch._scaled_mm(
                a, b.t(), unit_scale, unit_scale, out_dtype=torch.bfloat16, use_fast_accum=True
            )
            return product

        return scaled
    if name == _INT8:
        return lambda a, b: torch._int_mm(a, b.t())
    return lambda a, b: a @ b.t()


def measure_link_bandwidth(
    device: torch.device, peer: torch.device, nbytes: int = 1 << 28
) -> float | None:
    """Return the bytes per second of a copy between two GPUs; None if that is not possible."""
    try:
        source = torch.ones(nbytes, dtype=torch.uint8, device=device)
        target = torch.empty(nbytes, dtype=torch.uint8, device=peer)

        def copy() -> torch.Tensor:
            target.copy_(source, non_blocking=True)
            return source

        timing = time_calls([copy], device, graph=False, target_ms=_LINK_TARGET_MS)
    except RuntimeError:
        return None
    return nbytes / timing.us * 1e6


def _memory_rates(device: torch.device, nbytes: int) -> tuple[float, float]:
    """Return the bytes per second of a copy (both directions) and of a read."""
    source = torch.rand(nbytes // 4, device=device)
    target = torch.empty_like(source)
    copy = time_calls([lambda: target.copy_(source)], device, graph=False, target_ms=30.0)
    read = time_calls([source.sum], device, graph=False, target_ms=30.0)
    return 2 * nbytes / copy.us * 1e6, nbytes / read.us * 1e6
