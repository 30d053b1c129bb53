"""Makes the experts of three model families run on our kernels.

transformers runs most experts modules with the experts implementation that the config of the model
selects. The modules of the classes in REPLACED ignore this setting, until `serve` replaces their
classes.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from modular_kernel.integrations.transformers.modules import FIELDS_ATTRIBUTE, QUANT_ATTRIBUTE
from modular_kernel.integrations.transformers.peft_experts import replace_wrappers
from modular_kernel.integrations.transformers.register import Registration
from modular_kernel.utils.argument_checks import expect

# Attributes that transformers' decorator `use_experts_implementation` sets on a module, with their
# defaults.
_FLAGS = {
    "has_gate": True,
    "has_bias": False,
    "has_post_expert_norm": False,
    "is_transposed": False,
    "is_concatenated": True,
    "_is_expert_parallel": False,
}


def serve(model: torch.nn.Module) -> tuple[str, ...]:
    """Make experts that ignore experts_implementation run on our kernels.

    These are the modules of the classes in REPLACED, and PEFT's wrappers of experts. A module
    remains the same object with the same weights, but its class is replaced by a subclass. If an
    experts implementation of another package is selected, the subclass runs the original forward.

    PEFT multiplies the two factors of an adapter in each call. The replaced wrappers multiply the
    activations by one factor after the other.

    Returns the names of the changed modules. Raises ConfigurationError unless `model` is a module.
    """
    expect("model", model, torch.nn.Module)
    names = []
    for name, module in list(model.named_modules()):
        replace_module = REPLACED.get(type(module).__name__)
        if replace_module is not None:
            replace_module(module, _find_config(model, name))
            names.append(name)
    return (*names, *replace_wrappers(model))


def _find_config(model: torch.nn.Module, name: str) -> Any:
    """Return the config of the nearest enclosing module that has a config."""
    parts = name.split(".")
    for end in range(len(parts), -1, -1):
        config = getattr(model.get_submodule(".".join(parts[:end])), "config", None)
        if config is not None:
            return config
    raise AttributeError(f"{type(model).__name__} has no config")


def _set_flags(module: Any, config: Any, **flags: object) -> None:
    for name, value in {**_FLAGS, "config": config, **flags}.items():
        setattr(module, name, value)


def _set_forward(module: Any, forward: Callable[..., Any]) -> None:
    cls: Any = type(module)
    module.__class__ = _make_subclass(cls, forward)


@lru_cache
def _make_subclass(cls: Any, forward: Callable[..., Any]) -> Any:
    gate = getattr(cls, "_apply_gate", _default_apply_gate)
    namespace = {
        "forward": forward,
        "_apply_gate": gate,
        "__module__": __name__,
        "_original_class": cls,
    }
    return type(f"Served{cls.__name__}", (cls,), namespace)


def _get_registration(module: Any) -> Registration | None:
    implementation = ALL_EXPERTS_FUNCTIONS.get(module.config._experts_implementation or "eager")
    return implementation if isinstance(implementation, Registration) else None


# ------------------------------------------------------------------------ replaced modules


def _replace_step3p7(module: Any, config: Any) -> None:
    _set_flags(module, config)
    _set_forward(module, _step3p7_forward)


def _step3p7_forward(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    registration = _get_registration(self)
    output: torch.Tensor = (
        self._original_class.forward(self, *args, **kwargs)
        if registration is None
        else registration(self, *args, **kwargs)
    )
    return output


def _replace_longcat(module: Any, config: Any) -> None:
    """Replace LongCat's experts.

    The last experts are zero experts, which return their input. gate_up_proj has unused entries for
    zero experts.
    """
    if module.gate_up_proj is None:
        return
    routed = module.num_routed_experts
    _set_flags(module, config, num_experts=routed, _is_expert_parallel=True)
    # "first" removes the unused entries of zero experts.
    setattr(module, FIELDS_ATTRIBUTE, {"gate_up_proj": f"w1:first={routed}", "down_proj": "w2"})
    setattr(module, QUANT_ATTRIBUTE, "none")
    _set_forward(module, _longcat_forward)


def _longcat_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    registration, call = _get_registration(self), (hidden_states, top_k_index, top_k_weights)
    output: torch.Tensor
    if registration is None or self.training:
        output = self._original_class.forward(self, *call)
        return output
    identity_weights = top_k_weights.masked_fill(top_k_index < self.num_routed_experts, 0.0).sum(
        1, keepdim=True
    )
    output = registration(self, *call)
    return output + hidden_states * identity_weights.to(hidden_states.dtype)


def _replace_llama4(module: Any, config: Any) -> None:
    """Replace a block that multiplies the input of the experts by the router weights.

    Each (token, expert) pair is passed to the experts as a token with K = 1.
    """
    _set_flags(module.experts, config, is_transposed=True)
    cls: Any = type(module.experts)
    module.experts.__class__ = _make_subclass(cls, cls.forward)
    _set_forward(module, _llama4_forward)


def _llama4_forward(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    registration = _get_registration(self.experts)
    outputs: tuple[torch.Tensor, torch.Tensor]
    if registration is None:
        outputs = self._original_class.forward(self, hidden_states)
        return outputs
    x_TH = hidden_states.reshape(-1, self.hidden_dim)
    scores_TE, logits = self.router(x_TH)
    scores_TK, ids_TK = scores_TE.topk(self.top_k, dim=-1)
    pairs = (x_TH[:, None] * scores_TK[..., None].to(x_TH.dtype)).flatten(0, 1)
    ids, ones = ids_TK.reshape(-1, 1), torch.ones_like(scores_TK).reshape(-1, 1)
    routed = registration(self.experts, pairs, ids, ones).view(*scores_TK.shape, -1).sum(1)
    return self.shared_expert(x_TH) + routed, logits


# Class name of an experts module -> function of (module, config) that replaces the module.
REPLACED: dict[str, Callable[[Any, Any], None]] = {
    "Llama4TextMoe": _replace_llama4,
    "LongcatFlashExperts": _replace_longcat,
    "Step3p7Experts": _replace_step3p7,
}
