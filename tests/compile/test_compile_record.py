"""`record_compiles` records kernels compiled without a GPU, and `check` lists their violations."""

import pickle

import pytest
import torch
import triton
import triton.language as tl
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from modular_kernel.errors import ConfigurationError
from modular_kernel.testing.compile.report import CompileRecord, check, record_compiles

if triton.knobs.runtime.interpret:
    pytest.skip("a process either interprets or compiles kernels", allow_module_level=True)


@triton.jit
def relu(x):
    return tl.maximum(x, 0.0)


@triton.jit
def load_tile(ptr, rows, cols, strides, num_rows, num_cols):
    offsets = rows[:, None].to(tl.int64) * strides[0] + cols[None, :] * strides[1]
    return tl.load(
        ptr + offsets, mask=(rows < num_rows)[:, None] & (cols < num_cols)[None, :], other=0.0
    )


@triton.jit
def tile_matmul_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    shape,
    a_strides,
    b_strides,
    ACTIVATION: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr = 64,
):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC_DTYPE)
    for start in range(0, shape[2], BLOCK_K):
        ks = start + tl.arange(0, BLOCK_K)
        a = load_tile(a_ptr, rows, ks, a_strides, shape[0], shape[2])
        b = load_tile(b_ptr, ks, cols, b_strides, shape[2], shape[1])
        acc = tl.dot(a, b, acc, input_precision="ieee", out_dtype=ACC_DTYPE)
    if ACTIVATION is not None:
        acc = ACTIVATION(acc)
    offsets = rows[:, None].to(tl.int64) * shape[1] + cols[None, :]
    mask = (rows < shape[0])[:, None] & (cols < shape[1])[None, :]
    tl.store(c_ptr + offsets, acc.to(c_ptr.dtype.element_ty), mask=mask)


def launch_matmul(block_m, block_n, block_k=64, dtype=torch.bfloat16, device="meta", **options):
    """Launch the product of a (S, 512) and b (512, 2S), and return c (S, 2S).

    S is 64 on the CPU, and otherwise 1024. b is the transpose of a contiguous matrix.
    """
    size = 64 if device == "cpu" else 1024
    a = torch.empty(size, 512, dtype=dtype, device=device)
    b = torch.empty(2 * size, 512, dtype=dtype, device=device).t()
    is_integer = dtype == torch.int8
    out_dtype = torch.int32 if is_integer else torch.bfloat16
    c = torch.zeros(size, 2 * size, dtype=out_dtype, device=device)
    grid = (triton.cdiv(size, block_m), triton.cdiv(2 * size, block_n))
    tile_matmul_kernel[grid](
        a_ptr=a,
        b_ptr=b,
        c_ptr=c,
        shape=(size, 2 * size, 512),
        a_strides=a.stride(),
        b_strides=b.stride(),
        ACTIVATION=None if is_integer else relu,
        ACC_DTYPE=tl.int32 if is_integer else tl.float32,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        **options,
    )
    return c


def compile_matmul(*args, **kwargs) -> CompileRecord:
    with record_compiles("sm_90") as records:
        launch_matmul(*args, **kwargs)
    (record,) = records
    return record


def test_record_of_a_suitable_tile_passes():
    record = compile_matmul(64, 128, num_warps=4, num_stages=3)
    assert check(record, expect="HGMMA") == ()
    assert record.kernel == "tile_matmul_kernel"
    assert record.target == "sm_90"
    assert record.config == {
        "ACTIVATION": "relu",
        "ACC_DTYPE": "fp32",
        "BLOCK_M": 64,
        "BLOCK_N": 128,
        "BLOCK_K": 64,
    }
    assert record.dtypes == {"a_ptr": "bf16", "b_ptr": "bf16", "c_ptr": "bf16"}
    assert (record.num_warps, record.num_stages) == (4, 3)
    assert record.shared >= 3 * (64 + 128) * 64 * 2  # bytes of the tiles of three stages
    assert 64 < record.registers <= 255
    assert record.stack == record.spill == record.instructions["LDL"] == 0
    assert record.instructions["LDGSTS"] > 0  # asynchronous copies, which need aligned operands
    assert record.seconds > 0
    assert "BLOCK_N=128" in str(record)


@pytest.mark.parametrize(
    ("dtype", "family"),
    [(torch.float8_e4m3fn, "QGMMA"), (torch.int8, "IGMMA"), (torch.float32, "FFMA")],
    ids=str,
)
def test_each_dtype_uses_its_instruction(dtype, family):
    record = compile_matmul(64, 64, 32 if dtype == torch.float32 else 64, dtype, num_warps=4)
    assert check(record, expect=family) == ()


def test_small_tile_lacks_the_warpgroup_instruction():
    record = compile_matmul(16, 64, num_warps=4)
    assert check(record, expect="HMMA") == ()
    (reason,) = check(record, expect="HGMMA")
    assert "no HGMMA" in reason
    assert "HMMA" in reason


def test_spilled_registers_are_reported():
    # With 4 warps, 128 x 256 accumulators need 256 registers per thread, but a thread has only 255.
    record = compile_matmul(128, 256, num_warps=4, num_stages=3)
    assert record.stack > 0
    assert record.instructions["STL"] > 0
    assert any("spilled" in reason for reason in check(record, expect="HGMMA"))


def test_too_much_shared_memory_is_reported():
    record = compile_matmul(128, 128, 128, num_warps=8, num_stages=4)
    assert record.shared > 227 * 1024
    (reason,) = check(record, expect="HGMMA")
    assert "shared memory" in reason
    assert check(record, expect="HGMMA", max_shared=record.shared) == ()


