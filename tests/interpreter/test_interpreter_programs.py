"""Memory accesses, matrix products, loops and launches have the results of a GPU."""

import threading

import pytest
import torch
import triton
import triton.language as tl
from interpreter_values import BF16, E4M3, E5M2, F16, F32, equal_bits, make_generator, randn
from triton.runtime.errors import InterpreterError

from modular_kernel.catalog import load_catalog
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import BatchedShape, BatchedTokens
from modular_kernel.testing.cases.inputs import make_inputs
from modular_kernel.testing.ranks.pool import RankPool
from modular_kernel.workspace import Workspace

# -------------------------------------------------------------------------------- memory


@triton.jit
def masked_copy_kernel(x_ptr, y_ptr, n, other, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    mask = offs < n
    x = tl.load(x_ptr + offs, mask=mask, other=other, cache_modifier=".cg")
    tl.store(y_ptr + offs, x, mask=mask | (offs == BLOCK - 1), eviction_policy="evict_first")


@pytest.mark.parametrize("dtype", [BF16, E4M3, E5M2, F16, torch.int8], ids=str)
def test_masked_lanes_are_replaced_or_not_stored(dtype):
    x = randn(64, seed=14).mul(8).to(dtype)
    y = torch.zeros(64).to(dtype)
    masked_copy_kernel[(1,)](x, y, 37, 0.3, BLOCK=64)
    assert equal_bits(y[:37], x[:37])
    assert equal_bits(y[37:], torch.tensor([0.0] * 26 + [0.3]).to(dtype))


@triton.jit
def descriptor_kernel(x_ptr, y_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr):
    x_desc = tl.make_tensor_descriptor(x_ptr, shape=[M, N], strides=[N, 1], block_shape=[BM, BN])
    y_desc = tl.make_tensor_descriptor(y_ptr, shape=[M, N], strides=[N, 1], block_shape=[BM, BN])
    for j in range(tl.cdiv(N, BN)):
        y_desc.store([0, j * BN], x_desc.load([0, j * BN]) + 1.0)


def test_descriptors_load_and_store_bf16():
    x = randn(5, 48, seed=15, dtype=BF16)
    y = torch.zeros_like(x)
    descriptor_kernel[(1,)](x, y, 5, 48, BM=8, BN=32)
    assert equal_bits(y, x + 1.0)


@triton.jit
def accumulate_kernel(x_ptr, y_ptr, index_ptr, old_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    index = tl.load(index_ptr + offs, mask=mask, other=0)
    x = tl.load(x_ptr + offs, mask=mask, other=0)
    old = tl.atomic_add(y_ptr + index, x, mask=mask)
    tl.store(old_ptr + offs, old, mask=mask)


@pytest.mark.parametrize("dtype", [BF16, F32, F16, torch.int32], ids=str)
def test_atomic_add_adds_to_duplicate_addresses(dtype):
    x = (randn(100, seed=16) * 10).to(dtype)
    index = torch.randint(0, 7, (100,), generator=make_generator(1), dtype=torch.int32)
    y, old = torch.zeros(7, dtype=dtype), torch.zeros(100, dtype=dtype)
    expected_y, expected_old = y.clone(), old.clone()
    for i, j in enumerate(index.tolist()):
        expected_old[i] = expected_y[j]
        expected_y[j] += x[i]
    accumulate_kernel[(2,)](x, y, index, old, 100, BLOCK=64)
    assert equal_bits(y, expected_y)
    assert equal_bits(old, expected_old)


@triton.jit
def lock_kernel(word_ptr, seen_ptr, best_ptr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    tl.store(seen_ptr + pid, tl.atomic_cas(word_ptr, pid, pid + 1))
    tl.atomic_max(best_ptr, (pid * 5) % 7)


def test_atomic_cas_and_max_return_old_values():
    word, best = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    seen = torch.zeros(6, dtype=torch.int32)
    lock_kernel[(6,)](word, seen, best, BLOCK=1)
    assert (word.item(), best.item(), seen.tolist()) == (6, 6, [0, 1, 2, 3, 4, 5])


@triton.jit
def swap_kernel(word_ptr, old_ptr):
    one = tl.full((), 1.0, tl.bfloat16)
    two = tl.full((), 2.0, tl.bfloat16)
    tl.store(old_ptr, tl.atomic_cas(word_ptr, one, two))


def test_atomic_cas_swaps_bf16():
    word, old = torch.ones(1, dtype=BF16), torch.zeros(1, dtype=BF16)
    swap_kernel[(1,)](word, old)
    assert (word.item(), old.item()) == (2.0, 1.0)


# ------------------------------------------------------------------------- dot and loops


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), dtype=ACC_OF(c_ptr.dtype.element_ty))
    for start in range(0, K, BK):
        k_mask = start + k < K
        a = tl.load(a_ptr + m[:, None] * K + (start + k), mask=(m < M)[:, None] & k_mask, other=0.0)
        b = tl.load(
            b_ptr + (start + k)[:, None] * N + n, mask=k_mask[:, None] & (n < N)[None], other=0.0
        )
        acc = tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=acc.dtype)
    c = c_ptr + m[:, None] * N + n
    tl.store(c, acc.to(c_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None])


