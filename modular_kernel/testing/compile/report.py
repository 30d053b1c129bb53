"""Compile kernels on a machine without a GPU, and report their resources.

    with record_compiles("sm_90") as records:
        grouped_gemm(x_RH, weights, ...)        # ordinary host code, on CPU or meta tensors
    for record in records:
        assert check(record, expect="HGMMA") == ()

Inside the context, every launch is compiled for the target architecture and recorded. `check`
reports register spills, too much shared memory, or a missing tensor-core instruction. Kernels do
not run, so no output is written. Not thread-safe.

When a kernel is defined, Triton decides whether it will be interpreted. Therefore, a process either
interprets all kernels (TRITON_INTERPRET=1) or compiles all of them.
"""

import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction, MockTensor

from modular_kernel.errors import ConfigurationError
from modular_kernel.utils.tensor_checks import compile_only

# The type of Triton's kernels, jit functions and launch arguments, which have no annotations.
TritonObject = Any

# The SASS mnemonics that are counted. The first row has the tensor-core instructions of each
# generation and number format, and float32 FMA. The second row has loads from global memory, TMA
# loads and stores, asynchronous copies, stores to shared memory, loads and stores of spilled
# registers, register moves, and byte permutations.
FAMILIES = (
    *("HGMMA", "QGMMA", "IGMMA", "HMMA", "QMMA", "IMMA", "UTCHMMA", "UTCQMMA", "UTCOMMA", "FFMA"),
    *("LDG", "UTMALDG", "UTMASTG", "LDGSTS", "STS", "LDL", "STL", "MOV", "PRMT"),
)

# Maximum shared memory of a thread block on sm_90 and sm_100: 227 KiB.
MAX_SHARED_BYTES = 232_448

# IMAD.MOV is a register move and counted as MOV.
_INSTRUCTION = re.compile(
    r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[0-9T]+\s+)?(?:IMAD\.(?=MOV\b))?([A-Z][A-Z0-9]*)", re.M
)
_RESOURCES = re.compile(r"\bREG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")


@dataclass(frozen=True)
class CompileRecord:
    """One compiled launch: its configuration, and its resources on the target."""

    kernel: str
    target: str
    config: Mapping[str, object]  # the launch's constexpr arguments by name
    dtypes: Mapping[str, str]  # element types of pointers and descriptors by name
    num_warps: int
    num_stages: int
    shared: int  # bytes per thread block
    registers: int  # per thread
    stack: int  # bytes per thread; holds spilled registers
    spill: int  # bytes per thread of other local memory
    instructions: Mapping[str, int]  # occurrences of each of FAMILIES
    seconds: float  # compile time; near 0 if the kernel is in Triton's cache

    def __str__(self) -> str:
        config = ", ".join(f"{name}={value}" for name, value in self.config.items())
        return f"{self.kernel}[{config}, warps={self.num_warps}, stages={self.num_stages}]"


class Instructions(Mapping[str, int]):
    """Number of occurrences of each of FAMILIES in the code of a kernel.

    The instructions are counted on first access, because disassembling a kernel takes as long as
    compiling it. `is_counted` is False until then. The repr contains a hash of the code.
    """

    def __init__(self, cubin: bytes) -> None:
        self._cubin = cubin

    @cached_property
    def _counts(self) -> Mapping[str, int]:
        return _count_instructions(self._cubin)

    @property
    def is_counted(self) -> bool:
        return "_counts" in vars(self)

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(FAMILIES)

    def __len__(self) -> int:
        return len(FAMILIES)

    def __repr__(self) -> str:
        return f"Instructions({sha256(self._cubin).hexdigest()[:16]})"


