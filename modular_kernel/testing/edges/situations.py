"""Enumerate the situations that differ from a given situation in a single field.

The compatibility rules judge a situation: an exchange class and an experts class ("parts"), their
declared requirements, a problem and a machine. The fields are the fields of Problem, of Machine,
and of the requirements of both parts. The values of a field are derived from its annotation, so
that new fields are included automatically.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import cache, cached_property
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

import torch

from modular_kernel.compatibility.rules import judge
from modular_kernel.compatibility.support import (
    ExpertsRequirements,
    PrepareFinalizeRequirements,
    Verdict,
)
from modular_kernel.contracts import PermuteExpertsUnpermute, PrepareAndFinalize
from modular_kernel.errors import ConfigurationError
from modular_kernel.spec.placement import Placement
from modular_kernel.spec.problem import DTYPES, GATED, UNGATED, ActivationSpec, Machine, Problem
from modular_kernel.spec.quantization import QUANT_SCHEMES, list_external_schemes
from modular_kernel.utils.argument_checks import Count

_UNBOUNDED = 2**40  # stands for a bound of None
_MAX_EXPERTS, _MAX_RANKS = 4096, 64  # limits of the search, because a Placement lists all experts
Record = TypeVar("Record")
_ID_DTYPES = (None, torch.int32, torch.int64)


@dataclass(frozen=True)
class EdgeSituation:
    """A pairing with requirements, a problem and a machine.

    Attributes:
        pf, experts: the parts.
        pf_requires, experts_requires: their requirements in this situation, which may differ from
            what the parts declare.
        problem, machine: the problem and the machine.
    """

    pf: type[PrepareAndFinalize]
    experts: type[PermuteExpertsUnpermute]
    pf_requires: PrepareFinalizeRequirements
    experts_requires: ExpertsRequirements
    problem: Problem
    machine: Machine

    @cached_property
    def verdict(self) -> Verdict:
        """The verdict on the pairing with the requirements of this situation."""
        pf = _make_part(self.pf, self.pf_requires)
        experts = _make_part(self.experts, self.experts_requires)
        return judge(pf, experts, self.problem, self.machine)

    @property
    def as_declared(self) -> bool:
        """Whether the requirements are those that the parts declare."""
        declared = self.pf.requires, self.experts.requires
        return (self.pf_requires, self.experts_requires) == declared


@dataclass(frozen=True)
class NumericField:
    """A numeric field of a situation.

    Attributes:
        field: the name, "record.field".
        start: the value in the base situation.
        situation_with: returns the situation with another value, or None if the value is invalid.
        low, high: the range of values that are tried.
        only_decreases: whether only values below `start` are tried.
    """

    field: str
    start: int
    situation_with: Callable[[int], EdgeSituation | None]
    low: int
    high: int
    only_decreases: bool = False


def _make_part(cls: Any, requires: object) -> Any:
    """Return the part, or a subclass of it with `requires` if the part's requirements differ."""
    return cls if cls.requires is requires else _make_changed_part(cls, requires)


@cache
def _make_changed_part(cls: Any, requires: object) -> Any:
    return cls if cls.requires == requires else type(cls.__name__, (cls,), {"requires": requires})


def list_changed_situations(base: EdgeSituation) -> Iterator[tuple[str, EdgeSituation]]:
    """Yield ("record.field", situation) for every change of one non-numeric field."""
    for record_name in ("problem", "machine", "pf_requires", "experts_requires"):
        record = getattr(base, record_name)
        hints = _get_record_hints(cast("Any", type(record)))
        for field in fields(record):
            value = getattr(record, field.name)
            for new_value in _list_other_values(base, field.name, hints[field.name], value):
                neighbor = _try_replace_values(base, record_name, **{field.name: new_value})
                if neighbor is not None:
                    yield f"{record_name}.{field.name}", neighbor
    for neighbor in _list_other_devices(base):
        yield "machine.device", neighbor


def list_numeric_fields(base: EdgeSituation) -> Iterator[NumericField]:
    """Yield the numeric fields of the problem, the machine and the requirements."""
    yield from _list_problem_fields(base)
    if base.machine.arch is not None:
        major, minor = base.machine.arch

        def with_arch(number: int) -> EdgeSituation | None:
            return _try_replace_values(base, "machine", arch=divmod(number, 10))

        yield NumericField("machine.arch", 10 * major + minor, with_arch, 10, 199)
    for record_name in ("pf_requires", "experts_requires"):
        record = getattr(base, record_name)
        for name, kind in _get_record_hints(cast("Any", type(record))).items():
            yield from _list_requirement_fields(
                base, record_name, name, kind, getattr(record, name)
            )


