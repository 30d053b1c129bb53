"""Finds matrix products that would read outside of their operands on a CPU with AMX.

`modular_kernel.utils.matmul` describes this defect of oneDNN. Wrong results occur only on a CPU
with AMX. The monitor checks shapes and strides instead, so it finds unsafe products on every CPU.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

TILE = 32  # 16-bit elements in a row of an AMX tile

# Operator -> number of arguments before the operands. Composite operators such as linear are
# decomposed before dispatch, except in inference mode.
PRODUCTS = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot", "matmul", "linear", "einsum", "inner"), 0),
    **dict.fromkeys(("_grouped_mm", "_scaled_mm", "_scaled_grouped_mm", "_int_mm"), 0),
    **dict.fromkeys(("addmm", "addmm_", "addbmm", "baddbmm", "baddbmm_", "addmv", "addmv_"), 1),
}


class MatmulMonitor(TorchDispatchMode):
    """Counts matrix products on a CPU in `products` and lists the unsafe ones in `faults`.

    A product is unsafe if its operands have 16-bit elements and its inner dimension is not a
    multiple of 32. It is also unsafe if an operand has padding between its rows and its elements
    have at most 32 bits. float32 is included because torch can use 16-bit tiles for it
    (`set_float32_matmul_precision`).
    """

    def __init__(self) -> None:
        super().__init__()
        self.products = 0
        self.faults: list[str] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name in PRODUCTS:
            arguments = (*args[PRODUCTS[name] :], *kwargs.values())
            operands = [t for t in _tensors(arguments) if t.device.type == "cpu"]
            self.products += bool(operands)
            if all(t.numel() for t in operands):
                self.faults += [f"{name}: {fault}" for fault in _faults(operands)]
        return func(*args, **kwargs)


def _faults(operands: list[torch.Tensor]) -> Iterable[str]:
    if operands and operands[0].itemsize == 2 and operands[0].shape[-1] % TILE:
        yield f"depth {operands[0].shape[-1]}, {operands[0].dtype}"
    for t in operands:
        # The stride of a single row matters, since torch passes it to oneDNN.
        dense_strides = ((t.shape[-1], 1), (1, t.shape[-2])) if t.dim() > 1 else ()
        if t.dim() > 1 and t.itemsize <= 4 and t.stride()[-2:] not in dense_strides:
            yield f"{tuple(t.shape)} with strides {t.stride()}, {t.dtype}"


def _tensors(arguments: Iterable[object]) -> Iterable[torch.Tensor]:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _tensors(argument)
