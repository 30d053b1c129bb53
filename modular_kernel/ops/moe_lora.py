"""run_moe_lora: LoRA adapters as a low-rank MLP in parallel with the experts.

    info = MoELoRABatchInfo(weight_indices, lora_ranks, scalings)
    run_moe_lora(x_TH, ids_TK, weights_TK, info, gate_up_a, gate_up_b, down_a, down_b, output)

adds, for each token t, scaling * sum over k of weight[t, k] * down_B down_A (silu(gate) * up),
where gate and up are gate_up_B gate_up_A x.

This is not the usual LoRA, which adds B A to each projection inside the experts (`Problem.lora`,
`modular_kernel.spec.lora`). This branch does not use the weights of the experts, and its output
is zero if one of its projections is zero. Use this operation only for adapters that were trained in
this form. Adapters in a PEFT checkpoint were not.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from modular_kernel.errors import (
    DeviceError,
    DtypeError,
    LayoutError,
    ShapeError,
)
from modular_kernel.ops.moe_lora_stages import (
    PairBatch,
    choose_fused_block,
    moe_lora_fused,
    moe_lora_staged,
)
from modular_kernel.spec.lora import MAX_RANK, slots_from_sequences
from modular_kernel.utils.argument_checks import MAX_INT32, Between, expect
from modular_kernel.utils.tensor_checks import (
    check_no_gradients,
    check_output,
    check_tensor,
    check_tensors,
)

Strategy = Literal["auto", "fused", "staged"]
Buffers = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
BUFFERS = ("gate_up_a", "gate_up_b", "down_a", "down_b")
_INTEGER_DTYPES = (torch.int32, torch.int64)
_Size = Annotated[int, Between(0, MAX_INT32)]
_FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# "auto" chooses "fused" for adapters of at most _MAX_FUSED_RANK with up to _MAX_FUSED_WORK, the
# number of pairs x blocks of H x (1 + 3 I / H). The first steps of the fused kernel, which it
# repeats for each block, read a row of H and three of I. Measured on an H200 with ranks 8, 16 and
# 64, four layers and 1 to 256 tokens (2026-12-01, triton 3.6.0, bf16). Any limit from 9,408 to
# 11,775 makes the same choices there. With ranks up to 16, the chosen kernels took at most 1.2 x
# the time of the others. With rank 64, "fused" is faster only for 2 to 16 tokens and H = 2048, by
# at most 1.5 x, and otherwise up to 80 x slower. Ranks between 16 and 64 were not measured.
_MAX_FUSED_WORK = 10_500
_MAX_FUSED_RANK = 16


@dataclass(frozen=True, eq=False)
class MoELoRABatchInfo:
    """The adapters of a batch, and the adapter slot of each token.

    All tensors are on the same device. Their values are not read on the host.

    weight_indices: int32 or int64, the slot of each token, (T,), or the slot of each sequence,
        (S,), if seg_indptr is given. -1 or any other value outside [0, L) means no adapter.
    lora_ranks: int32 or int64, the rank of each adapter, (L,), or (L, E) if it depends on the
        expert; 0 for an empty slot. Rows of A and columns of B beyond the rank are not read.
    scalings: (L,) float32, the factor of each adapter.
    seg_indptr: (S + 1,) int32 or int64, ascending. Sequence s consists of the tokens
        [seg_indptr[s], seg_indptr[s + 1]).

    Raises DtypeError, ShapeError or DeviceError for tensors that do not match.
    """

    weight_indices: torch.Tensor
    lora_ranks: torch.Tensor
    scalings: torch.Tensor
    seg_indptr: torch.Tensor | None = None

    def __post_init__(self) -> None:
        tensors = self._check_tensors()
        for name, tensor in tensors.items():
            need = (torch.float32,) if name == "scalings" else _INTEGER_DTYPES
            if tensor.dtype not in need:
                raise DtypeError(name, got=tensor.dtype, need=" or ".join(map(str, need)))
            if tensor.device != self.weight_indices.device:
                need_device = f"{self.weight_indices.device}, as weight_indices"
                raise DeviceError(name, got=tensor.device, need=need_device)
        for name, tensor in tensors.items():
            dims = (1, 2) if name == "lora_ranks" else (1,)
            if tensor.dim() not in dims:
                need_shape = "(L,) or (L, E)" if name == "lora_ranks" else "one dimension"
                raise ShapeError(name, got=tuple(tensor.shape), need=need_shape)
        if len(self.scalings) != len(self.lora_ranks):
            need_shape = f"({len(self.lora_ranks)},), as many as lora_ranks"
            raise ShapeError("scalings", got=tuple(self.scalings.shape), need=need_shape)

    def _check_tensors(self) -> dict[str, torch.Tensor]:
        """Check that the tensors can be read, and return those that are not None, by name."""
        check_tensors(vars(self), optional=("seg_indptr",))
        return {name: value for name, value in vars(self).items() if value is not None}

    def slots_of(self, tokens: int) -> torch.Tensor:
        """Return the slot of each token, (T,) int32. Raises ShapeError if T does not match."""
        expect("tokens", tokens, Annotated[int, Between(0, MAX_INT32)])
        self._check_tensors()
        if self.seg_indptr is not None:
            return slots_from_sequences(self.seg_indptr, self.weight_indices, tokens)
        if self.weight_indices.shape != (tokens,):
            got, need = tuple(self.weight_indices.shape), f"({tokens},), or seg_indptr"
            raise ShapeError("weight_indices", got=got, need=need)
        int32_bounds = -(1 << 31), (1 << 31) - 1  # a large int64 must not wrap to a valid slot
        return self.weight_indices.clamp(*int32_bounds).to(torch.int32).contiguous()


def run_moe_lora(  # noqa: PLR0913 (names and order follow SGLang)
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    moe_lora_info: MoELoRABatchInfo,
    gate_up_a_buffer: torch.Tensor,
    gate_up_b_buffer: torch.Tensor,
    down_a_buffer: torch.Tensor,
    down_b_buffer: torch.Tensor,
    output: torch.Tensor,
    *,
    strategy: Strategy = "auto",
) -> torch.Tensor:
    """Add the parallel branch of each token's adapter to `output`, in place, and return `output`.

    hidden_states: (T, H) float32, float16 or bfloat16.
    topk_ids: (T, K) int32 or int64, local ids. Pairs with an id outside [0, E) are skipped.
    topk_weights: (T, K) float32. Weights of skipped pairs are not read.
    gate_up_a_buffer: (L, E, R, H) with R <= 256.
    gate_up_b_buffer: (L, E, 2I, R), with gate rows first.
    down_a_buffer: (L, E, R, I).
    down_b_buffer: (L, E, H, R).
    output: (T, H). Rows of tokens without an adapter or without an expert are not changed.
    strategy: "staged" launches four kernels over pairs grouped by adapter and expert. "fused"
        launches one kernel with a program per token and block of H. "auto" chooses with
        `should_use_fused_kernel`. Without triton, the computation runs in torch.

    The four buffers and output have the dtype of hidden_states. The last dimension of a buffer must
    be contiguous. Only adapters in use are read.

    Raises an InputError that names the tensor before anything is launched, and UnsupportedError if
    gradients are required.
    """
    expect("strategy", strategy, Strategy)
    expect("moe_lora_info", moe_lora_info, MoELoRABatchInfo)
    buffers = gate_up_a_buffer, gate_up_b_buffer, down_a_buffer, down_b_buffer
    _check_arguments(hidden_states, topk_ids, topk_weights, moe_lora_info, buffers, output)
    if strategy == "auto":
        fused = should_use_fused_kernel(
            tuple(hidden_states.shape),
            tuple(topk_ids.shape),
            gate_up_a_buffer.shape[2],
            down_a_buffer.shape[3],
        )
        strategy = "fused" if fused else "staged"
    run = moe_lora_fused if strategy == "fused" else moe_lora_staged
    with torch.no_grad():
        batch = _make_batch(topk_ids, moe_lora_info, gate_up_a_buffer.shape[1])
        weights_TK, scalings_L = topk_weights.contiguous(), moe_lora_info.scalings.contiguous()
        run(hidden_states, buffers, batch, weights_TK, scalings_L, output)
    return output


def should_use_fused_kernel(
    hidden_shape: tuple[int, ...],
    topk_shape: tuple[int, ...],
    max_rank: int = 16,
    intermediate_size: int | None = None,
) -> bool:
    """Return whether strategy "auto" uses the fused kernel, which is for few pairs and small ranks.

    The fused kernel repeats the first steps for each block of H. `explain_strategy` gives the
    reason. The limits were measured on one H200.

    hidden_shape: (T, H).
    topk_shape: (T, K).
    max_rank: R.
    intermediate_size: I. If it is None, H is assumed.
    """
    _check_sizes(hidden_shape, topk_shape, max_rank, intermediate_size)
    work = _count_fused_work(hidden_shape, topk_shape, max_rank, intermediate_size)
    return max_rank <= _MAX_FUSED_RANK and work <= _MAX_FUSED_WORK


def explain_strategy(
    hidden_shape: tuple[int, ...],
    topk_shape: tuple[int, ...],
    max_rank: int = 16,
    intermediate_size: int | None = None,
) -> str:
    """Return the strategy that "auto" chooses for a call, and the reason, as text.

    The arguments are those of `should_use_fused_kernel`.
    """
    arguments = hidden_shape, topk_shape, max_rank, intermediate_size
    strategy = "fused" if should_use_fused_kernel(*arguments) else "staged"
    if max_rank > _MAX_FUSED_RANK:
        return f"{strategy}: rank {max_rank}, fused up to {_MAX_FUSED_RANK}"
    pairs, blocks = topk_shape[0] * topk_shape[1], _count_blocks(hidden_shape[1], max_rank)
    work = _count_fused_work(*arguments)
    factors = f"{pairs} pairs x {blocks} blocks of H x (1 + 3 I / H)"
    return f"{strategy}: {factors} = {work:.0f}, fused up to {_MAX_FUSED_WORK}"


def _count_fused_work(
    hidden_shape: tuple[int, ...],
    topk_shape: tuple[int, ...],
    max_rank: int,
    intermediate_size: int | None,
) -> float:
    hidden = hidden_shape[1]
    intermediate = hidden if intermediate_size is None else intermediate_size
    programs = topk_shape[0] * topk_shape[1] * _count_blocks(hidden, max_rank)
    return programs * (1 + 3 * intermediate / max(hidden, 1))


def _count_blocks(hidden: int, max_rank: int) -> int:
    return -(-hidden // choose_fused_block(max_rank))


def _check_sizes(
    hidden_shape: tuple[int, ...],
    topk_shape: tuple[int, ...],
    max_rank: int,
    intermediate_size: int | None,
) -> None:
    expect("hidden_shape", hidden_shape, tuple[_Size, _Size])
    expect("topk_shape", topk_shape, tuple[_Size, _Size])
    expect("max_rank", max_rank, Annotated[int, Between(1, MAX_RANK)])
    expect("intermediate_size", intermediate_size, _Size | None)


def _make_batch(topk_ids: torch.Tensor, info: MoELoRABatchInfo, experts: int) -> PairBatch:
    ranks = info.lora_ranks
    ranks_LE = ranks[:, None].expand(-1, experts) if ranks.dim() == 1 else ranks
    return PairBatch(topk_ids.contiguous(), info.slots_of(len(topk_ids)), ranks_LE)


def _check_arguments(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    info: MoELoRABatchInfo,
    buffers: Buffers,
    output: torch.Tensor,
) -> None:
    """Check all tensors of a call of `run_moe_lora`."""
    tensors = {"hidden_states": x, "topk_ids": ids, "topk_weights": weights}
    tensors |= {f"{name}_buffer": buffer for name, buffer in zip(BUFFERS, buffers, strict=True)}
    tensors |= {"output": output}
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
        if tensor.device != x.device:
            need = f"{x.device}, as hidden_states"
            raise DeviceError(name, got=tensor.device, need=need)
    for name, shape in _compute_shapes(x, ids, info, buffers).items():
        if tuple(tensors[name].shape) != shape:
            raise ShapeError(name, got=tuple(tensors[name].shape), need=shape)
    for name, tensor in tensors.items():
        _check_dtype_and_strides(name, tensor, x.dtype)
    if info.weight_indices.device != x.device:
        need = f"{x.device}, as hidden_states"
        raise DeviceError("moe_lora_info", got=info.weight_indices.device, need=need)
    info.slots_of(len(x))
    check_no_gradients(tensors)
    inputs: dict[str, torch.Tensor] = {k: v for k, v in tensors.items() if k != "output"}
    check_output("output", output, inputs | info._check_tensors())


def _check_dtype_and_strides(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Check the dtype and the strides of a tensor."""
    dtypes = {
        "topk_ids": _INTEGER_DTYPES,
        "topk_weights": (torch.float32,),
        "hidden_states": _FLOAT_DTYPES,
    }
    allowed = dtypes.get(name, (dtype,))
    if tensor.dtype not in allowed:
        raise DtypeError(name, got=tensor.dtype, need=" or ".join(map(str, allowed)))
    # Ids and weights are copied if they are not contiguous. The stride of a dimension of size 1
    # does not matter.
    is_copied = name in ("topk_ids", "topk_weights")
    if not is_copied and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        got = f"strides {tensor.stride()}"
        raise LayoutError(name, got=got, need="a contiguous last dimension")
    if name == "output" and len(tensor) > 1 and tensor.stride(0) < tensor.shape[1]:
        raise LayoutError(name, got=f"strides {tensor.stride()}", need="rows that do not overlap")