def _try_replace_values(
    base: EdgeSituation, record_name: str, **values: object
) -> EdgeSituation | None:
    """Return `base` with other values in one record, or None if the values are invalid."""
    try:
        return _replace(base, **{record_name: _replace(getattr(base, record_name), **values)})
    except ConfigurationError:
        return None


def _replace(record: Record, **values: object) -> Record:
    """Like `dataclasses.replace`, but twice as fast. A search makes about 100,000 calls."""
    values_by_name, cls = vars(record), cast("Any", type(record))
    return cast(
        "Record", cls(**{name: values_by_name[name] for name in _list_field_names(cls)} | values)
    )


@cache
def _list_field_names(cls: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(cls))


@cache
def _get_record_hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


def _list_other_values(
    base: EdgeSituation, name: str, annotation: Any, value: object
) -> Iterator[object]:
    """Yield the other values of a non-numeric field."""
    base_type = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    if name in _CANDIDATE_VALUES:
        candidates: tuple[object, ...] = tuple(_CANDIDATE_VALUES[name](base))
    elif base_type is bool:
        candidates = (not value,)
    elif get_origin(base_type) is Literal:
        candidates = get_args(base_type) if name != "device" else ()
    elif isinstance(value, Enum):
        candidates = tuple(type(value))
    elif isinstance(value, frozenset):
        members = sorted(value, key=str)
        candidates = tuple(value - {member} for member in members)
        if name == "packages":
            candidates += tuple(value | {member} for member in _list_packages())
    elif name == "packages":
        candidates = ((*base.experts_requires.packages, "no_such_package"),)
    elif any(isinstance(arg, type) and issubclass(arg, Enum) for arg in get_args(base_type)):
        candidates = next(tuple(arg) for arg in get_args(base_type) if arg is not NoneType)
    else:
        candidates = ()
    yield from (candidate for candidate in candidates if candidate != value)


@cache
def _list_packages() -> tuple[str, ...]:
    """Return the packages that some part may require."""
    from modular_kernel.catalog import collect_packages, load_catalog

    return tuple(sorted(collect_packages(load_catalog())))


@cache
def _list_schemes() -> tuple[str, ...]:
    """Return every scheme, without options and with each of its options."""
    schemes = ["none", *list_external_schemes()]
    for name, scheme in QUANT_SCHEMES.items():
        for option in ("", "block=48x48", "group=48", "zero_points=true", "static=true"):
            try:
                schemes.append(str(scheme.parse(f"{name}:{option}" if option else name)))
            except ConfigurationError:
                continue
    return tuple(dict.fromkeys((*schemes, "mxfp4_w4a16:repacked=true")))


@cache
def _list_activations() -> tuple[ActivationSpec, ...]:
    kinds = tuple(ActivationSpec.parse(kind) for kind in GATED + UNGATED)
    orders = ActivationSpec("silu", interleaved=True), ActivationSpec("silu", up_first=True)
    return (*kinds, *orders, ActivationSpec("gelu", limit=2.0, up_first=True))


def _list_parallels(problem: Problem) -> Iterator[object]:
    """Yield other values of `Problem.parallel` with the same number of ranks."""
    parallel, experts = problem.parallel, problem.experts
    if experts < parallel.world_size:
        return
    linear = Placement.linear(experts, parallel.world_size)
    yield replace(parallel, placement="linear")
    yield replace(parallel, placement=Placement.round_robin(experts, parallel.world_size))
    if parallel.world_size > 1:
        yield replace(parallel, ranks_per_host=1)
        yield replace(parallel, placement=linear.with_copies({0: (1,)}))


