"""Expert weights that transformers stores transposed, moved to memory with contiguous rows."""

import copy
from importlib.util import find_spec

import pytest
import torch
from transformers_samples import DEVICE, OURS

if find_spec("transformers") is None:
    pytest.skip("the extra is not installed", allow_module_level=True)

from modular_kernel.cli.demo_models import small_model
from modular_kernel.errors import ConfigurationError
from modular_kernel.integrations.transformers import make_rows_contiguous, register, weights_of


def logits_of(model: torch.nn.Module, implementation: str) -> torch.Tensor:
    model.set_experts_implementation(implementation)
    ids = torch.arange(24, device=DEVICE).reshape(2, 12)
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def test_only_the_layout_of_transposed_weights_changes() -> None:
    model = small_model("gpt_oss", "float32", DEVICE).eval()
    before = copy.deepcopy(model)
    parameters, experts = dict(model.named_parameters()), model.model.layers[0].mlp.experts
    ours = register(*OURS)
    want = {name: logits_of(before, name) for name in (ours, "grouped_mm", "eager")}
    assert torch.equal(logits_of(model, ours), want[ours])  # its weights are bound already
    moved = make_rows_contiguous(model)
    assert set(moved) == {
        f"model.layers.{layer}.mlp.experts.{name}"
        for layer in range(len(model.model.layers))
        for name in ("gate_up_proj", "down_proj")
    }
    weights = weights_of(experts)
    assert weights.w1.is_contiguous()
    assert weights.w2.is_contiguous()
    assert dict(model.named_parameters()) == parameters
    for name, parameter in before.named_parameters():
        assert torch.equal(parameters[name], parameter)
        assert (parameters[name].stride() != parameter.stride()) == (name in moved)
    for name, logits in want.items():
        torch.testing.assert_close(logits_of(model, name), logits, rtol=1e-5, atol=1e-6)
    assert make_rows_contiguous(model) == ()


def test_a_model_is_compiled_with_the_new_layout() -> None:
    model = small_model("gpt_oss", "float32", DEVICE).eval()
    want = logits_of(model, register(*OURS))
    make_rows_contiguous(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    ids = torch.arange(24, device=DEVICE).reshape(2, 12)
    with torch.no_grad():
        got = compiled(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_other_models_are_left_as_they_are() -> None:
    model = small_model("mixtral", "float32", DEVICE)
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    assert make_rows_contiguous(model) == ()
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers


def test_only_modules_are_taken() -> None:
    with pytest.raises(ConfigurationError, match="model"):
        make_rows_contiguous("gpt-oss")  # type: ignore[arg-type]
