"""Wrong values in any public field of a spec dataclass raise typed errors."""

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

import numpy as np
import pytest
import torch
from invalid_calls import PROBLEM, kernel_with_spies, make_arguments

import modular_kernel as mk
from modular_kernel.errors import ConfigurationError, InputError
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.select.autotune import MeasurementOptions
from modular_kernel.spec.placement import Placement
from modular_kernel.spec.problem import ActivationSpec, Combine, Machine, Parallel, Problem, Size
from modular_kernel.spec.quantization import QUANT_SCHEMES
from modular_kernel.utils.argument_checks import Between, check_fields, expect

JUNK: tuple[Any, ...] = (
    *("", "x", "16", "false", "topk_weighted", "\x1b[2J", "int32", b"x"),
    *(float("nan"), float("inf"), 2.5, 16.0, 1j, -1, 0, 2**31, -(2**31), 10**5000, 2**63),
    *(True, False, None, [], [4], {}, set(), (), (1,), (1, "x"), ((1,), None), frozenset({1})),
    *(object(), int, print, torch.int8, torch.float32, np.int64(4), np.float32(2), np.zeros(2)),
    *(torch.tensor(4), torch.tensor([1, 2]), torch.tensor(float("nan")), torch.device("cpu")),
    *(Combine.TOPK_WEIGHTED, PROBLEM, Machine(), Parallel(), ActivationSpec()),
    *(Placement.linear(8, 1), QUANT_SCHEMES["int8_w8a8_channel"]),
)
# The values of JUNK that are valid for a field of a dataclass.
VALID_VALUES: dict[type, dict[str, tuple[Any, ...]]] = {
    Problem: {
        "tokens": (0,),
        "dtype": (torch.float32,),
        "quant": (QUANT_SCHEMES["int8_w8a8_channel"],),
        "activation": (ActivationSpec(),),
        "local_experts": (None,),
        "ids_dtype": (None,),
        "routed_scaling_factor": (2.5, 16.0, -1, 0, 2**31, -(2**31), 2**63),
        "combine": (Combine.TOPK_WEIGHTED,),
        "chunk_tokens": (None,),
        "max_received": (None,),
        "parallel": (Parallel(),),
    },
    ActivationSpec: {"alpha": (None,), "limit": (None,), "interleaved": (None,)},
    Parallel: {"rank": (0,), "ranks_per_host": (None,), "placement": (Placement.linear(8, 1),)},
    Machine: {
        "name": tuple(v for v in JUNK if isinstance(v, str)),
        "arch": (None,),
        "others": ((),),
        "cuda": (None,),
        "memory": (None, 2**31),
    },
    MeasurementOptions: {
        "tokens": (None, (1,)),
        "budget": (0, 2.5, 16.0, 2**31, 2**63),
        "folder": (None,),
        "on_bucket": (None, print, int),
    },
    Placement: {},
}
RECORDS = (
    PROBLEM,
    ActivationSpec(),
    Parallel(),
    Machine(),
    MeasurementOptions(),
    Placement.linear(8, 1),
)


def is_same_value(a: object, b: object) -> bool:
    return type(a) is type(b) and a == b


def is_valid_value(record: object, name: str, value: object) -> bool:
    valid_values = VALID_VALUES[type(record)].get(name, ())
    if isinstance(getattr(record, name), bool):
        valid_values += (True, False)
    return any(is_same_value(value, valid) for valid in valid_values if type(value) is type(valid))


RECORD_FIELDS = [(record, field.name) for record in RECORDS for field in fields(record)]
# Decimal numbers, and numbers near powers of 2, which messages can state as a power.
BOUNDS = [1, 9999, 10000, *(2**n + d for n in (14, 16, 17, 20, 31, 62) for d in (-2, -1, 0, 1))]


@pytest.mark.parametrize("high", BOUNDS)
def test_message_states_the_maximum(high: int) -> None:
    expect("n", high, Annotated[int, Between(1, high)])
    with pytest.raises(ConfigurationError) as caught:
        expect("n", high + 1, Annotated[int, Between(1, high)])
    match = re.search(r"need an int >= 1 and (?:<= (\d+)|< 2\^(\d+))$", str(caught.value))
    assert match is not None
    assert (int(match[1]) if match[1] else 2 ** int(match[2]) - 1) == high


@pytest.mark.parametrize(
    ("record", "name"), RECORD_FIELDS, ids=[f"{type(r).__name__}.{n}" for r, n in RECORD_FIELDS]
)
def test_wrong_value_in_one_field_raises_a_typed_error(record: Any, name: str) -> None:
    for value in JUNK:
        if is_valid_value(record, name, value):
            changed = replace(record, **{name: value})
            if isinstance(changed, Problem):
                assert str(changed)
                assert all(verdict.problem is changed for verdict in mk.check_all(changed))
            continue
        with pytest.raises(ConfigurationError) as caught:
            replace(record, **{name: value})
        assert len(str(caught.value)) < 500, value
        assert caught.value.need


