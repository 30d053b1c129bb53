"""`batched_gemm`, a function that computes a grouped GEMM of batched rows (e, C, K)."""

from collections.abc import Mapping

import torch

from experts.triton.configs.select import choose_config
from experts.triton.launch_config import LaunchConfig
from experts.triton.operands import gemm2_operands, weight_rejections
from modular_kernel.errors import (
    ConfigurationError,
    DeviceError,
    DtypeError,
    IncompatibleError,
    LayoutError,
    ShapeError,
)
from modular_kernel.ops.quantize import scale_shape
from modular_kernel.quant.quantized_weights import STORAGE, weight_specs
from modular_kernel.replay.launch.launch import launch
from modular_kernel.replay.launch.runtime import use_triton
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.tensors import ExpertWeights
from modular_kernel.utils.tensor_checks import check_no_gradients, check_output, check_tensor


def batched_gemm(  # noqa: PLR0913  (every operand has scales)
    a_eCK: torch.Tensor,
    b_eNK: torch.Tensor,
    counts_e: torch.Tensor,
    *,
    quant: str = "none",
    a_scale: torch.Tensor | None = None,
    b_scale: torch.Tensor | None = None,
    b_zero_point: torch.Tensor | None = None,
    b_global_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """out[i, c] = a[i, c] @ b[i]^T for c < counts_e[i]; other rows are neither read nor written.

    a_eCK: (e, C, K), contiguous.
    b_eNK: (e, N, K) with any strides, or packed.
    counts_e: (e,) int32. Counts above C are treated as C.
    quant: the quantization scheme.
    a_scale: float32, of shape (1,), (e, C, 1) or (e, C, ceil(K / g)), as the scheme requires.
    b_scale: has the shape and dtype of w2_scale in an `ExpertWeights` of the scheme.
    b_zero_point: has the shape and dtype of w2_zero_point in an `ExpertWeights` of the scheme.
    b_global_scale: (e, 1) float32, required by nvfp4.
    out: (e, C, N), contiguous. If it is None, the output is allocated.
    dtype: the dtype of the allocated output if a is quantized. Otherwise the output has a's dtype.

    Sums are accumulated in float32. Raise InputError for a tensor of the wrong shape, dtype, layout
    or device, IncompatibleError if the kernel has no K step for the scale groups, and
    UnsupportedError for tensors that require gradients.
    """
    tensors = {"a": a_eCK, "b": b_eNK, "counts": counts_e}
    optional = {"a_scale": a_scale, "b_scale": b_scale, "out": out}
    optional |= {"b_zero_point": b_zero_point, "b_global_scale": b_global_scale}
    tensors |= {name: tensor for name, tensor in optional.items() if tensor is not None}
    _check_tensors(tensors)
    if a_eCK.dim() != 3 or b_eNK.dim() != 3:
        got = f"{tuple(a_eCK.shape)} and {tuple(b_eNK.shape)}"
        raise ShapeError("a and b", got=got, need="(e, C, K) and (e, N, K)")
    (experts, capacity, depth), columns = a_eCK.shape, b_eNK.shape[1]
    dtype = dtype if out is None else out.dtype
    problem = Problem(
        tokens=capacity,
        hidden=columns,
        intermediate=depth,
        experts=experts,
        top_k=1,
        dtype=dtype if a_eCK.dtype.itemsize == 1 else a_eCK.dtype,
        quant=quant,
    )
    rejections = weight_rejections("batched_gemm", problem, _make_machine(a_eCK.device))
    if rejections:
        raise IncompatibleError("batched_gemm", rejections)
    if out is None:
        shape = (experts, capacity, columns)
        out = torch.empty(shape, dtype=problem.dtype, device=a_eCK.device)
    weight_tensors = {"w2": b_eNK, "w2_scale": b_scale, "w2_zero_point": b_zero_point}
    weight_tensors["w2_global_scale"] = b_global_scale
    _check_weights(weight_tensors, b_eNK, problem)
    _check_rows(a_eCK, a_scale, counts_e, out, problem)
    if out.numel() == 0:
        return out
    if not use_triton(a_eCK):
        need = "a GPU with triton, or triton's interpreter"
        raise DeviceError("device of the tensors", got=a_eCK.device, need=need)
    from experts.triton.kernels.batched_gemm import batched_gemm_kernel

    weights = ExpertWeights(
        b_eNK,
        b_eNK,
        w2_scale=b_scale,
        w2_zero_point=b_zero_point,
        w2_global_scale=b_global_scale,
    )
    # The configuration of GEMM 2, which has no activation in its epilogue.
    _, tile = choose_config(problem, capacity).typed_launches(LaunchConfig)
    num_m_blocks = -(-capacity // tile.block_m)
    launch(
        batched_gemm_kernel,
        (num_m_blocks * -(-columns // tile.block_n), experts),
        a_ptr=a_eCK,
        out_ptr=out,
        counts_ptr=counts_e.clamp(max=capacity),
        capacity=capacity,
        num_m_blocks=num_m_blocks,
        stride_ase=0 if a_scale is None or a_scale.dim() == 1 else a_scale.stride(0),
        **gemm2_operands(weights, problem).arguments(tile, problem.fp32_precision, a_scale),
    )
    return out


def _check_tensors(tensors: Mapping[str, torch.Tensor]) -> None:
    """Check that no tensor requires gradients and that `out` does not overlap an input."""
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
    check_no_gradients(tensors)
    if "out" in tensors:
        inputs = {name: tensor for name, tensor in tensors.items() if name != "out"}
        check_output("out", tensors["out"], inputs)


def _make_machine(device: torch.device) -> Machine:
    if device.type != "cuda":
        return Machine()
    return Machine("cuda", torch.cuda.get_device_capability(device))


def _check_weights(
    tensors: Mapping[str, torch.Tensor | None], b_eNK: torch.Tensor, problem: Problem
) -> None:
    specs = weight_specs(problem)
    for name, tensor in tensors.items():
        spec, label = specs.get(name), name.replace("w2", "b")
        if spec is None and tensor is not None:
            raise ConfigurationError(label, got="a tensor", need=f"None for quant={problem.quant}")
        if spec is None:
            continue
        if tensor is None:
            raise ConfigurationError(label, got=None, need=f"{spec} for quant={problem.quant}")
        if tuple(tensor.shape) != spec.shape:
            raise ShapeError(label, got=tuple(tensor.shape), need=spec.shape)
        if tensor.dtype not in spec.dtypes:
            raise DtypeError(label, got=tensor.dtype, need=" or ".join(map(str, spec.dtypes)))
        if name != "w2" and not tensor.is_contiguous():
            raise LayoutError(label, got=f"strides {tensor.stride()}", need="contiguous")
        _check_device(label, tensor, b_eNK.device)


def _check_rows(
    a_eCK: torch.Tensor,
    a_scale: torch.Tensor | None,
    counts_e: torch.Tensor,
    out: torch.Tensor,
    problem: Problem,
) -> None:
    scheme, (experts, capacity, depth) = problem.scheme, a_eCK.shape
    a_dtype = STORAGE[scheme.activation] if scheme.quantizes_activations else problem.dtype
    a_scale_shape: tuple[int, ...] | None = None
    if scheme.quantizes_activations:
        has_one_scale = scheme.activation_granularity == "tensor"
        a_scale_shape = (
            (1,) if has_one_scale else (experts, capacity, scale_shape(scheme, 1, depth)[1])
        )
    expected = (
        ("a", a_eCK, (experts, capacity, depth), a_dtype),
        ("counts", counts_e, (experts,), torch.int32),
        ("out", out, (experts, capacity, problem.hidden), problem.dtype),
        ("a_scale", a_scale, a_scale_shape, torch.float32),
    )
    for name, tensor, expected_shape, dtype in expected:
        if tensor is None and expected_shape is None:
            continue
        if tensor is None or tuple(tensor.shape) != expected_shape:
            got = None if tensor is None else tuple(tensor.shape)
            raise ShapeError(name, got=got, need=expected_shape)
        if tensor.dtype is not dtype:
            raise DtypeError(name, got=tensor.dtype, need=dtype)
        if not tensor.is_contiguous():
            raise LayoutError(name, got=f"strides {tensor.stride()}", need="contiguous")
        _check_device(name, tensor, a_eCK.device)


def _check_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise DeviceError(name, got=tensor.device, need=device)
