"""Layout in memory of expert weights that transformers stores transposed."""

import torch

from modular_kernel.integrations.transformers.modules import (
    is_dispatched,
    layout_of,
    names_of,
    tensors_of,
)
from modular_kernel.utils.argument_checks import expect


def make_rows_contiguous(model: torch.nn.Module) -> tuple[str, ...]:
    """Store the transposed expert weights of a model so that kernels read contiguous rows.

    Modules such as GptOssExperts hold weights of shapes (e, H, N) and (e, I, H). Kernels read them
    as transposed views, whose rows are strided. This function moves such parameters to memory in
    which the rows of the views are contiguous. Parameters remain the same objects with the same
    values and shapes; only addresses and strides change, as with `torch.nn.Module.to`. The memory
    of a second copy is needed for one parameter at a time.

    Call it after loading and moving the model, before torch.compile and the capture of CUDA graphs.
    Other experts implementations can still be selected.

    Returns the names of the parameters that were moved. Raises ConfigurationError unless `model` is
    a module, and UnsupportedError for sharded parameters.
    """
    expect("model", model, torch.nn.Module)
    moved = []
    for module_name, module in model.named_modules():
        if not is_dispatched(module):
            continue
        tensors, names = tensors_of(module), names_of(module)
        entries = layout_of(module, tensors).fields.split(",")
        for name, tensor, entry in zip(names, tensors, entries, strict=True):
            if entry.split(":")[1:2] == ["t"] and not tensor.mT.is_contiguous():
                tensor.data = tensor.detach().mT.contiguous().mT
                moved.append(f"{module_name}.{name}".lstrip("."))
    return tuple(moved)