def test_wrong_values_in_two_fields_of_a_problem_raise_typed_errors() -> None:
    names = [field.name for field in fields(PROBLEM)]
    for (a, b), shift in itertools.product(itertools.combinations(names, 2), range(0, 40, 8)):
        value_a = JUNK[(names.index(a) + shift) % len(JUNK)]
        value_b = JUNK[names.index(b) + shift // 2]
        if not (is_valid_value(PROBLEM, a, value_a) and is_valid_value(PROBLEM, b, value_b)):
            with pytest.raises(ConfigurationError):
                replace(PROBLEM, **{a: value_a, b: value_b})


@pytest.mark.parametrize("experts", [2**31, 2**20, 2**63])
def test_a_placement_of_too_many_experts_is_refused_before_allocation(experts: int) -> None:
    """A placement of 2^31 experts would exhaust the memory of the machine."""
    for make_placement in (
        lambda: Problem(tokens=1, hidden=8, intermediate=8, experts=experts, top_k=1),
        lambda: Placement.linear(experts, 1),
        lambda: Placement.round_robin(experts, 1),
        lambda: Placement.of_table([(0, 0)], experts),
    ):
        with pytest.raises(ConfigurationError, match=r"need an int >= 1 and < 2\^20"):
            make_placement()


def test_the_largest_allowed_problem_is_accepted() -> None:
    max_size = 2**31 - 1
    problem = Problem(
        max_size, max_size, max_size, 2**20 - 1, max_size, local_experts=1, chunk_tokens=max_size
    )
    assert problem.placement.experts == 2**20 - 1


def test_wrong_placement_arguments_raise_typed_errors() -> None:
    functions: tuple[Callable[[Any], object], ...] = (
        lambda v: Placement.linear(v, 1),
        lambda v: Placement.linear(8, v),
        lambda v: Placement.round_robin(8, v),
        lambda v: Placement.of_table(((0, 0),), v),
        lambda v: Placement.of_table(((0, v),), 1),
        lambda v: Placement.linear(8, 1).expert_map(v),
    )
    values = (None, "x", 2.5, -1, True, 2**40, object())
    for function, value in itertools.product(functions, values):
        if function is functions[-1] and value is True:
            continue
        with pytest.raises(ConfigurationError):
            function(value)


@pytest.mark.parametrize("value", [None, "x", 5, 2.5, [], {}, object(), torch.ones(2), Problem])
def test_wrong_problem_or_part_raises_a_typed_error(value: Any) -> None:
    pair = ("MoEPrepareAndFinalizeNoEP", "TorchExperts")
    for call in (
        lambda: mk.check(*pair, value),
        lambda: mk.check_all(value),
        lambda: mk.make_kernel(*pair, value),
        lambda: mk.compose(value),
        lambda: mk.check(value, pair[1], PROBLEM),
        lambda: mk.make_kernel(pair[0], value, PROBLEM),
        lambda: mk.make_kernel(*pair, PROBLEM, checked=value),
        lambda: mk.make_kernel(*pair, PROBLEM, poison=value),
        lambda: FusedMoEModularKernel(value, value),
        *(
            (
                lambda: mk.check(*pair, PROBLEM, value),
                lambda: mk.check_all(PROBLEM, value),
                lambda: mk.make_kernel(*pair, PROBLEM, machine=value),
                lambda: mk.compose(PROBLEM, value),
                lambda: mk.compose(PROBLEM, options=value),
                lambda: kernel_with_spies(PROBLEM).plan(value),
            )
            if value is not None
            else ()
        ),
    ):
        with pytest.raises(InputError):
            call()


@pytest.mark.parametrize("planned", [False, True], ids=["call", "plan"])
@pytest.mark.parametrize("value", [None, "x", 5, [], object(), torch.ones(2), (1, 2)])
def test_wrong_call_arguments_raise_typed_errors(value: Any, planned: bool) -> None:
    """The parts of the kernel fail the test if they are called."""
    args, kernel = make_arguments(PROBLEM), kernel_with_spies(PROBLEM)
    call = kernel.plan() if planned else kernel
    arguments = {"x": args.x, "weights": args.weights, "routing": args.routing, "out": None}
    for name in arguments if value is not None else ("x", "weights", "routing"):
        changed = arguments | {name: value}
        inputs = changed["x"], changed["weights"], changed["routing"]
        with pytest.raises(InputError) as caught:
            call(*inputs, out=changed["out"])
        assert caught.value.what == name
        if not planned:
            with pytest.raises(InputError):
                kernel.start(*inputs, out=changed["out"])


def test_wrong_values_in_the_routing_raise_typed_errors() -> None:
    args, kernel = make_arguments(PROBLEM), kernel_with_spies(PROBLEM)
    for name, value in itertools.product(("topk_weights_TK", "topk_ids_TK"), (None, 5, [], "x")):
        with pytest.raises(InputError):
            kernel(args.x, args.weights, replace(args.routing, **{name: value}))


@dataclass(frozen=True)
class AnnotatedFields:
    size: Size = 0
    bounds: "Between | tuple[int, int]" = (1, 2)


def test_fields_are_checked_by_their_annotations() -> None:
    check_fields(AnnotatedFields(bounds=Between(1, 2)))
    for invalid_field, need in (
        ({"size": -1}, "an int >= 0 and < 2^31"),
        ({"bounds": (1, 2, 3)}, "a Between or a tuple of an int and an int"),
        ({"bounds": (1, True)}, "a Between or a tuple of an int and an int"),
    ):
        with pytest.raises(ConfigurationError) as caught:
            check_fields(AnnotatedFields(**invalid_field), "of ")  # type: ignore[arg-type]
        assert caught.value.what == f"of {next(iter(invalid_field))}"
        assert caught.value.need == need
