"""Fuzz targets: calls inside function transforms, and with tensor subclasses.

The transforms are those of torch.func and torch.autograd. Kernels compute no gradients. A call
whose output needs a gradient must raise an error instead of returning an output without a gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st

from modular_kernel.testing.stress.fuzz import samples
from modular_kernel.testing.stress.fuzz.independent_reference import IndependentReference
from modular_kernel.testing.stress.fuzz.outcome import (
    CORRECT,
    INVALID_ACCEPTED,
    WRONG_RESULT,
    FuzzOutcome,
    run_or_classify,
)
from modular_kernel.testing.stress.fuzz.random_problems import CallInputs
from modular_kernel.testing.stress.fuzz.samples import PROBLEM, E, T, draw_floats
from modular_kernel.testing.stress.fuzz.target import Target, import_object, seeds

# PyTorch's transforms are not typed.
forward_ad: Any = torch.autograd.forward_ad
func: Any = torch.func

# Maps (x, w1, topk_weights) to the output. Router functions use x as logits.
Function = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
_FUNCTIONS = (
    "kernel",
    "plan",
    "start",
    "batched",
    "layer",
    "routed layer",
    "route",
    "fused_experts",
)


def _make_function(name: str, inputs: CallInputs) -> Function:
    """Make a function that maps the floating-point tensors of a call to its output."""
    weights, routing = inputs.weights, inputs.routing
    if name == "route":
        route = import_object("modular_kernel.ops.route:route")
        spec = samples.make_router_spec(renormalize=True)
        return lambda x, _w1, _scores: route(x[:, :E], spec).routing.topk_weights_TK
    if name == "routed layer":
        spec = samples.make_router_spec(renormalize=True)
        layer = samples.make_loaded_layer(weights, router=spec)
        return lambda x, _w1, _scores: layer(x.detach(), x[:, :E])
    if name == "layer":
        layer = samples.make_loaded_layer(weights)
        return lambda x, _w1, scores: layer(x, replace(routing, topk_weights_TK=scores))
    if name == "fused_experts":
        fused_experts = import_object("modular_kernel.integrations.fused_moe:fused_experts")
        return lambda x, w1, scores: fused_experts(
            x, w1, weights.w2, (scores, routing.topk_ids_TK, None)
        )
    kernel = samples.make_torch_kernel(
        PROBLEM, samples.BATCHED_PAIR if name == "batched" else samples.STANDARD_PAIR
    )
    run: Any = {"plan": kernel.plan, "start": lambda: _start_and_finish(kernel)}.get(
        name, lambda: kernel
    )()
    return lambda x, w1, scores: run(
        x, replace(weights, w1=w1), replace(routing, topk_weights_TK=scores)
    )


def _start_and_finish(kernel: Any) -> Callable[..., torch.Tensor]:
    return lambda *arguments: kernel.start(*arguments).finish()


_TRANSFORMS = (
    "dual", "jvp", "vmap", "vmap of one", "grad", "vjp", "jacrev", "functionalize", "fake",
    "inference", "requires grad", "checkpoint", "hessian", "no grad",
)  # fmt: skip


def check_transform(case: tuple[str, str, int, int]) -> FuzzOutcome:
    """Call inside a function transform. It must not lose a gradient or return a wrong result."""
    name, transform, argument, seed = case
    inputs = samples.make_call_inputs(seed)
    function = _make_function(name, inputs)
    arguments = [inputs.x_TH, inputs.weights.w1, inputs.routing.topk_weights_TK]
    index = 0 if name in ("route", "routed layer") else argument
    if name == "layer" and index == 1:
        index = 2  # the weights of a layer are not arguments
    description = f"{transform} of {name} in argument {index}"

    def call_with(tensor: torch.Tensor) -> torch.Tensor:
        changed = [*arguments[:index], tensor, *arguments[index + 1 :]]
        return function(changed[0], changed[1], changed[2])

    expected = call_with(arguments[index].clone()).clone()
    result = run_or_classify(
        description, lambda: _apply_transform(transform, call_with, arguments[index])
    )
    if isinstance(result, FuzzOutcome):
        return result
    if result == "lost":
        return FuzzOutcome(INVALID_ACCEPTED, f"{description}: the gradient is lost")
    if isinstance(result, torch.Tensor) and not torch.equal(result.detach(), expected):
        return FuzzOutcome(WRONG_RESULT, description)
    return FuzzOutcome(CORRECT, description)


def _apply_transform(  # noqa: C901 (one case for each transform)
    transform: str, function: Callable[[torch.Tensor], torch.Tensor], tensor: Any
) -> Any:
    """Apply a transform; return the output, "lost" if a derivative was lost, or None."""
    if transform == "dual":
        with forward_ad.dual_level():
            output = function(forward_ad.make_dual(tensor, torch.ones_like(tensor)))
            return output if forward_ad.unpack_dual(output).tangent is not None else "lost"
    if transform == "jvp":
        output, tangent = func.jvp(function, (tensor,), (torch.ones_like(tensor),))
        return "lost" if not tangent.any() else output
    if transform in ("vmap", "vmap of one"):
        stacked = torch.stack([tensor] * (1 if transform == "vmap of one" else 2))
        return func.vmap(function)(stacked)[0]
    if transform == "functionalize":
        return func.functionalize(function)(tensor)
    if transform == "fake":
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            function(mode.from_tensor(tensor))
        return None
    if transform in ("inference", "no grad"):
        with torch.inference_mode() if transform == "inference" else torch.no_grad():
            return function(tensor.clone().requires_grad_() if transform == "no grad" else tensor)
    if transform == "requires grad":
        output = function(tensor.clone().requires_grad_())
        return output if output.requires_grad else "lost"
    if transform == "checkpoint":
        from torch.utils.checkpoint import checkpoint

        leaf = tensor.clone().requires_grad_()
        checkpoint(function, leaf, use_reentrant=False).sum().backward()
        return None if leaf.grad is not None and leaf.grad.any() else "lost"

    def compute_scalar(value: torch.Tensor) -> torch.Tensor:
        return function(value).float().square().sum()

    derivative = {"grad": func.grad, "jacrev": func.jacrev, "hessian": func.hessian}
    if transform == "vjp":
        _, compute_vjp = func.vjp(compute_scalar, tensor)
        gradient = compute_vjp(torch.ones(()))[0]
    else:
        gradient = derivative[transform](compute_scalar)(tensor)
    return None if gradient.any() else "lost"


class _PlainSubclass(torch.Tensor):
    """A subclass that adds no behavior."""


class _TorchFunctionSubclass(torch.Tensor):
    """A subclass that defines `__torch_function__`, like the parameters of serving engines."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


