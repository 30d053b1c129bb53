"""Models with PEFT adapters return the same logits as the merged model of PEFT.

Adapters that `save_pretrained` writes are also loaded into a pool by `load_adapter`.
"""

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

if find_spec("transformers") is None or find_spec("peft") is None:
    pytest.skip("transformers and peft are not both installed", allow_module_level=True)

import peft
import transformers
from transformers_samples import DEVICE, OURS

import modular_kernel as mk
from experts import TorchExperts
from modular_kernel.checkpoints.peft import load_adapter
from modular_kernel.integrations.transformers import register, report, serve, weights_of
from modular_kernel.layers.adapter_pool import AdapterPool
from modular_kernel.operators.kernel_cache import KernelCache
from modular_kernel.spec.lora import slots_from_sequences

E, K, H, I, VOCABULARY = 4, 2, 32, 24, 48  # noqa: E741
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": H, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "num_experts_per_tok": K,
}  # fmt: skip
FUSED = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
GPT_OSS_ACTIVATION = "swiglu_oai:alpha=1.702,limit=7.0,interleaved=true"
BLOCK, WRAPPER = "base_model.model.model.layers", peft.tuners.lora.layer.ParamWrapper
TOKENS = torch.arange(2 * 9).view(2, 9) % VOCABULARY


def make_qwen3() -> Any:
    config = transformers.Qwen3MoeConfig(
        **SIZES, intermediate_size=40, moe_intermediate_size=I, num_experts=E
    )
    return transformers.Qwen3MoeForCausalLM(config)


def make_mixtral() -> Any:
    config = transformers.MixtralConfig(**SIZES, intermediate_size=I, num_local_experts=E)
    return transformers.MixtralForCausalLM(config)


def make_gpt_oss() -> Any:
    config = transformers.GptOssConfig(**SIZES, intermediate_size=I, num_local_experts=E)
    return transformers.GptOssForCausalLM(config)


KINDS: dict[str, tuple[Callable[[], Any], str, dict[str, Any]]] = {
    "qwen3": (make_qwen3, "silu", {**FUSED, "r": 3, "lora_alpha": 6}),
    "mixtral": (make_mixtral, "silu", {**FUSED, "r": 5, "lora_alpha": 5}),
    "gpt_oss": (
        make_gpt_oss,
        GPT_OSS_ACTIVATION,
        {**FUSED, "r": 3, "lora_alpha": 6, "use_rslora": True},
    ),
    "down": (make_qwen3, "silu", {"target_parameters": ["experts.down_proj"], "r": 4}),
    "ranks": (make_qwen3, "silu", {**FUSED, "r": 2, "rank_pattern": {"experts.down_proj": 7}}),
    "modules": (
        make_mixtral,
        "silu",
        {"target_modules": ["w1", "w2", "w3"], "r": 2, "lora_alpha": 6},
    ),
}


def make_adapted_model(kind: str) -> Any:
    """Return a small float32 model with random weights, in a PEFT wrapper with random factors."""
    torch.manual_seed(sum(map(ord, kind)))
    make_model, _, options = KINDS[kind]
    model = make_model().eval()
    for parameter in model.parameters():  # Biases of gpt-oss are initialized to zero.
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    config = peft.LoraConfig(**options, init_lora_weights=False)
    return peft.get_peft_model(model, config).eval().to(DEVICE)


def list_experts(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "has_gate")]


