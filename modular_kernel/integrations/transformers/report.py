"""Reports which experts modules of a model run on our kernels, and why other modules do not."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from modular_kernel.errors import IncompatibleError, InputError
from modular_kernel.integrations.transformers.gradients import needs_gradients, supports_grouped_mm
from modular_kernel.integrations.transformers.modules import is_dispatched, read_tensors
from modular_kernel.integrations.transformers.register import Registration
from modular_kernel.integrations.transformers.replacement import REPLACED
from modular_kernel.utils.argument_checks import expect

# Class names of experts that transformers does not dispatch and `serve` does not replace.
_NOT_SUPPORTED = {
    "DbrxExperts": "has separate gate and up weights and a transposed w2, which would be copied",
    "JetMoeMoE": "sorts tokens in its router and adds a bias of its own",
    "JetMoeMoA": "has experts in attention",
    "NllbMoeExperts": "is a dictionary of dense modules with relu",
    "SwitchTransformersExperts": "is a dictionary of dense modules with relu",
}


@dataclass(frozen=True)
class Row:
    """One experts module.

    name: name of the module in the model.
    kind: class name of the module.
    why: why the module does not run on our kernels; "" if it runs on them.
    """

    name: str
    kind: str
    why: str

    @property
    def served(self) -> bool:
        """Whether our kernels would run a forward pass in the grad mode of the report."""
        return not self.why

    def __str__(self) -> str:
        return f"{self.name} ({self.kind}): {self.why or 'served'}"


def report(model: torch.nn.Module) -> tuple[Row, ...]:
    """Return a row for each experts module of a model, in the model's order.

    The model does not run. Only its activation functions are evaluated, on small tensors. Raises
    ConfigurationError unless `model` is a module.
    """
    expect("model", model, torch.nn.Module)
    rows = []
    for name, module in model.named_modules():
        kind = type(module).__name__
        if is_dispatched(module):
            rows.append(Row(name, kind, _find_reason(module)))
        elif kind in REPLACED:
            rows.append(
                Row(name, kind, "transformers does not dispatch it; serve(model) replaces it")
            )
        elif kind in _NOT_SUPPORTED:
            rows.append(
                Row(name, kind, f"transformers does not dispatch it, and it {_NOT_SUPPORTED[kind]}")
            )
    return tuple(rows)


def _find_reason(module: Any) -> str:
    name = module.config._experts_implementation
    implementation = ALL_EXPERTS_FUNCTIONS.get(name) if name is not None else None
    if not isinstance(implementation, Registration):
        return f"experts_implementation is {name!r}, which modular_kernel has not registered"
    if implementation.is_slower_on(_get_device(module)) and supports_grouped_mm(module):
        advice = 'register("MoEPrepareAndFinalizeNoEP", "TorchExperts") selects modular_kernel'
        return f"on a CPU, transformers' grouped_mm runs, because it is faster; {advice}"
    if module.training and implementation.gradients == "fallback" and supports_grouped_mm(module):
        return "it is in training mode, so transformers' grouped_mm runs; call model.eval()"
    if module.training and hasattr(module, "_original_class"):
        return "it is in training mode, so its own forward runs; call model.eval()"
    try:
        tensors = read_tensors(module)
        if any(tensor.is_meta for tensor in tensors):
            return "its weights are not loaded"
        if implementation.gradients == "refuse" and needs_gradients(tensors):
            return "gradients are refused, and its weights require grad; use torch.no_grad()"
        dtype = next((t.dtype for t in tensors if t.dtype in _DTYPES), torch.bfloat16)
        _, layer = implementation.compute_constants(module, tensors, dtype, 1)
        implementation.pairing.check(layer, tensors[0].device)
    except (InputError, IncompatibleError) as error:
        return " ".join(str(error).split())
    return ""


def _get_device(module: torch.nn.Module) -> torch.device:
    return next((p.device for p in module.parameters()), torch.device("meta"))


_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
