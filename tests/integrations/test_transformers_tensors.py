"""Arguments without readable memory, and freed parameters, are refused."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch

if find_spec("transformers") is None:
    pytest.skip("the extra is not installed", allow_module_level=True)

from torch.autograd import forward_ad

from modular_kernel.cli.demo_models import build_small_model
from modular_kernel.errors import InputError
from modular_kernel.integrations.transformers import register, registration
from modular_kernel.integrations.transformers.modules import is_dispatched, read_tensors

ARGUMENT_NAMES = ("hidden_states", "top_k_index", "top_k_weights")


def _make_call() -> tuple[Any, list[torch.Tensor]]:
    model = build_small_model("qwen3_moe", "float32", "cpu").eval()
    experts = next(module for module in model.modules() if is_dispatched(module))
    hidden = read_tensors(experts)[1].shape[1]
    ids = torch.tensor([[0, 1], [2, 0], [1, 2]])
    return experts, [torch.randn(3, hidden), ids, torch.rand(3, 2)]


@pytest.fixture
def run_experts() -> Any:
    return registration(register("MoEPrepareAndFinalizeNoEP", "TorchExperts", name="mk_tensors"))


@pytest.mark.parametrize("position", range(3), ids=ARGUMENT_NAMES)
def test_unreadable_tensors_are_refused(position: int, run_experts: Any) -> None:
    experts, call = _make_call()
    with torch.no_grad():
        assert run_experts(experts, *call).shape == call[0].shape
        changed: list[Any] = list(call)
        with pytest.raises(InputError, match=ARGUMENT_NAMES[position]):
            torch.func.vmap(
                lambda t: run_experts(experts, *call[:position], t, *call[position + 1 :])
            )(call[position][None])
        if call[position].is_floating_point():
            with forward_ad.dual_level():
                changed[position] = forward_ad.make_dual(
                    call[position], torch.ones_like(call[position])
                )
                with pytest.raises(InputError, match="forward gradient"):
                    run_experts(experts, *changed)
        changed[position] = [1.0]
        for grad_enabled in (False, True):
            with (
                torch.set_grad_enabled(grad_enabled),
                pytest.raises(InputError, match=ARGUMENT_NAMES[position]),
            ):
                run_experts(experts, *changed)
        changed[position] = call[position].to("meta")
        with pytest.raises(InputError, match=ARGUMENT_NAMES[position]):
            run_experts(experts, *changed)
        call[position].untyped_storage().resize_(0)
        with pytest.raises(InputError, match=f"{ARGUMENT_NAMES[position]}: got 0 bytes"):
            run_experts(experts, *call)


def test_freed_parameters_are_refused(run_experts: Any) -> None:
    experts, call = _make_call()
    with torch.no_grad():
        run_experts(experts, *call)
        read_tensors(experts)[0].untyped_storage().resize_(0)
        with pytest.raises(InputError, match="gate_up_proj: got 0 bytes"):
            run_experts(experts, *call)
