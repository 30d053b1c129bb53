"""Every public function with tensor arguments refuses tensors that it cannot read.

A recipe is a valid example call of a public function.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch
from devices import DEVICE
from public_calls import Call, public_callables, replaced, steps_of, takes_tensors
from public_recipes import EXEMPT, RECIPES
from torch.autograd import forward_ad

from modular_kernel.errors import InputError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
NON_TENSORS = (3, "evil", None, object(), [1.0], {"a": 1})


def test_every_public_function_has_a_recipe() -> None:
    with_tensors = {
        name for name, function in public_callables().items() if takes_tensors(function)
    }
    recipes = {name.partition(" (")[0] for name in RECIPES}
    assert not with_tensors - recipes - EXEMPT.keys(), "a public function without a recipe"
    assert not (recipes | EXEMPT.keys()) - with_tensors, "a recipe without a public function"
    assert not recipes & EXEMPT.keys()


@pytest.mark.parametrize("name", RECIPES)
def test_example_calls_succeed(name: str) -> None:
    call = RECIPES[name]()
    # These functions have no torch path, so they always launch kernels.
    if name.startswith("experts.compat."):
        call = _move_to_device(call)
    with torch.no_grad():
        call()


def _move_to_device(call: Call) -> Call:
    """Return the call with its tensors on DEVICE."""
    arguments = call.arguments
    for path, tensor in call.tensors().items():
        arguments = replaced(arguments, steps_of(path), tensor.to(DEVICE))
    return replace(call, arguments=arguments)


def _call_freed(call: Call, path: str, tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)
    call()


def _call_shrunk(call: Call, path: str, tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(tensor.untyped_storage().nbytes() - 1)
    call()


def _call_dual(call: Call, path: str, tensor: torch.Tensor) -> None:
    with forward_ad.dual_level():
        make_dual: Callable[..., torch.Tensor] = forward_ad.make_dual
        call(path, make_dual(tensor, torch.ones_like(tensor)))


def _call_jvp(call: Call, path: str, tensor: torch.Tensor) -> None:
    torch.func.jvp(lambda value: call(path, value), (tensor,), (torch.ones_like(tensor),))


def _call_vmap(call: Call, path: str, tensor: torch.Tensor) -> None:
    torch.func.vmap(lambda value: call(path, value))(tensor[None])


def _call_negated(call: Call, path: str, tensor: torch.Tensor) -> None:
    call(path, torch._neg_view(tensor))


def _call_meta(call: Call, path: str, tensor: torch.Tensor) -> None:
    call(path, tensor.to("meta"))


DEFECTS: dict[str, Callable[[Call, str, torch.Tensor], None]] = {
    "shrunk": _call_shrunk,
    "freed": _call_freed,
    "dual": _call_dual,
    "jvp": _call_jvp,
    "vmap": _call_vmap,
    "negated": _call_negated,
    "meta": _call_meta,
}


def _list_tensors_and_defects(name: str) -> Iterator[tuple[str, str]]:
    call = RECIPES[name]()
    for path, tensor in call.tensors().items():
        # Reducers do not read this counter; only `prepare` writes it.
        if path.endswith("invalid_ids"):
            continue
        for defect in DEFECTS:
            if defect in call.accepts:
                continue
            if defect in ("dual", "jvp") and tensor.dtype not in FLOATS:
                continue
            yield path, defect


@pytest.mark.parametrize("name", RECIPES)
def test_tensors_that_cannot_be_read_are_refused(name: str) -> None:
    findings: list[str] = []
    for path, defect in _list_tensors_and_defects(name):
        if defect == "freed" and f"{path} shrunk: accepted" in findings:
            continue  # the call would read freed memory
        call = RECIPES[name]()  # the previous call's memory may be freed
        try:
            with torch.no_grad():
                DEFECTS[defect](call, path, call.tensors()[path])
            findings.append(f"{path} {defect}: accepted")
        except InputError:
            pass
        except Exception as error:  # noqa: BLE001  (all of them are findings)
            findings.append(f"{path} {defect}: {type(error).__name__} {str(error)[:80]}")
    assert not findings, "\n".join(findings)


@pytest.mark.parametrize("name", RECIPES)
def test_values_that_are_not_tensors_are_refused(name: str) -> None:
    findings, call = [], RECIPES[name]()
    for path in call.tensors():
        for value in NON_TENSORS:
            try:
                with torch.no_grad():
                    call(path, value)
                if value is not None and not path.endswith("invalid_ids"):
                    findings.append(f"{path} = {value!r}: accepted")
            except InputError:
                pass
            except Exception as error:  # noqa: BLE001  (all of them are findings)
                findings.append(f"{path} = {value!r}: {type(error).__name__} {str(error)[:80]}")
    assert not findings, "\n".join(findings)


CALLS_WITH_OUTPUTS = [name for name, recipe in RECIPES.items() if recipe().written]


@pytest.mark.parametrize("name", CALLS_WITH_OUTPUTS)
def test_overlapping_output_and_input_are_refused(name: str) -> None:
    findings = []
    output_paths, tensors = RECIPES[name]().written, RECIPES[name]().tensors()
    for output_path, input_path in product(output_paths, tensors):
        call = RECIPES[name]()
        if input_path in (output_path, *call.shared) or input_path.endswith("invalid_ids"):
            continue
        output, input_tensor = call.tensors()[output_path], call.tensors()[input_path]
        memory = torch.zeros(max(output.nbytes, input_tensor.nbytes), dtype=torch.uint8)
        input_view = memory[: input_tensor.nbytes].view(input_tensor.dtype).view(input_tensor.shape)
        input_view.copy_(input_tensor)
        output_view = memory[: output.nbytes].view(output.dtype).view(output.shape)
        overlapping = Call(
            call.function,
            _replace_two_arguments(call, output_path, output_view, input_path, input_view),
        )
        try:
            with torch.no_grad():
                overlapping()
            findings.append(f"{output_path} in {input_path}: accepted")
        except InputError:
            pass
    assert not findings, "\n".join(findings)


def _replace_two_arguments(
    call: Call, path: str, value: torch.Tensor, other_path: str, other_value: torch.Tensor
) -> dict[str, object]:
    """Return the arguments of a call with two tensors replaced."""
    arguments: dict[str, object] = replaced(call.arguments, steps_of(path), value)
    return replaced(arguments, steps_of(other_path), other_value)
