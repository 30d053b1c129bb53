"""A small Nemotron-3 of transformers, with 22 ungated experts per token in a latent space."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from transformers_samples import DEVICE, NO_EP, skip_if_refused

if find_spec("transformers") is None:
    pytest.skip("the extra is not installed", allow_module_level=True)

from transformers import NemotronHConfig, NemotronHForCausalLM

from modular_kernel.integrations.transformers import register

# Float32 sums over 22 experts differ from those of transformers, which adds in another order.
_TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture(scope="module")
def model() -> Any:
    """A model of two MoE layers and an attention layer between them, with weights far from zero."""
    config = NemotronHConfig(
        vocab_size=64, hidden_size=64, layers_block_type=["moe", "attention", "moe"],
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=64,
        n_routed_experts=40, num_experts_per_tok=22, n_group=1, topk_group=1, norm_topk_prob=True,
        routed_scaling_factor=5.0, moe_intermediate_size=48, moe_latent_size=32,
        moe_shared_expert_intermediate_size=32, mlp_hidden_act="relu2",
    )  # fmt: skip
    torch.manual_seed(0)
    model_with_random_weights = NemotronHForCausalLM(config).to(DEVICE).eval()
    for name, parameter in model_with_random_weights.named_parameters():
        if "experts" in name or "gate.weight" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    for name, buffer in model_with_random_weights.named_buffers():
        if "e_score_correction_bias" in name:
            torch.nn.init.normal_(buffer, std=0.1)
    return model_with_random_weights


def _compute_logits(model: Any, implementation: str, tokens: int) -> torch.Tensor:
    model.set_experts_implementation(implementation)
    ids = torch.arange(2 * tokens, device=DEVICE).view(2, tokens) * 7 % 64
    with torch.no_grad():
        logits: torch.Tensor = model(ids).logits
    return logits


@pytest.mark.parametrize("experts", ["TorchExperts", "TritonExperts", "GroupedGemmExperts"])
@pytest.mark.parametrize("tokens", [1, 9])
def test_logits_equal_those_of_its_own_experts(model: Any, experts: str, tokens: int) -> None:
    skip_if_refused((NO_EP, experts))
    name = register(NO_EP, experts, name=f"nemotron_{experts}")
    logits = _compute_logits(model, name, tokens)
    torch.testing.assert_close(logits, _compute_logits(model, "eager", tokens), **_TOLERANCE)


def test_logits_with_the_default_pairing(model: Any) -> None:
    logits = _compute_logits(model, "modular_kernel", 5)
    torch.testing.assert_close(logits, _compute_logits(model, "eager", 5), **_TOLERANCE)
