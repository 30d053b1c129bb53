"""Defects of LoRA adapters."""

from dataclasses import replace

import torch

from modular_kernel.spec.problem import Problem
from modular_kernel.testing.input_mutations import conditions as when
from modular_kernel.testing.input_mutations.inject import CallArguments, CallMutant


def _with_slots(args: CallArguments, slots_T: torch.Tensor) -> CallArguments:
    return replace(args, routing=replace(args.routing, adapters_T=slots_T.int().contiguous()))


def _slots(args: CallArguments) -> torch.Tensor:
    """Return slots as (T,) int32, -1 for calls without adapters."""
    slots_T = args.routing.slots_T
    if slots_T is None:
        return torch.full((len(args.x_TH),), -1, dtype=torch.int32, device=args.x_TH.device)
    return slots_T


def swap_slots(args: CallArguments) -> CallArguments:
    """Exchange slots 0 and 1."""
    slots_T = _slots(args)
    return _with_slots(args, torch.where((slots_T == 0) | (slots_T == 1), 1 - slots_T, slots_T))


def slot_of_neighbor(args: CallArguments) -> CallArguments:
    return _with_slots(args, _slots(args).roll(1))


def lost_slots(args: CallArguments) -> CallArguments:
    return _with_slots(args, torch.full_like(_slots(args), -1))


def wrapped_slots(args: CallArguments) -> CallArguments:
    """Map -1 to the last slot, as Python indexing does."""
    assert args.weights.lora_b2 is not None
    slots_T = _slots(args)
    return _with_slots(args, torch.where(slots_T < 0, len(args.weights.lora_b2) - 1, slots_T))


def scaled_twice(args: CallArguments) -> CallArguments:
    """Multiply B of the second GEMM, which contains an adapter's scaling, by 1.5."""
    return _change_weight(args, "lora_b2", lambda b: b * 1.5)


def beyond_rank(args: CallArguments) -> CallArguments:
    """Replace the zeros beyond an adapter's rank."""
    for name in ("lora_a13", "lora_a2", "lora_b13", "lora_b2"):
        args = _change_weight(args, name, lambda m: torch.where(m == 0, 0.25, m))
    return args


def gate_for_up(args: CallArguments) -> CallArguments:
    """Add B of the gate rows to the up values too."""
    interleaved = args.problem.act.interleaved

    def use_gate_rows(b_LeNR: torch.Tensor) -> torch.Tensor:
        if interleaved:
            return b_LeNR[:, :, 0::2].repeat_interleave(2, 2)
        return b_LeNR[:, :, : b_LeNR.shape[2] // 2].repeat(1, 1, 2, 1)

    return _change_weight(args, "lora_b13", use_gate_rows)


def gate_a_for_up(args: CallArguments) -> CallArguments:
    """Compute u of up with the gate rows of A."""

    def use_gate_rows(a_LeRH: torch.Tensor) -> torch.Tensor:
        return a_LeRH[:, :, : a_LeRH.shape[2] // 2].repeat(1, 1, 2, 1)

    return _change_weight(args, "lora_a13", use_gate_rows)


def a2_of_next_expert(args: CallArguments) -> CallArguments:
    """Give each expert its neighbor's A of the second GEMM."""
    return _change_weight(args, "lora_a2", lambda a: a.roll(1, 1))


def _change_weight(args: CallArguments, name: str, change: object) -> CallArguments:
    tensor = getattr(args.weights, name)
    assert callable(change)
    weights = replace(args.weights, **{name: change(tensor).to(tensor.dtype).contiguous()})
    return replace(args, weights=weights)


def _has_adapters(problem: Problem, routing: str) -> bool:
    """Return whether pairs of tokens with and without an adapter are certainly computed."""
    return problem.adapters is not None and when.all_routed(problem, routing) and problem.tokens > 9


_has_several_adapters = when.both(
    _has_adapters, lambda p: p.adapters is not None and p.adapters.adapters > 2
)
_has_gate_and_up_a = when.both(
    _has_adapters, lambda p: p.act.gated and p.adapters is not None and not p.adapters.a13_shared
)

ADAPTER_MUTANTS = (
    CallMutant(
        "adapter_wrong", "slots 0 and 1 are exchanged", _has_several_adapters, arguments=swap_slots
    ),
    CallMutant(
        "adapter_of_neighbor",
        "token t has the adapter of t - 1",
        _has_several_adapters,
        arguments=slot_of_neighbor,
    ),
    CallMutant("adapter_lost", "no token has an adapter", _has_adapters, arguments=lost_slots),
    CallMutant("adapter_wraps", "-1 is the last slot", _has_adapters, arguments=wrapped_slots),
    CallMutant(
        "adapter_scaled_twice",
        "an adapter's scaling is applied once more",
        _has_adapters,
        arguments=scaled_twice,
    ),
    CallMutant(
        "adapter_beyond_rank",
        "rows beyond an adapter's rank count",
        _has_several_adapters,
        arguments=beyond_rank,
    ),
    CallMutant(
        "adapter_gate_for_up",
        "B of gate is added to up",
        when.both(_has_adapters, lambda p: p.act.gated),
        arguments=gate_for_up,
    ),
    CallMutant("adapter_one_a", "A of gate serves up", _has_gate_and_up_a, arguments=gate_a_for_up),
    CallMutant(
        "adapter_expert",
        "an expert's adapter is its neighbor's",
        when.both(_has_adapters, lambda p: p.e > 1),
        arguments=a2_of_next_expert,
    ),
)