def _compute_shapes(
    x: torch.Tensor, ids: torch.Tensor, info: MoELoRABatchInfo, buffers: Buffers
) -> dict[str, tuple[int, ...]]:
    """Return the required shapes, which follow from the sizes of x, ids, gate_up_a and down_a."""
    for name, tensor, dims in (
        ("hidden_states", x, 2), ("topk_ids", ids, 2),
        ("gate_up_a_buffer", buffers[0], 4), ("down_a_buffer", buffers[2], 4),
    ):  # fmt: skip
        if tensor.dim() != dims:
            raise ShapeError(name, got=tuple(tensor.shape), need=f"{dims} dimensions")
    (tokens, hidden), top_k = x.shape, ids.shape[1]
    slots, experts, rank = buffers[0].shape[:3]
    intermediate = buffers[2].shape[3]
    if not 0 < rank <= 256 or 0 in (slots, experts, intermediate, top_k):
        got = f"{tuple(buffers[0].shape)}, K = {top_k}, I = {intermediate}"
        raise ShapeError("gate_up_a_buffer", got=got, need="no empty dimension, and R <= 256")
    ranks = tuple(info.lora_ranks.shape)
    if ranks not in ((slots,), (slots, experts)):
        raise ShapeError("lora_ranks", got=ranks, need=f"({slots},) or {(slots, experts)}")
    return {
        "topk_ids": (tokens, top_k),
        "topk_weights": (tokens, top_k),
        "gate_up_a_buffer": (slots, experts, rank, hidden),
        "gate_up_b_buffer": (slots, experts, 2 * intermediate, rank),
        "down_a_buffer": (slots, experts, rank, intermediate),
        "down_b_buffer": (slots, experts, hidden, rank),
        "output": (tokens, hidden),
    }