def test_all_violations_are_returned():
    record = compile_matmul(128, 256, num_warps=4, num_stages=3)
    assert len(check(record, expect="QGMMA", max_shared=0)) >= 3


def test_kernels_are_not_run_and_cpu_tensors_are_accepted():
    with record_compiles() as records:
        c = launch_matmul(64, 128, device="cpu", num_warps=4)
        launch_matmul(64, 128, device="cpu", num_warps=4)
    assert not c.any()
    assert len(records) == 2
    assert records[0].instructions == records[1].instructions


def test_instructions_are_counted_lazily():
    """`repr` and `check` do not count instructions, which can also be counted after pickling."""
    with record_compiles() as records:
        launch_matmul(64, 128, device="meta", num_warps=4)
        launch_matmul(64, 64, device="meta", num_warps=4)
    record, other = records
    assert check(record) == ()
    original_repr = repr(record)
    assert original_repr != repr(other).replace("'BLOCK_N': 64", "'BLOCK_N': 128")
    unpickled = pickle.loads(pickle.dumps(record))
    assert not record.instructions.is_counted
    assert not unpickled.instructions.is_counted
    assert check(record, expect="HGMMA") == ()
    assert record.instructions.is_counted
    assert repr(record) == repr(unpickled) == original_repr
    assert unpickled.instructions["HGMMA"] == record.instructions["HGMMA"] > 0


@triton.jit
def specialized_kernel(x_ptr, y_ptr, one, sixteen, odd, scale, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(y_ptr + offs * one, tl.load(x_ptr + offs * sixteen + odd) * scale)


def test_arguments_are_specialized_as_on_a_gpu():
    x, y = torch.empty(4096, device="meta"), torch.empty(4096)[1:]
    with record_compiles():
        kernel = specialized_kernel[(1,)](x, y, 1, 32, 33, 0.5, BLOCK=128)
    signature = kernel.src.signature
    assert signature["one"] == "constexpr"
    assert (signature["sixteen"], signature["scale"]) == ("i32", "fp32")
    aligned_indices = {
        path[0] for path, attrs in kernel.src.attrs.items() if ["tt.divisibility", 16] in attrs
    }
    aligned_names = [name for i, name in enumerate(signature) if i in aligned_indices]
    assert aligned_names == ["x_ptr", "sixteen"]  # The address of y is not a multiple of 16.


def test_fake_tensors_are_treated_as_aligned():
    with FakeTensorMode(), record_compiles() as records:
        x = torch.empty(4096, dtype=torch.float16, device="cuda")
        kernel = specialized_kernel[(1,)](x, x, 1, 32, 33, 0.5, BLOCK=128)
    assert records[0].dtypes == {"x_ptr": "fp16", "y_ptr": "fp16"}
    assert [["tt.divisibility", 16]] == kernel.src.attrs[(0,)] == kernel.src.attrs[(1,)]


@triton.jit
def descriptor_kernel(x_desc, y_desc, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK
    y_desc.store([row, 0], relu(x_desc.load([row, 0])))


def test_host_descriptors_compile_to_tma():
    x, y = (torch.empty(256, 64, dtype=torch.bfloat16, device="meta") for _ in "xy")
    x_desc, y_desc = (TensorDescriptor.from_tensor(t, [64, 64]) for t in (x, y))
    with record_compiles() as records:
        descriptor_kernel[(4,)](x_desc, y_desc, BLOCK=64)
    assert check(records[0], expect="UTMALDG") == ()
    assert records[0].dtypes == {"x_desc": "bf16", "y_desc": "bf16"}


def test_targets_are_compiled_separately():
    records: list[CompileRecord] = []
    for target in ("sm_90", "sm_80", "sm_90"):
        with record_compiles(target) as new_records:
            launch_matmul(64, 64, num_warps=4)
        records += new_records
    assert [r.target for r in records] == ["sm_90", "sm_80", "sm_90"]
    assert [check(r, expect="HGMMA") == () for r in records] == [True, False, True]


def test_driver_and_launch_are_restored_after_errors():
    originals = (triton.runtime.driver._active, JITFunction.run)
    with record_compiles():
        assert JITFunction.run is not originals[1]
    assert (triton.runtime.driver._active, JITFunction.run) == originals
    with pytest.raises(ZeroDivisionError), record_compiles():
        raise ZeroDivisionError
    assert (triton.runtime.driver._active, JITFunction.run) == originals
    with pytest.raises(triton.CompilationError), record_compiles() as records:
        launch_matmul(24, 64, num_warps=4)  # 24 is not a power of two.
    assert records == []
    assert (triton.runtime.driver._active, JITFunction.run) == originals


CONFIGS = [triton.Config({"BLOCK": block}) for block in (64, 128)]
tuned_kernel = triton.autotune(configs=CONFIGS, key=[])(specialized_kernel)


def test_invalid_arguments_are_refused():
    with pytest.raises(ConfigurationError, match="sm_90"), record_compiles("h200"):
        pass
    with pytest.raises(ConfigurationError, match="one of"):
        check(compile_matmul(64, 64, num_warps=4), expect="WGMMA")
    x = torch.empty(4096, device="meta")
    with pytest.raises(ConfigurationError, match="autotune"), record_compiles():
        tuned_kernel[(1,)](x, x, 1, 32, 33, 0.5)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        with pytest.raises(ConfigurationError, match="TRITON_INTERPRET"), record_compiles():
            pass