def check(
    record: CompileRecord, expect: str | None = None, max_shared: int = MAX_SHARED_BYTES
) -> tuple[str, ...]:
    """Return messages about spilled registers, too much shared memory or a missing instruction.

    Raises ConfigurationError if `expect` is not in FAMILIES.

    expect: an element of FAMILIES that the code must contain, such as a tensor-core instruction.
    max_shared: maximum number of bytes of shared memory.
    """
    if expect is not None and expect not in FAMILIES:
        raise ConfigurationError("expected instruction", got=expect, need=f"one of {FAMILIES}")
    counts = {} if expect is None else record.instructions
    nonzero = {name: count for name, count in counts.items() if count}
    reasons = (
        (record.stack > 0, f"{record.stack} bytes of stack per thread: registers are spilled"),
        (record.spill > 0, f"{record.spill} bytes of local memory per thread"),
        (
            record.shared > max_shared,
            f"{record.shared} bytes of shared memory, the limit is {max_shared}",
        ),
        (
            expect is not None and expect not in nonzero,
            f"no {expect} instruction; the code has {nonzero or 'no instruction of any family'}",
        ),
    )
    return tuple(f"{record}: {reason}" for violated, reason in reasons if violated)


@contextmanager
def record_compiles(
    target: str = "sm_90", kernel_filter: Callable[[str], bool] | None = None
) -> Iterator[list[CompileRecord]]:
    """Return a context in which kernels are compiled for `target` instead of being launched.

    The context yields a list, to which each launch appends a record. A launch that does not compile
    raises Triton's error and is not recorded. Triton's active driver and launch function are
    restored on exit, even after an error. Raises ConfigurationError in a process that interprets
    kernels, and for a malformed target.

    target: an architecture, such as "sm_90".
    kernel_filter: returns whether to compile a kernel, given its name; None means all kernels.
    """
    if triton.knobs.runtime.interpret:
        need = "a process without TRITON_INTERPRET"
        raise ConfigurationError("compile-only report", got="TRITON_INTERPRET=1", need=need)
    driver = NoDevice(target)
    records: list[CompileRecord] = []
    previous_driver, launch = triton.runtime.driver._active, JITFunction.run
    triton.runtime.driver.set_active(driver)
    recording_run = _make_recording_run(launch, driver, records)
    JITFunction.run = (
        recording_run if kernel_filter is None else _filter_launches(recording_run, kernel_filter)
    )
    try:
        with compile_only():
            yield records
    finally:
        JITFunction.run = launch
        triton.runtime.driver.set_active(previous_driver)


