"""Input mutations of calls with LoRA adapters.

Each token has an adapter slot, or -1 for none. A mutation changes the slots, or the matrices A and
B of the adapters, before the call. This must change the output noticeably.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from modular_kernel.spec.problem import Problem
from modular_kernel.testing.input_mutations import conditions as when
from modular_kernel.testing.input_mutations.inject import CallArguments, CallMutant


def _replace_slots(args: CallArguments, slots_T: torch.Tensor) -> CallArguments:
    return replace(args, routing=replace(args.routing, adapters_T=slots_T.int().contiguous()))


def _get_slots(args: CallArguments) -> torch.Tensor:
    """Return the adapter slots, (T,) int32; all -1 for a call without adapters."""
    slots_T = args.routing.slots_T
    if slots_T is None:
        return torch.full((len(args.x_TH),), -1, dtype=torch.int32, device=args.x_TH.device)
    return slots_T


def swap_slots(args: CallArguments) -> CallArguments:
    """Exchange slots 0 and 1."""
    slots_T = _get_slots(args)
    return _replace_slots(args, torch.where((slots_T == 0) | (slots_T == 1), 1 - slots_T, slots_T))


def shift_slots(args: CallArguments) -> CallArguments:
    return _replace_slots(args, _get_slots(args).roll(1))


def drop_slots(args: CallArguments) -> CallArguments:
    return _replace_slots(args, torch.full_like(_get_slots(args), -1))


def wrap_slots(args: CallArguments) -> CallArguments:
    """Map -1 to the last slot, as Python indexing does."""
    assert args.weights.lora_b2 is not None
    slots_T = _get_slots(args)
    return _replace_slots(args, torch.where(slots_T < 0, len(args.weights.lora_b2) - 1, slots_T))


def scale_again(args: CallArguments) -> CallArguments:
    """Multiply B of the second GEMM by 1.5, as if its scaling were applied a second time."""
    return _change_weight(args, "lora_b2", lambda b: b * 1.5)


def fill_beyond_rank(args: CallArguments) -> CallArguments:
    """Replace zeros with 0.25, in particular in the padding beyond an adapter's rank."""
    for name in ("lora_a13", "lora_a2", "lora_b13", "lora_b2"):
        args = _change_weight(args, name, lambda m: torch.where(m == 0, 0.25, m))
    return args


def use_gate_b_for_up(args: CallArguments) -> CallArguments:
    """Use the gate rows of B also for the up projection."""
    interleaved = args.problem.act.interleaved

    def use_gate_rows(b_LeNR: torch.Tensor) -> torch.Tensor:
        if interleaved:
            return b_LeNR[:, :, 0::2].repeat_interleave(2, 2)
        return b_LeNR[:, :, : b_LeNR.shape[2] // 2].repeat(1, 1, 2, 1)

    return _change_weight(args, "lora_b13", use_gate_rows)


def use_gate_a_for_up(args: CallArguments) -> CallArguments:
    """Use the gate rows of A also for the up projection."""

    def use_gate_rows(a_LeRH: torch.Tensor) -> torch.Tensor:
        return a_LeRH[:, :, : a_LeRH.shape[2] // 2].repeat(1, 1, 2, 1)

    return _change_weight(args, "lora_a13", use_gate_rows)


def shift_a2(args: CallArguments) -> CallArguments:
    """Give each expert the A matrix of the previous expert in the second GEMM."""
    return _change_weight(args, "lora_a2", lambda a: a.roll(1, 1))


def _change_weight(
    args: CallArguments, name: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> CallArguments:
    tensor = getattr(args.weights, name)
    weights = replace(args.weights, **{name: change(tensor).to(tensor.dtype).contiguous()})
    return replace(args, weights=weights)


def _mixes_adapters_and_none(problem: Problem, routing: str) -> bool:
    """Return whether tokens with and tokens without an adapter are certainly computed."""
    return (
        problem.adapters is not None
        and when.routes_all_pairs(problem, routing)
        and problem.tokens > 9
    )


_has_several_adapters = when.both(
    _mixes_adapters_and_none, lambda p: p.adapters is not None and p.adapters.adapters > 2
)
_has_gate_and_up_a = when.both(
    _mixes_adapters_and_none,
    lambda p: p.act.gated and p.adapters is not None and not p.adapters.a13_shared,
)

ADAPTER_MUTANTS = (
    CallMutant(
        "adapter_wrong", "slots 0 and 1 are exchanged", _has_several_adapters, arguments=swap_slots
    ),
    CallMutant(
        "adapter_of_neighbor",
        "token t has the adapter of t - 1",
        _has_several_adapters,
        arguments=shift_slots,
    ),
    CallMutant(
        "adapter_lost", "no token has an adapter", _mixes_adapters_and_none, arguments=drop_slots
    ),
    CallMutant(
        "adapter_wraps", "-1 selects the last slot", _mixes_adapters_and_none, arguments=wrap_slots
    ),
    CallMutant(
        "adapter_scaled_twice",
        "the scaling of an adapter is applied twice",
        _mixes_adapters_and_none,
        arguments=scale_again,
    ),
    CallMutant(
        "adapter_beyond_rank",
        "the padding beyond an adapter's rank is not ignored",
        _has_several_adapters,
        arguments=fill_beyond_rank,
    ),
    CallMutant(
        "adapter_gate_for_up",
        "B of gate is added to up",
        when.both(_mixes_adapters_and_none, lambda p: p.act.gated),
        arguments=use_gate_b_for_up,
    ),
    CallMutant(
        "adapter_one_a", "A of gate is used for up", _has_gate_and_up_a, arguments=use_gate_a_for_up
    ),
    CallMutant(
        "adapter_expert",
        "each expert uses the adapter matrix of the previous expert",
        when.both(_mixes_adapters_and_none, lambda p: p.e > 1),
        arguments=shift_a2,
    ),
)