@torch.no_grad()
def compute_logits(model: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the logits, and the experts that each layer selected."""
    selected_ids = list[torch.Tensor]()
    hooks = [
        block.experts.register_forward_pre_hook(
            lambda _, args, kwargs: selected_ids.append((*args, *kwargs.values())[1].clone()),
            with_kwargs=True,
        )
        for block in model.modules()
        if hasattr(block, "experts")
    ]
    logits = model(input_ids=TOKENS.to(DEVICE)).logits
    for hook in hooks:
        hook.remove()
    assert len(selected_ids) == 2
    return logits, selected_ids


def compute_merged_logits(model: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the logits of the merged model of PEFT, computed by transformers' own experts."""
    model.base_model.model.set_experts_implementation("eager")
    return compute_logits(model.merge_and_unload().eval())


def assert_same(got: tuple[Any, Any], merged_output: tuple[Any, Any]) -> None:
    assert len(got[1]) == len(merged_output[1])
    assert all(map(torch.equal, got[1], merged_output[1]))
    error = (got[0] - merged_output[0]).abs().max() / merged_output[0].abs().max()
    assert float(error) <= 2e-6


@pytest.mark.parametrize("kind", KINDS)
def test_wrapped_models_run_with_their_adapters(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts use the factors, without computing their product."""
    model = make_adapted_model(kind)
    name = register(*OURS)
    model.base_model.model.set_experts_implementation(name)
    peft_output = compute_logits(model)  # Before `serve`, PEFT multiplies the factors.
    assert serve(model) == tuple(f"{BLOCK}.{n}.mlp.experts" for n in (0, 1))
    assert serve(model) == ()
    with model.disable_adapter():
        base_logits, _ = compute_logits(model)
    with monkeypatch.context() as patch:
        patch.setattr(WRAPPER, "_activate_lora", lambda *_: pytest.fail("PEFT ran"))
        got = compute_logits(model)
    assert all(row.served for row in report(model))
    merged_output = compute_merged_logits(model)
    assert_same(got, merged_output)
    assert_same(peft_output, merged_output)
    assert float((got[0] - base_logits).abs().max()) > 1e-3


@pytest.mark.parametrize("kind", ["qwen3", "mixtral", "gpt_oss", "modules"])
def test_adapters_in_a_pool_equal_the_merged_model(kind: str, tmp_path: Path) -> None:
    """One sequence uses the adapter. The other sequence has the logits of the base model."""
    model = make_adapted_model(kind)
    model.save_pretrained(tmp_path)
    base = model.base_model.model
    with model.disable_adapter():
        base_output = compute_logits(model)
    problem = mk.Problem(
        TOKENS.numel(), H, I, E, K, torch.float32, activation=KINDS[kind][1],
        bias=kind == "gpt_oss", lora="adapters=3,rank=8",
    )  # fmt: skip
    slots_T = slots_from_sequences(torch.tensor([0, 9, 18]), torch.tensor([1, -1]), 18).to(DEVICE)
    pools = [AdapterPool(problem, DEVICE), AdapterPool(problem, DEVICE)]
    kernels = KernelCache()
    weights_by_module = dict[int, Any]()
    for layer, (module, pool) in enumerate(zip(list_experts(model), pools, strict=True)):
        pool.load("other", load_adapter(tmp_path, 1 - layer, problem))
        pool.load("mine", load_adapter(tmp_path, layer, problem))
        weights_by_module[id(module)] = pool.weights(weights_of(module))

    def run(module: Any, x: Any, ids: Any, weights: Any) -> torch.Tensor:
        routing = mk.Routing(weights.float(), ids.contiguous(), slots_T)
        pair = ("MoEPrepareAndFinalizeNoEP", "TorchExperts")
        return kernels.run(pair, problem, x.contiguous(), weights_by_module[id(module)], routing)

    transformers.integrations.moe.ExpertsInterface.register("pooled", run)
    with model.disable_adapter():
        base.set_experts_implementation("pooled")
        got = compute_logits(model)
    merged_output = compute_merged_logits(model)
    for sequence, expected in ((0, merged_output), (1, base_output)):
        assert_same(*((logits[sequence], [ids.view(2, 9, K)[sequence] for ids in selected_ids])
               for logits, selected_ids in (got, expected)))  # fmt: skip


def test_gradients_reach_the_factors() -> None:
    """PEFT's own forward runs, because the factors need gradients."""
    model = make_adapted_model("qwen3")
    model.base_model.model.set_experts_implementation(register(*OURS))
    serve(model)
    logits = model(input_ids=TOKENS.to(DEVICE)).logits
    logits.sum().backward()
    factors = [p for n, p in model.named_parameters() if "lora_" in n and "experts" in n]
    assert factors
    assert all(p.grad is not None and bool(p.grad.any()) for p in factors)
    assert_same((logits.detach(), []), (compute_merged_logits(model)[0], []))


def test_gradients_of_router_weights_alone_equal_peft() -> None:
    """Only the router weights need gradients, so our parts run."""
    model = make_served_model().requires_grad_(False)
    wrapper = model.get_submodule(f"{BLOCK}.0.mlp.experts")
    torch.manual_seed(5)
    x, ids = torch.randn(7, H).to(DEVICE), torch.randint(0, E, (7, K)).to(DEVICE)
    gradients = []
    for name in ("modular_kernel", "eager"):
        model.base_model.model.set_experts_implementation(name)
        weights = torch.linspace(0.1, 1, 14, device=DEVICE).view(7, K).requires_grad_()
        wrapper(x, ids, weights).square().sum().backward()
        assert weights.grad is not None
        gradients.append(weights.grad)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


def compute_logits_and_products(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, list[str]]:
    """Return the logits, the selected experts, and the parameters whose factors PEFT multiplied."""
    multiplied, activate_lora = list[str](), WRAPPER._activate_lora
    with monkeypatch.context() as patch:
        patch.setattr(
            WRAPPER, "_activate_lora",
            lambda self, names: (
                multiplied.append(self.parameter_name) or activate_lora(self, names)
            ),
        )  # fmt: skip
        return compute_logits(model), multiplied


def make_served_model(**options: Any) -> Any:
    model = make_adapted_model("qwen3")
    model.base_model.model.set_experts_implementation(register(**options))
    serve(model)
    return model


def test_parts_without_adapters_use_the_product_of_the_factors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_served_model()
    got, multiplied = compute_logits_and_products(model, monkeypatch)
    assert multiplied == []
    requires = TorchExperts.requires
    without_lora = type(
        "ExpertsWithoutLoRA", (TorchExperts,), {"requires": replace(requires, lora=False)}
    )
    name = register("MoEPrepareAndFinalizeNoEP", without_lora, name="without")
    model.base_model.model.set_experts_implementation(name)
    product, multiplied = compute_logits_and_products(model, monkeypatch)
    assert sorted(multiplied) == ["down_proj"] * 2 + ["gate_up_proj"] * 2
    assert_same(product, got)


@pytest.mark.parametrize("change", ["two", "merged", "eager", "rank"])
def test_unsupported_states_of_a_wrapper_run_in_peft(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT runs several adapters at once, merged weights, other implementations and high ranks."""
    model = make_served_model()
    config = {**KINDS["qwen3"][2], **({"r": 257} if change == "rank" else {})}
    model.add_adapter("second", peft.LoraConfig(**config, init_lora_weights=False))
    if change == "merged":
        model.merge_adapter()
    elif change == "eager":
        model.base_model.model.set_experts_implementation("eager")
    else:
        model.base_model.set_adapter(["default", "second"] if change == "two" else "second")
    got, multiplied = compute_logits_and_products(model, monkeypatch)
    assert len(multiplied) == (0 if change == "merged" else 4)
    model.base_model.model.set_experts_implementation("eager")
    assert_same(got, compute_logits(model))


@pytest.mark.parametrize(("gradients", "products"), [("fallback", 4), ("refuse", 0)])
def test_training_mode_runs_in_peft_unless_gradients_are_refused(
    gradients: str, products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT also runs calls without gradients, as checkpointing disables them in its first pass."""
    model = make_served_model(gradients=gradients, name=gradients).train()
    got, multiplied = compute_logits_and_products(model, monkeypatch)
    assert len(multiplied) == products
    assert_same(got, compute_logits(model.eval()))


def test_a_second_adapter_replaces_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_served_model()
    first, _ = compute_logits(model)
    model.add_adapter("second", peft.LoraConfig(**KINDS["qwen3"][2], init_lora_weights=False))
    model.set_adapter("second")
    model.eval()
    got, multiplied = compute_logits_and_products(model, monkeypatch)
    assert multiplied == []
    assert not torch.allclose(got[0], first)
    model.base_model.model.set_experts_implementation("eager")
    assert_same(got, compute_logits(model))
