"""Every public function that takes tensors refuses what a kernel's call refuses."""

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
JUNK = (3, "evil", None, object(), [1.0], {"a": 1})


def test_every_public_function_has_a_recipe() -> None:
    taking = {name for name, function in public_callables().items() if takes_tensors(function)}
    recipes = {name.partition(" (")[0] for name in RECIPES}
    assert not taking - recipes - EXEMPT.keys(), "a public function without a recipe"
    assert not (recipes | EXEMPT.keys()) - taking, "a recipe of what is not public"
    assert not recipes & EXEMPT.keys()


@pytest.mark.parametrize("name", RECIPES)
def test_a_good_call_is_one(name: str) -> None:
    call = RECIPES[name]()
    # These launch kernels wherever they are called: they have no reference in torch.
    if name.startswith("experts.compat."):
        call = _moved(call)
    with torch.no_grad():
        call()


def _moved(call: Call) -> Call:
    """Return the call with its tensors on DEVICE."""
    arguments = call.arguments
    for path, tensor in call.tensors().items():
        arguments = replaced(arguments, steps_of(path), tensor.to(DEVICE))
    return replace(call, arguments=arguments)


def _freed(call: Call, path: str, tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)
    call()


def _shrunk(call: Call, path: str, tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(tensor.untyped_storage().nbytes() - 1)
    call()


def _dual(call: Call, path: str, tensor: torch.Tensor) -> None:
    with forward_ad.dual_level():
        make_dual: Callable[..., torch.Tensor] = forward_ad.make_dual
        call(path, make_dual(tensor, torch.ones_like(tensor)))


def _jvp(call: Call, path: str, tensor: torch.Tensor) -> None:
    torch.func.jvp(lambda given: call(path, given), (tensor,), (torch.ones_like(tensor),))


def _vmap(call: Call, path: str, tensor: torch.Tensor) -> None:
    torch.func.vmap(lambda given: call(path, given))(tensor[None])


def _negated(call: Call, path: str, tensor: torch.Tensor) -> None:
    call(path, torch._neg_view(tensor))


def _meta(call: Call, path: str, tensor: torch.Tensor) -> None:
    call(path, tensor.to("meta"))


DEFECTS: dict[str, Callable[[Call, str, torch.Tensor], None]] = {
    "shrunk": _shrunk,
    "freed": _freed,
    "dual": _dual,
    "jvp": _jvp,
    "vmap": _vmap,
    "negated": _negated,
    "meta": _meta,
}


def _cases(name: str) -> Iterator[tuple[str, str]]:
    call = RECIPES[name]()
    for path, tensor in call.tensors().items():
        # What `prepare` counts in: no reducer reads it.
        if path.endswith("invalid_ids"):
            continue
        for defect in DEFECTS:
            if defect in call.accepts:
                continue
            if defect in ("dual", "jvp") and tensor.dtype not in FLOATS:
                continue
            yield path, defect


@pytest.mark.parametrize("name", RECIPES)
def test_a_tensor_that_cannot_be_read_is_refused(name: str) -> None:
    raw: list[str] = []
    for path, defect in _cases(name):
        if defect == "freed" and f"{path} shrunk: accepted" in raw:
            continue  # it would read memory that is not there
        call = RECIPES[name]()  # the last one's memory is gone
        try:
            with torch.no_grad():
                DEFECTS[defect](call, path, call.tensors()[path])
            raw.append(f"{path} {defect}: accepted")
        except InputError:
            pass
        except Exception as error:  # noqa: BLE001  (all of them are findings)
            raw.append(f"{path} {defect}: {type(error).__name__} {str(error)[:80]}")
    assert not raw, "\n".join(raw)


@pytest.mark.parametrize("name", RECIPES)
def test_what_is_no_tensor_is_refused(name: str) -> None:
    raw, call = [], RECIPES[name]()
    for path in call.tensors():
        for junk in JUNK:
            try:
                with torch.no_grad():
                    call(path, junk)
                if junk is not None and not path.endswith("invalid_ids"):
                    raw.append(f"{path} = {junk!r}: accepted")
            except InputError:
                pass
            except Exception as error:  # noqa: BLE001  (all of them are findings)
                raw.append(f"{path} = {junk!r}: {type(error).__name__} {str(error)[:80]}")
    assert not raw, "\n".join(raw)


WRITTEN = [name for name, recipe in RECIPES.items() if recipe().written]


@pytest.mark.parametrize("name", WRITTEN)
def test_memory_that_is_written_and_read_is_refused(name: str) -> None:
    raw = []
    written, tensors = RECIPES[name]().written, RECIPES[name]().tensors()
    for path, other in product(written, tensors):
        call = RECIPES[name]()
        if other in (path, *call.shared) or other.endswith("invalid_ids"):
            continue
        out, read = call.tensors()[path], call.tensors()[other]
        room = torch.zeros(max(out.nbytes, read.nbytes), dtype=torch.uint8)
        read_here = room[: read.nbytes].view(read.dtype).view(read.shape)
        read_here.copy_(read)
        out_here = room[: out.nbytes].view(out.dtype).view(out.shape)
        changed = Call(call.function, _both(call, path, out_here, other, read_here))
        try:
            with torch.no_grad():
                changed()
            raw.append(f"{path} in {other}: accepted")
        except InputError:
            pass
    assert not raw, "\n".join(raw)


def _both(
    call: Call, path: str, value: torch.Tensor, other: str, second: torch.Tensor
) -> dict[str, object]:
    changed: dict[str, object] = replaced(call.arguments, steps_of(path), value)
    found: dict[str, object] = replaced(changed, steps_of(other), second)
    return found