class _WrapperSubclass(torch.Tensor):
    """A subclass without memory that wraps another tensor, like those of torchao and DTensor."""

    wrapped: torch.Tensor

    def detach(self) -> "_WrapperSubclass":
        """Return an alias, as Parameter requires."""
        return _WrapperSubclass(self.wrapped)

    @staticmethod
    def __new__(cls: Any, wrapped: torch.Tensor) -> "_WrapperSubclass":
        wrapper: _WrapperSubclass = torch.Tensor._make_wrapper_subclass(
            cls, wrapped.shape, dtype=wrapped.dtype, device=wrapped.device, strides=wrapped.stride()
        )
        wrapper.wrapped = wrapped
        return wrapper

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def unwrap(value: Any) -> Any:
            return value.wrapped if isinstance(value, _WrapperSubclass) else value

        args, kwargs = torch.utils._pytree.tree_map(unwrap, (args, kwargs or {}))
        return func(*args, **kwargs)


class _DuckTensor:
    """An object with the attributes of a tensor that is not a torch.Tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [a._tensor if isinstance(a, _DuckTensor) else a for a in args]
        return func(*args, **(kwargs or {}))


_SUBCLASSES: dict[str, Callable[[torch.Tensor], Any]] = {
    "subclass": lambda tensor: tensor.as_subclass(_PlainSubclass),
    "overriding": lambda tensor: tensor.as_subclass(_TorchFunctionSubclass),
    "wrapper": _WrapperSubclass,
    "duck": _DuckTensor,
    "parameter": lambda tensor: torch.nn.Parameter(tensor, requires_grad=False),
    "buffer": lambda tensor: torch.nn.Buffer(tensor),
    "wrapped parameter": lambda tensor: torch.nn.Parameter(
        _WrapperSubclass(tensor), requires_grad=False
    ),
    "uninitialized": lambda tensor: torch.nn.UninitializedParameter(requires_grad=False),
    "numpy": lambda tensor: tensor.numpy(),
    "memoryview": lambda tensor: memoryview(bytes(tensor.numel())),
}


@dataclass(frozen=True)
class SubclassCase:
    """A call with some arguments of another class.

    Attributes:
        function: what is called.
        kind: a key of _SUBCLASSES.
        argument_indices: indices of the changed arguments, modulo the number of arguments.
        seed: seed of the inputs.
    """

    function: str
    kind: str
    argument_indices: list[int]
    seed: int


def check_tensor_subclasses(case: SubclassCase) -> FuzzOutcome:
    """Call with tensors of other classes. The output must be correct, or the error typed."""
    inputs = samples.make_call_inputs(case.seed)
    router = samples.make_router_spec(renormalize=True)
    route = import_object("modular_kernel.ops.route:route")
    logits = draw_floats(T, E, seed=case.seed)
    tensors: dict[str, Any] = {
        "x": inputs.x_TH, "w1": inputs.weights.w1, "w2": inputs.weights.w2,
        "topk_weights": inputs.routing.topk_weights_TK, "topk_ids": inputs.routing.topk_ids_TK,
        "out": torch.empty(inputs.x_TH.shape),
    }  # fmt: skip
    if case.function in ("route", "routed layer"):
        tensors = {"logits": logits, "x": inputs.x_TH}
        inputs = replace(inputs, routing=route(logits, router).routing)
    reference = IndependentReference(PROBLEM, inputs.x_TH.clone(), inputs.weights, inputs.routing)
    scores = inputs.routing.topk_weights_TK
    description = case.function
    changed = dict(tensors)
    for index in case.argument_indices:
        name = sorted(tensors)[index % len(tensors)]
        changed[name] = _SUBCLASSES[case.kind](tensors[name])
        description += f", {name}: {case.kind}"

    def call() -> Any:
        if case.function == "route":
            return route(changed["logits"], router).routing.topk_weights_TK
        if case.function == "routed layer":
            return samples.make_loaded_layer(inputs.weights, router=router)(
                changed["x"], changed["logits"]
            )
        weights = replace(inputs.weights, w1=changed["w1"], w2=changed["w2"])
        routing = replace(
            inputs.routing,
            topk_weights_TK=changed["topk_weights"],
            topk_ids_TK=changed["topk_ids"],
        )
        if case.function == "layer":
            return samples.make_loaded_layer(weights)(changed["x"], routing)
        kernel = samples.make_torch_kernel(
            PROBLEM, samples.BATCHED_PAIR if case.function == "batched" else samples.STANDARD_PAIR
        )
        run: Any = kernel.plan() if case.function == "plan" else kernel
        return run(changed["x"], weights, routing, out=changed["out"])

    result = run_or_classify(description, call)
    if isinstance(result, FuzzOutcome):
        return result
    if case.function == "route":
        is_equal = torch.equal(torch.as_tensor(result), scores)
        return FuzzOutcome(CORRECT if is_equal else WRONG_RESULT, description)
    mismatch = reference.find_mismatch(result.as_subclass(torch.Tensor))
    return (
        FuzzOutcome(WRONG_RESULT, f"{description}: {mismatch}")
        if mismatch
        else FuzzOutcome(CORRECT, description)
    )


_SUBCLASS_CASES = st.builds(
    SubclassCase,
    function=st.sampled_from(("kernel", "plan", "batched", "layer", "route", "routed layer")),
    kind=st.sampled_from(sorted(_SUBCLASSES)),
    argument_indices=st.lists(st.integers(0, 59), min_size=1, max_size=3),
    seed=seeds,
)
_TRANSFORM_CASES = st.tuples(
    st.sampled_from(_FUNCTIONS), st.sampled_from(_TRANSFORMS), st.integers(0, 2), seeds
)
TARGETS: tuple[Target[Any], ...] = (
    Target("transforms", 3, _TRANSFORM_CASES, check_transform, launches=True),
    Target("tensor_subclasses", 3, _SUBCLASS_CASES, check_tensor_subclasses, launches=True),
)
