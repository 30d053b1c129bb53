"""Run a small Mixtral model of transformers with modular_kernel, and compare it with eager experts.

    python examples/in_a_transformers_model.py

Requires the extra `transformers`. The weights are random. For a checkpoint, use
`AutoModelForCausalLM.from_pretrained(name, experts_implementation="modular_kernel")`.
"""

import torch
from transformers import MixtralConfig, MixtralForCausalLM

from modular_kernel.integrations.transformers import register


def main() -> None:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = MixtralForCausalLM(config).eval().to(device)
    ids = torch.randint(0, 64, (1, 12), device=device)

    # Without arguments, register() selects the parts.
    register("MoEPrepareAndFinalizeNoEP", "TorchExperts")
    with torch.inference_mode():
        model.set_experts_implementation("eager")
        eager_logits = model(ids).logits
        model.set_experts_implementation("modular_kernel")
        logits = model(ids).logits
    torch.testing.assert_close(logits, eager_logits, rtol=1e-4, atol=1e-4)
    print(f"logits {tuple(logits.shape)}: the same as with eager experts, within 1e-4")


if __name__ == "__main__":
    main()
