"""Which matrix products on a CPU read beside their operands where a CPU has AMX.

Only such a CPU shows what `modular_kernel.utils.matmul` says of oneDNN. So the cause is watched on
every CPU: the shapes and strides of the operands, as torch dispatches products.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

TILE = 32  # columns of 16 bits

# How many arguments stand before the operands, by operator. Composite ones, such as linear, arrive
# as what they consist of, except in inference mode.
PRODUCTS = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot", "matmul", "linear", "einsum", "inner"), 0),
    **dict.fromkeys(("_grouped_mm", "_scaled_mm", "_scaled_grouped_mm", "_int_mm"), 0),
    **dict.fromkeys(("addmm", "addmm_", "addbmm", "baddbmm", "baddbmm_", "addmv", "addmv_"), 1),
}


class WatchedProducts(TorchDispatchMode):
    """Within it, `products` counts matrix products on a CPU, `faults` lists the unsafe ones.

    Unsafe are a 16-bit product whose depth is not a multiple of 32, and operands of 16 or 32 bits
    with gaps between their rows. torch multiplies float32 by oneDNN's 16-bit tiles on request
    (`set_float32_matmul_precision`), and float64 never.
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
            given = (*args[PRODUCTS[name] :], *kwargs.values())
            operands = [t for t in _tensors(given) if t.device.type == "cpu"]
            self.products += bool(operands)
            if all(t.numel() for t in operands):
                self.faults += [f"{name}: {fault}" for fault in _faults(operands)]
        return func(*args, **kwargs)


def _faults(operands: list[torch.Tensor]) -> Iterable[str]:
    if operands and operands[0].itemsize == 2 and operands[0].shape[-1] % TILE:
        yield f"depth {operands[0].shape[-1]}, {operands[0].dtype}"
    for t in operands:
        # The stride of a single row counts: oneDNN is handed it.
        sides = ((t.shape[-1], 1), (1, t.shape[-2])) if t.dim() > 1 else ()
        if t.dim() > 1 and t.itemsize <= 4 and t.stride()[-2:] not in sides:
            yield f"{tuple(t.shape)} with strides {t.stride()}, {t.dtype}"


def _tensors(arguments: Iterable[object]) -> Iterable[torch.Tensor]:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _tensors(argument)
