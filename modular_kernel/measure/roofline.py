"""The roofline of a layer: the minimum time of a call, max(flops / peak rate, bytes / bandwidth).

flops counts the GEMMs of all routed (token, expert) pairs. bytes counts the input, the output, the
weights of experts with at least one pair (touched experts), and the LoRA adapters
(`measure.adapter_roofline`), each once.

`measure_peaks` measures the peak rate and the bandwidth. The peak rate is the rate of the fastest
of several GEMMs with M = N = K = 8192. The bandwidth is the higher of the rates of a copy and of a
read of 2 GiB, unless the user specifies the bandwidth.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch

from modular_kernel.measure.adapter_roofline import total_adapter_work
from modular_kernel.measure.routing_patterns import Load
from modular_kernel.measure.timing import time_calls
from modular_kernel.spec.problem import Problem, dtype_name
from modular_kernel.spec.quantization import QuantScheme

_GPU_SIZE, _CPU_SIZE = 8192, 512  # M = N = K of the GEMMs
_GPU_BYTES, _CPU_BYTES = 1 << 31, 1 << 26  # size of the tensor that is copied and read
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
# Bits of the scale of one group: 8 for a group of float4 values, 16 for integers and table codes.
_SCALE_BITS = {"uint8": 16, "uint4": 16, "float4_e2m1": 8, "table4": 16, "table8": 16}
_GEMM_TARGET_MS = 60.0
_LINK_TARGET_MS = 20.0


@dataclass(frozen=True)
class Work:
    """The minimum work of one call, averaged over several inputs.

    flops: flops of the GEMMs.
    bytes: bytes read from and written to device memory.
    touched: number of experts with at least one pair.
    """

    flops: float
    bytes: float
    touched: float


@dataclass(frozen=True)
class Peaks:
    """Peak rates of a device.

    flops: flops per second, by type of the operands (`compute_type`).
    copy, read: bytes per second of a copy, which counts reads and writes, and of a read.
    bandwidth: bytes per second that rooflines use.
    source: source of `bandwidth`: "measured", or "given" by the user.
    """

    flops: dict[str, float]
    copy: float
    read: float
    bandwidth: float
    source: str


@dataclass(frozen=True)
class Roofline:
    """The minimum time of a call or stage.

    us: microseconds.
    bound: the limit that determines the time: "compute", "memory" or "link".
    """

    us: float
    bound: str


def expert_bytes(problem: Problem, scheme: QuantScheme) -> float:
    """Return the bytes of the weights of one expert, including group scales and biases.

    Per-tensor, per-channel and per-block scales are not counted, because they add less than 1 %.
    """
    return sum(matrix_bytes(problem, scheme))


def matrix_bytes(problem: Problem, scheme: QuantScheme) -> tuple[float, float]:
    """Return the bytes of w1 and of w2 of one expert, each with its group scales and bias."""
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

    If the problem has LoRA adapters, every token is assumed to use one.
    """
    touched = sum(load.touched for load in loads) / len(loads)
    pairs = sum(load.pairs for load in loads) / len(loads)
    expert_values = (problem.w1_rows + problem.intermediate) * problem.hidden
    io_values = problem.tokens * problem.hidden + prod(problem.output_shape)
    bytes_moved = touched * expert_bytes(problem, scheme) + io_values * problem.dtype.itemsize
    adapters = total_adapter_work(problem, pairs, touched)
    return Work(2 * pairs * expert_values + adapters.flops, bytes_moved + adapters.bytes, touched)


def compute_type(problem: Problem, scheme: QuantScheme) -> str:
    """Return the type in which the GEMMs compute, which is a key of Peaks.flops.

    Weight-only schemes compute in the problem's dtype. float32 with tf32 precision is "tf32". The
    rate of 4-bit operands is not measured, so schemes with 4-bit activations count as fp8.
    """
    if scheme.activation == "none":
        name = dtype_name(problem.dtype)
        return "tf32" if name == "float32" and problem.fp32_precision == "tf32" else name
    return _INT8 if scheme.activation == _INT8 else _FP8