# The values to try for fields whose annotation does not determine them.
_CANDIDATE_VALUES: dict[str, Callable[[EdgeSituation], Iterable[object]]] = {
    "dtype": lambda _base: DTYPES.values(),
    "quant": lambda _base: _list_schemes(),
    "lora": lambda _base: ("none", "adapters=3,rank=4"),
    "activation": lambda _base: _list_activations(),
    "ids_dtype": lambda _base: _ID_DTYPES,
    "topk_indices_dtype": lambda _base: _ID_DTYPES,
    "scale_layout": lambda _base: ("row_major", "column_major"),
    "chunk_tokens": lambda base: (None, max(1, base.problem.tokens // 2)),
    "max_received": lambda base: (None, max(1, base.problem.tokens)),
    "parallel": lambda base: _list_parallels(base.problem),
    "hidden_sizes": lambda base: (None, frozenset({base.problem.hidden}), frozenset({1})),
    "blocks": lambda _base: (None, frozenset({(128, 128)}), frozenset({(16, 16)})),
    "cuda": lambda _base: (None, (13, 0), (12, 0)),
    "archs": lambda _base: (None, frozenset({(9, 0)}), frozenset({(1, 0)})),
}


def _list_other_devices(base: EdgeSituation) -> Iterator[EdgeSituation]:
    """Yield situations with the other type of device and the same software."""
    machine = base.machine
    if machine.device == "cuda":
        cpu = replace(machine, device="cpu", arch=None)
        yield replace(base, machine=replace(cpu, interpreter=True))
        yield replace(base, machine=replace(cpu, interpreter=False))
    else:
        yield replace(base, machine=replace(machine, device="cuda", arch=(9, 0)))


def _list_problem_fields(base: EdgeSituation) -> Iterator[NumericField]:
    problem = base.problem
    max_values = {"experts": _MAX_EXPERTS}
    for name in ("tokens", "hidden", "intermediate", "experts", "top_k", "local_experts"):
        value = getattr(problem, name)

        def with_value(number: int, name: str = name) -> EdgeSituation | None:
            return _try_replace_values(base, "problem", **{name: number})

        start = problem.e if name == "local_experts" else value
        yield NumericField(f"problem.{name}", start, with_value, 0, max_values.get(name, 2**31 - 1))
    if problem.chunk_tokens is not None:

        def with_chunk_tokens(number: int) -> EdgeSituation | None:
            return _try_replace_values(base, "problem", chunk_tokens=number)

        yield NumericField(
            "problem.chunk_tokens", problem.chunk_tokens, with_chunk_tokens, 1, 2**31 - 1
        )

    def with_ranks(ranks: int) -> EdgeSituation | None:
        parallel = problem.parallel
        fills_hosts = ranks % (parallel.ranks_per_host or 1) == 0
        if parallel.placement != "linear" or not 1 <= ranks <= problem.experts or not fills_hosts:
            return None
        return _try_replace_values(base, "problem", parallel=replace(parallel, world_size=ranks))

    yield NumericField("problem.world_size", problem.parallel.world_size, with_ranks, 1, _MAX_RANKS)


def _list_requirement_fields(
    base: EdgeSituation, record_name: str, name: str, annotation: Any, value: object
) -> Iterator[NumericField]:
    """Yield one numeric field for a required number, or for each bound of a required range."""
    field = f"{record_name}.{name}"

    def with_value(number: int) -> EdgeSituation | None:
        return _try_replace_values(base, record_name, **{name: number})

    if isinstance(value, int) and not isinstance(value, bool):
        minimum = 1 if annotation == Count else 0
        yield NumericField(field, value, with_value, minimum, _UNBOUNDED)
    elif set(get_args(annotation)) == {int, NoneType}:
        yield NumericField(field, _UNBOUNDED, with_value, 0, _UNBOUNDED, only_decreases=True)
    elif get_origin(annotation) is tuple and get_args(annotation)[0] is int:
        assert isinstance(value, tuple)
        for index, bound in enumerate(value):

            def with_bound(number: int, index: int = index) -> EdgeSituation | None:
                bounds = (*value[:index], number, *value[index + 1 :])
                return _try_replace_values(base, record_name, **{name: bounds})

            start = _UNBOUNDED if bound is None else bound
            yield NumericField(
                f"{field}[{index}]", start, with_bound, 0, _UNBOUNDED, only_decreases=bound is None
            )
    elif name == "min_arch" and base.machine.arch is not None:
        number = 10 * base.machine.arch[0] + base.machine.arch[1]

        def with_min_arch(number: int) -> EdgeSituation | None:
            return _try_replace_values(base, record_name, min_arch=divmod(number, 10))

        yield NumericField(field, number, with_min_arch, 0, 199)