@triton.jit
def ACC_OF(dtype: tl.constexpr):
    return tl.int32 if dtype == tl.int32 else tl.float32


def matmul(
    a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, precision: str = "ieee"
) -> torch.Tensor:
    (M, K), N = a.shape, b.shape[1]
    c = torch.full((M, N), 77).to(dtype)
    grid = (triton.cdiv(M, 16), triton.cdiv(N, 32))
    matmul_kernel[grid](a, b, c, M, N, K, PRECISION=precision, BM=16, BN=32, BK=32)
    return c


def compute_relative_rms(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("dtype", [BF16, F16, F32, E4M3, E5M2], ids=str)
def test_dot_accumulates_in_float32(dtype):
    a, b = randn(33, 100, seed=17).to(dtype), randn(100, 40, seed=18).to(dtype)
    expected = a.double() @ b.double()
    assert compute_relative_rms(matmul(a, b, F32), expected) < 3e-7
    assert equal_bits(matmul(a, b, BF16), matmul(a, b, F32).to(BF16))


def test_dot_of_int8_is_exact():
    a, b = (
        torch.randint(-128, 128, shape, generator=make_generator(3), dtype=torch.int8)
        for shape in ((17, 96), (96, 33))
    )
    assert torch.equal(matmul(a, b, torch.int32), a.int() @ b.int())


def test_float32_dot_uses_tf32_by_default():
    a, b = randn(16, 64, seed=19), randn(64, 32, seed=20)
    expected = a.double() @ b.double()
    assert compute_relative_rms(matmul(a, b, F32, "ieee"), expected) < 3e-7
    assert 1e-4 < compute_relative_rms(matmul(a, b, F32, "tf32"), expected) < 2e-3
    # The mantissas of bf16 values fit into the ten bits of tf32.
    bf16_a, bf16_b = a.to(BF16).float(), b.to(BF16).float()
    assert torch.equal(matmul(bf16_a, bf16_b, F32, "tf32"), matmul(bf16_a, bf16_b, F32))


@triton.jit
def triangle(n):
    total = 0
    i = 0
    while i < n:
        i += 1
        total += i
    return total


@triton.jit
def loop_kernel(bound_ptr, y_ptr, n, STATIC: tl.constexpr):
    count = tl.load(bound_ptr)
    total = 0
    for i in range(count):
        total += i
    for i in tl.range(1, n, 3, num_stages=2):
        total += 100 * i
    for _ in tl.static_range(STATIC):
        total += 100_000
    tl.store(y_ptr, total)
    if tl.program_id(0) > 0:
        return
    tl.store(y_ptr + 1, triangle(count) + triangle(n))


def test_loops_have_run_time_bounds():
    bound, y = torch.tensor([5], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    loop_kernel[(2,)](bound, y, 8, STATIC=3)
    assert y.tolist() == [10 + 100 * (1 + 4 + 7) + 300_000, 15 + 36]


# ------------------------------------------------------------------------------ launches


@triton.jit
def assert_kernel(x_ptr, BLOCK: tl.constexpr):
    tl.device_assert(tl.load(x_ptr + tl.arange(0, BLOCK)) < 3, "too large")


def test_device_assert_raises():
    assert_kernel[(1,)](torch.tensor([0, 1, 2, 2]), BLOCK=4)
    with pytest.raises(InterpreterError, match="too large"):
        assert_kernel[(1,)](torch.tensor([0, 1, 2, 3]), BLOCK=4)


@triton.jit
def sum_of_both(x, y):
    return tl.sum(x + y, axis=0)


@triton.jit
def helper_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.store(y_ptr, sum_of_both(x, x))


def test_the_language_is_restored_after_a_launch():
    functions_before = {
        (m, n): getattr(m, n) for m in (tl, tl.core) for n in ("load", "range", "reduce")
    }
    y = torch.zeros(1)
    helper_kernel[(1,)](torch.ones(16), y, BLOCK=16)
    assert y.item() == 32.0
    assert all(getattr(module, name) is value for (module, name), value in functions_before.items())


@triton.jit
def slow_index_kernel(y_ptr, n):
    for i in range(n):
        tl.store(y_ptr + tl.program_id(0) * n + i, tl.program_id(0))


def test_launches_of_threads_are_serialized():
    outputs = [torch.full((40, 8), -1, dtype=torch.int32) for _ in range(4)]
    threads = [
        threading.Thread(target=lambda y: slow_index_kernel[(40,)](y, 8), args=(y,))
        for y in outputs
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = torch.arange(40, dtype=torch.int32)[:, None].expand(40, 8)
    assert all(torch.equal(y, expected) for y in outputs)


def test_invalid_block_shapes_raise():
    with pytest.raises(ValueError, match="power of 2"):
        tl.block_type(tl.float32, [24])
    with pytest.raises(TypeError):
        tl.block_type(tl.float32, [16.0])
    assert tl.block_type(tl.float32, [16, 2]) == tl.block_type(tl.float32, [tl.constexpr(16), 2])
    assert tl.block_type(tl.float32, [16, 2]).name == "<['16', '2'], fp32>"


def measure_error_of_first_launch(rank: int, world_size: int, group: object) -> float:
    """Return the relative error of BatchedTritonExperts in the first launch of this process."""
    problem = Problem(4, 64, 32, 2, 1, dtype="bf16")
    inputs = make_inputs(problem, "uniform", torch.device("cpu"), seed=0, strided=False)
    tokens = BatchedTokens(inputs.x_TH.expand(2, 4, 64).contiguous(), torch.tensor([4, 4]).int())
    outputs = []
    for name in ("NaiveBatchedExperts", "BatchedTritonExperts"):
        part = load_catalog().experts(name)(problem)
        shapes = part.workspace_shapes(BatchedShape(2, 4))
        output = torch.zeros(2, 4, 64, dtype=torch.bfloat16)
        workspace = Workspace(shapes.buffers(), output.device)
        part.apply(tokens, weights=inputs.weights, workspace=workspace, output=output)
        outputs.append(output.float())
    return float((outputs[1] - outputs[0]).norm() / outputs[0].norm())


def test_first_launch_of_a_process_has_gpu_numerics() -> None:
    with RankPool(1) as pool:
        (error,) = pool.run(measure_error_of_first_launch)
    assert error < 0.01


# ------------------------------------------------------------------------- launch options


@pytest.mark.parametrize("options", [{"num_warps": 3}, {"num_warps": 64}, {"num_ctas": 0}], ids=str)
def test_invalid_launch_options_raise(options):
    x = torch.ones(64)
    (name, value) = next(iter(options.items()))
    with pytest.raises(ValueError, match=f"masked_copy_kernel: {name} is {value}, need a power"):
        masked_copy_kernel[(1,)](x, torch.zeros(64), 64, 0.0, BLOCK=64, **options)


def test_valid_launch_options_are_accepted():
    x, y = torch.ones(64), torch.zeros(64)
    masked_copy_kernel[(1,)](x, y, 64, 0.0, BLOCK=64, num_warps=8, num_ctas=1, num_stages=3)
    assert equal_bits(y, x)


@triton.jit
def unrolled_kernel(y_ptr, COUNT: tl.constexpr):
    total = 0
    for i in tl.static_range(1, COUNT + 1):
        total += i
    tl.store(y_ptr, total)


def test_too_many_unrolled_iterations_raise():
    y = torch.zeros(1, dtype=torch.int32)
    unrolled_kernel[(1,)](y, COUNT=512)
    assert int(y) == 512 * 513 // 2
    with pytest.raises(InterpreterError, match="513 unrolled iterations, need at most 512"):
        unrolled_kernel[(1,)](y, COUNT=513)