def compute_roofline(work: Work, problem: Problem, scheme: QuantScheme, peaks: Peaks) -> Roofline:
    """Return the roofline of one call."""
    compute = work.flops / get_peak_rate(problem, scheme, peaks) * 1e6
    memory = work.bytes / peaks.bandwidth * 1e6
    return Roofline(max(compute, memory), "compute" if compute > memory else "memory")


def get_peak_rate(problem: Problem, scheme: QuantScheme, peaks: Peaks) -> float:
    """Return the peak flops per second of the GEMMs of a layer.

    If the rate of their type could not be measured, this is the rate of the problem's dtype.
    """
    return peaks.flops.get(compute_type(problem, scheme)) or peaks.flops[dtype_name(problem.dtype)]


def measure_peaks(
    device: torch.device,
    types: Iterable[str],
    *,
    bandwidth: float | None = None,
    size: int | None = None,
    nbytes: int | None = None,
) -> Peaks:
    """Measure the peak rates of a device.

    types: types of GEMMs, see `compute_type`. Types that the device does not support are omitted.
    bandwidth: bytes per second for rooflines; None uses the measured rate.
    size: number of rows and columns of the matrices to multiply.
    nbytes: bytes of the tensor to copy.

    The defaults of `size` and `nbytes` are large enough to reach the peaks of a GPU, and small on a
    CPU.
    """
    on_gpu = device.type == "cuda"
    size = size or (_GPU_SIZE if on_gpu else _CPU_SIZE)
    nbytes = nbytes or (_GPU_BYTES if on_gpu else _CPU_BYTES)
    rates = {}
    for name in dict.fromkeys(types):
        rate = _measure_gemm_rate(name, device, size)
        if rate is not None:
            rates[name] = rate
    copy, read = _measure_memory_rates(device, nbytes)
    bandwidth_used = bandwidth or max(copy, read)
    return Peaks(rates, copy, read, bandwidth_used, "given" if bandwidth else "measured")


Gemm = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _measure_gemm_rate(name: str, device: torch.device, size: int) -> float | None:
    """Return the flops per second of the fastest GEMM; None if the device does not support it.

    name: type of the operands, see `compute_type`.
    """
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        gemm = _make_gemm(name, device)
        calls = [
            partial(gemm, _make_operand(name, device, size), _make_operand(name, device, size))
            for _ in range(2)
        ]
        timing = time_calls(calls, device, target_ms=_GEMM_TARGET_MS)
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


def _make_gemm(name: str, device: torch.device) -> Gemm:
    """Return a function that computes a b^T, (M, N), from a, (M, K), and b, (N, K)."""
    if name == _FP8:
        unit_scale = torch.ones((), device=device)

        def fp8_gemm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            product: torch.Tensor = torch._scaled_mm(
                a, b.t(), unit_scale, unit_scale, out_dtype=torch.bfloat16, use_fast_accum=True
            )
            return product

        return fp8_gemm
    if name == _INT8:
        return lambda a, b: torch._int_mm(a, b.t())
    return lambda a, b: a @ b.t()


def measure_link_bandwidth(
    device: torch.device, peer: torch.device, nbytes: int = 1 << 28
) -> float | None:
    """Return the bytes per second of a copy from one GPU to another; None if it fails."""
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


def _measure_memory_rates(device: torch.device, nbytes: int) -> tuple[float, float]:
    """Return the bytes per second of a copy, which counts reads and writes, and of a read."""
    source = torch.rand(nbytes // 4, device=device)
    target = torch.empty_like(source)
    copy = time_calls([lambda: target.copy_(source)], device, graph=False, target_ms=30.0)
    read = time_calls([source.sum], device, graph=False, target_ms=30.0)
    return 2 * nbytes / copy.us * 1e6, nbytes / read.us * 1e6
