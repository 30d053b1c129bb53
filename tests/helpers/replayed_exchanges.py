"""Functions that ranks run to replay calls of exchanges with a fixed capacity.

Rank processes import this module.
"""

from ep_layers import Layer
from interpreted_replays import interpreted_replays

from modular_kernel.errors import ModularKernelError
from modular_kernel.plan import Plan
from prepare_finalize import HostThenRankGroup, SymmetricGroup, TorchGroup

SYMMETRIC = "SymmMemPrepareAndFinalize"
TWO_LEVEL = "HostThenRankPrepareAndFinalize"


def make_manager(part: str, group: object, **options) -> TorchGroup | SymmetricGroup:
    """Return a manager with which the calls of a part have a fixed capacity."""
    if part == SYMMETRIC:
        return SymmetricGroup(group, **options)
    manager_class = HostThenRankGroup if part == TWO_LEVEL else TorchGroup
    return manager_class(group, checked=False, **options)


def replay_calls(rank: int, world: int, group: object, layers: list[Layer]):
    """Call a plan of the first layer with the inputs of all layers.

    Returns the outputs, the counters of the kernel, and its number of invalid ids.
    """
    with interpreted_replays():
        plan = layers[0].kernel(rank, make_manager(layers[0].part, group)).plan()
        outputs = []
        for layer in layers:
            inputs = layer.inputs_of(rank)
            outputs.append(plan(inputs.x_TH, inputs.weights, inputs.routing).clone())
        plan.kernel.prepare_finalize.check()
        return outputs, plan.kernel.counters(), plan.kernel.invalid_ids


def make_replayed_plan(rank: int, group: object, layer: Layer, **options) -> tuple[Plan, tuple]:
    """Return a plan whose calls are replayed, and the arguments of its calls.

    options: arguments of the manager.
    """
    plan = layer.kernel(rank, make_manager(layer.part, group, **options)).plan()
    inputs = layer.inputs_of(rank)
    arguments = inputs.x_TH, inputs.weights, inputs.routing
    for _ in range(4):
        plan(*arguments)
    assert plan.kernel.counters()["replayed_calls"] >= 2
    return plan, arguments


def refuse_in_replay(
    rank: int, world: int, group: object, layer: Layer, timeout_s: float
) -> list[str]:
    """Make three calls, the first of which only rank 1 refuses. Return a result for each call."""
    with interpreted_replays():
        plan, (x_TH, *other_arguments) = make_replayed_plan(rank, group, layer, timeout_s=timeout_s)
        results = []
        for x in (x_TH.double() if rank == 1 else x_TH, x_TH, x_TH):
            try:
                results.append("NaN" if plan(x, *other_arguments).isnan().all() else "")
            except ModularKernelError as error:
                results.append(f"{type(error).__name__}: {error}")
        return results


def replay_during_a_started_call(rank: int, world: int, group: object, layer: Layer):
    """Call a plan while a started call uses the buffers of the recorded call.

    Returns the outputs of all calls, and the number of replayed calls.
    """
    with interpreted_replays():
        plan, arguments = make_replayed_plan(rank, group, layer, timeout_s=20.0)
        kernel = plan.kernel
        outputs = [plan(*arguments).clone()]
        pending = kernel.start(*arguments)
        outputs.append(plan(*arguments).clone())
        outputs += [pending.finish(), plan(*arguments).clone()]
        kernel.prepare_finalize.check()
        return outputs, kernel.counters()["replayed_calls"]
