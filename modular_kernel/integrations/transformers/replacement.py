"""serve: experts that transformers does not dispatch, made such that it does."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from modular_kernel.integrations.transformers.gradients import gradients_are_needed
from modular_kernel.integrations.transformers.modules import FIELDS, QUANT
from modular_kernel.integrations.transformers.peft_experts import serve_wrapped
from modular_kernel.integrations.transformers.register import Registration
from modular_kernel.utils.argument_checks import expect

# What transformers' decorator leaves on a module.
_FLAGS = {
    "has_gate": True,
    "has_bias": False,
    "has_post_expert_norm": False,
    "is_transposed": False,
    "is_concatenated": True,
    "_is_expert_parallel": False,
}


def serve(model: torch.nn.Module) -> tuple[str, ...]:
    """Have modules of REPLACED ask the experts implementation, as decorated ones do.

    So do experts that PEFT has wrapped: their adapter stays two factors, where PEFT's own wrapper
    multiplies them at each call. Returns the modules' names. A module stays the same object with
    the same weights; only its class becomes one below its own. Under another implementation it
    runs its own forward. ConfigurationError if `model` is no module.
    """
    expect("model", model, torch.nn.Module)
    found = []
    for name, module in list(model.named_modules()):
        make = REPLACED.get(type(module).__name__)
        if make is not None:
            make(module, _config_of(model, name))
            found.append(name)
    return (*found, *serve_wrapped(model))


def _config_of(model: torch.nn.Module, name: str) -> Any:
    """Return the configuration of the nearest module around it that has one."""
    steps = name.split(".")
    for end in range(len(steps), -1, -1):
        config = getattr(model.get_submodule(".".join(steps[:end])), "config", None)
        if config is not None:
            return config
    raise AttributeError(f"{type(model).__name__} has no config")


def _prepare(module: Any, config: Any, **flags: object) -> None:
    for name, value in {**_FLAGS, "config": config, **flags}.items():
        setattr(module, name, value)


def _become(module: Any, forward: Callable[..., Any]) -> None:
    cls: Any = type(module)
    module.__class__ = _below(cls, forward)


@lru_cache
def _below(cls: Any, forward: Callable[..., Any]) -> Any:
    gate = getattr(cls, "_apply_gate", _default_apply_gate)
    body = {"forward": forward, "_apply_gate": gate, "__module__": __name__, "_own": cls}
    return type(f"Served{cls.__name__}", (cls,), body)


def _ours(module: Any) -> Registration | None:
    found = ALL_EXPERTS_FUNCTIONS.get(module.config._experts_implementation or "eager")
    return found if isinstance(found, Registration) else None


# ---------------------------------------------------------------------------- one module each


def _step(module: Any, config: Any) -> None:
    _prepare(module, config)
    _become(module, _step_forward)


def _step_forward(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    run = _ours(self)
    found: torch.Tensor = (
        self._own.forward(self, *args, **kwargs) if run is None else run(self, *args, **kwargs)
    )
    return found


def _longcat(module: Any, config: Any) -> None:
    """Its last experts are the identity, and w1 has rows for them that nobody reads."""
    if module.gate_up_proj is None:
        return
    routed = module.num_routed_experts
    _prepare(module, config, num_experts=routed, _is_expert_parallel=True)
    setattr(module, FIELDS, {"gate_up_proj": f"w1:first={routed}", "down_proj": "w2"})
    setattr(module, QUANT, "none")
    _become(module, _longcat_forward)


def _longcat_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    run, call = _ours(self), (hidden_states, top_k_index, top_k_weights)
    tensors = (hidden_states, top_k_weights, self.gate_up_proj, self.down_proj)
    found: torch.Tensor
    if run is None or self.training or gradients_are_needed(tensors):
        found = self._own.forward(self, *call)
        return found
    same = top_k_weights.masked_fill(top_k_index < self.num_routed_experts, 0.0).sum(
        1, keepdim=True
    )
    found = run(self, *call)
    return found + hidden_states * same.to(hidden_states.dtype)


def _llama4(module: Any, config: Any) -> None:
    """Its router weights multiply the input: each pair becomes a token of one expert."""
    _prepare(module.experts, config, is_transposed=True)
    cls: Any = type(module.experts)
    module.experts.__class__ = _below(cls, cls.forward)
    _become(module, _llama4_forward)


def _llama4_forward(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    run = _ours(self.experts)
    found: tuple[torch.Tensor, torch.Tensor]
    if run is None:
        found = self._own.forward(self, hidden_states)
        return found
    x_TH = hidden_states.reshape(-1, self.hidden_dim)
    scores_TE, logits = self.router(x_TH)
    scores_TK, ids_TK = scores_TE.topk(self.top_k, dim=-1)
    pairs = (x_TH[:, None] * scores_TK[..., None].to(x_TH.dtype)).flatten(0, 1)
    ids, ones = ids_TK.reshape(-1, 1), torch.ones_like(scores_TK).reshape(-1, 1)
    routed = run(self.experts, pairs, ids, ones).view(*scores_TK.shape, -1).sum(1)
    return self.shared_expert(x_TH) + routed, logits


REPLACED: dict[str, Callable[[Any, Any], None]] = {
    "Llama4TextMoe": _llama4,
    "LongcatFlashExperts": _longcat,
    "Step3p7Experts": _step,
}