class NoDevice:
    """A Triton driver that can only compile, for a GPU that need not be present."""

    launcher_cls = None

    def __init__(self, target: str) -> None:
        arch = re.fullmatch(r"sm_(\d{2,3})", target)
        if arch is None:
            raise ConfigurationError("compile target", got=target, need="sm_NN, such as sm_90")
        self.name = target
        self._target = GPUTarget("cuda", int(arch[1]), 32)
        # Properties that host code queries to size a grid, with the values of an H200.
        properties = {"max_shared_mem": MAX_SHARED_BYTES, "multiprocessor_count": 132}
        self.utils = SimpleNamespace(get_device_properties=lambda _device: dict(properties))

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> str:
        # Triton caches compiled kernels by device. No real device has this name, so later launches
        # on a GPU do not use these kernels.
        return f"compile-only {self.name}"

    def get_current_stream(self, device: TritonObject = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> TritonObject:
        return torch.cpu

    def get_benchmarker(self) -> TritonObject:
        got = "@triton.autotune with several configs"
        need = "one launch for each config: there is no device to time them on"
        raise ConfigurationError("compile-only launch", got=got, need=need)


def _make_recording_run(
    launch: Callable[..., TritonObject], driver: NoDevice, records: list[CompileRecord]
) -> Callable[..., TritonObject]:
    """Make a replacement for `launch`, which is JITFunction.run, that compiles and records."""

    def run(
        self: TritonObject,
        *args: TritonObject,
        grid: TritonObject,
        warmup: bool,
        **kwargs: TritonObject,
    ) -> TritonObject:
        mock_args = tuple(_mock_argument(arg) for arg in args)
        mock_kwargs = {name: _mock_argument(arg) for name, arg in kwargs.items()}
        start = time.perf_counter()
        kernel = launch(self, *mock_args, grid=grid, warmup=True, **mock_kwargs)
        seconds = time.perf_counter() - start
        if kernel is not None:  # a Triton hook may veto a compilation
            kernel = kernel.result() if hasattr(kernel, "result") else kernel
            config = _get_constants(self, mock_args, mock_kwargs)
            records.append(_make_record(kernel, driver.name, config, seconds))
        return kernel

    return run


def _filter_launches(
    run_kernel: Callable[..., TritonObject], kernel_filter: Callable[[str], bool]
) -> Callable[..., TritonObject]:
    def run(self: TritonObject, *args: TritonObject, **kwargs: TritonObject) -> TritonObject:
        return run_kernel(self, *args, **kwargs) if kernel_filter(self.fn.__name__) else None

    return run


def _mock_argument(arg: TritonObject) -> TritonObject:
    """Replace tensors without memory by mock tensors with aligned pointers.

    Numbers are not changed, so that Triton specializes them (equal to 1, divisible by 16) as it
    does on a GPU.
    """
    if isinstance(arg, tuple):
        members = [_mock_argument(member) for member in arg]
        return type(arg)(*members) if hasattr(arg, "_fields") else tuple(members)
    if isinstance(arg, FakeTensor) or (isinstance(arg, torch.Tensor) and arg.is_meta):
        return MockTensor(arg.dtype, list(arg.shape))
    return arg


def _get_constants(
    kernel: TritonObject, args: tuple[TritonObject, ...], kwargs: dict[str, TritonObject]
) -> dict[str, object]:
    """Return the constexpr arguments of a launch of `kernel`, including defaults, by name."""
    names = {param.name for param in kernel.params}
    known_kwargs = {name: value for name, value in kwargs.items() if name in names}
    bound = kernel.signature.bind(*args, **known_kwargs)
    bound.apply_defaults()
    values = {param.name: bound.arguments[param.name] for param in kernel.params}
    return {p.name: _to_json_value(values[p.name]) for p in kernel.params if p.is_constexpr}


def _to_json_value(value: TritonObject) -> object:
    value = getattr(value, "value", value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return getattr(value, "__name__", str(value))


def _make_record(
    kernel: TritonObject, target: str, config: Mapping[str, object], seconds: float
) -> CompileRecord:
    metadata, cubin = kernel.metadata, kernel.asm["cubin"]
    registers, stack, spill = _read_resources(cubin)
    return CompileRecord(
        kernel=metadata.name,
        target=target,
        config=config,
        dtypes=_parse_element_types(kernel.src.signature),
        num_warps=metadata.num_warps,
        num_stages=metadata.num_stages,
        shared=metadata.shared,
        registers=registers,
        stack=stack,
        spill=spill,
        instructions=Instructions(cubin),
        seconds=seconds,
    )


def _parse_element_types(signature: Mapping[str, TritonObject]) -> dict[str, str]:
    """Return the element types of pointers and descriptors, by name.

    signature: such as {"x_ptr": "*bf16", "x_desc": "tensordesc<bf16[64, 64]>"}.
    """
    matches = {name: re.match(r"\*k?|tensordesc<", str(kind)) for name, kind in signature.items()}
    return {
        name: re.split(r"[\[>,]", str(signature[name])[match.end() :])[0]
        for name, match in matches.items()
        if match
    }


@cache
def _read_resources(cubin: bytes) -> tuple[int, int, int]:
    """Return registers, stack bytes and local bytes per thread, as cuobjdump reports them."""
    report = _run_tool(triton.knobs.nvidia.cuobjdump.path, "-res-usage", cubin=cubin)
    usage = [tuple(map(int, numbers)) for numbers in _RESOURCES.findall(report)]
    registers, stack, spill = (max(column) for column in zip(*usage, strict=True))
    return registers, stack, spill


@cache
def _count_instructions(cubin: bytes) -> Mapping[str, int]:
    # -ndf disables dataflow analysis, which makes this a third faster than `cuobjdump -sass`.
    disassembly = _run_tool(triton.knobs.nvidia.nvdisasm.path, "-ndf", "-c", cubin=cubin)
    counts = Counter(_INSTRUCTION.findall(disassembly))
    return {name: counts[name] for name in FAMILIES}


def _run_tool(*command: str, cubin: bytes) -> str:
    """Run a command-line tool on the cubin of a kernel; return its output."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        process = subprocess.run([*command, str(path)], check=True, capture_output=True, text=True)
    return process.stdout
