"""Catalog of parts: discovery through entry points, and lookup by name.

A package provides parts in the entry-point group "modular_kernel.parts"; each entry point names a
tuple of classes. Built-in parts are registered the same way. Only `load_catalog` reads the entry
points and has side effects; everything else is pure.
"""

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Literal, TypeVar

from modular_kernel import process_status
from modular_kernel.compatibility.rules import judge
from modular_kernel.compatibility.support import (
    ExpertsRequirements,
    PlannedPart,
    PrepareFinalizeRequirements,
    Verdict,
    Verdicts,
)
from modular_kernel.contracts import (
    PermuteExpertsUnpermute,
    PrepareAndFinalize,
    TopKWeightAndReduce,
)
from modular_kernel.errors import (
    BrokenPartError,
    ConfigurationError,
    DuplicatePartError,
    IncompatibleError,
    UnknownPartError,
)
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.machine import current_machine
from modular_kernel.runner import unused_registrations
from modular_kernel.settings import read_settings
from modular_kernel.spec.problem import Machine, Problem, Reduce
from modular_kernel.text import printable
from modular_kernel.utils.argument_checks import check_fields, expect
from modular_kernel.utils.optional_imports import (
    OWN_PACKAGES,
    describe_error,
    load_with_deadline,
    require_own_package,
    shadow_of,
)
from modular_kernel.utils.package_probes import PackageProbe

GROUP = "modular_kernel.parts"
PLANNED_GROUP = "modular_kernel.planned"
Kind = Literal["prepare_finalize", "experts", "topk_reduce"]
_BASES: dict[Kind, type] = {
    "prepare_finalize": PrepareAndFinalize,
    "experts": PermuteExpertsUnpermute,
    "topk_reduce": TopKWeightAndReduce,
}
_REQUIREMENTS: dict[Kind, type] = {
    "prepare_finalize": PrepareFinalizeRequirements,
    "experts": ExpertsRequirements,
}
_MAX_ORIGIN_CHARS = 200
P = TypeVar("P")


@dataclass(frozen=True)
class Offer:
    """An entry point that is not imported yet.

    origin: its distribution and its value. load: imports and returns the object that it names.
    is_builtin: True for this distribution's own entry points, whose import needs no deadline.
    """

    name: str
    origin: str
    load: Callable[[], object]
    is_builtin: bool = False


@dataclass(frozen=True)
class Part:
    """A part class. origin: the entry point that provides it."""

    name: str
    kind: Kind
    cls: type
    origin: str


@dataclass(frozen=True)
class Broken:
    """An entry point, or a class that it names, that cannot be used. error: the reason."""

    name: str
    origin: str
    error: str


@dataclass(frozen=True)
class Catalog:
    """All usable parts, all failures, and the parts that are planned but not implemented."""

    parts: tuple[Part, ...]
    broken: tuple[Broken, ...] = ()
    planned: tuple[PlannedPart, ...] = ()

    def names(self, kind: Kind) -> tuple[str, ...]:
        """Return the unambiguous part names of one kind, in discovery order.

        A name claimed by several classes is left out. Raises ConfigurationError if no entry point
        provides parts.
        """
        self.require_parts()
        names = [part.name for part in self.parts if part.kind == kind]
        return tuple(name for name in dict.fromkeys(names) if names.count(name) == 1)

    def duplicates(self) -> dict[str, tuple[str, ...]]:
        """Return name -> origins for every name that more than one class claims."""
        claims: dict[str, list[str]] = {}
        for part in self.parts:
            claims.setdefault(part.name, []).append(part.origin)
        return {name: tuple(origins) for name, origins in claims.items() if len(origins) > 1}

    def require_parts(self) -> None:
        """Raise ConfigurationError, with installation advice, if no entry point provides parts."""
        if not self.parts and not self.broken:
            need = (
                "an installed package that provides parts through entry points; in a checkout, run "
                "`pip install -e .` or `python setup.py egg_info`"
            )
            raise ConfigurationError("parts", got=f"no entry point of {GROUP}", need=need)

    def require_pairs(self) -> None:
        """Raise BrokenPartError if no usable part of a kind is left because parts are broken.

        The error lists every failure.
        """
        self.require_parts()
        kinds: tuple[Kind, ...] = ("prepare_finalize", "experts")
        if self.broken and not all(self.names(kind) for kind in kinds):
            raise BrokenPartError("parts", got=self._describe_failures(), need="parts to pair")

    def _describe_failures(self) -> str:
        return "; ".join(f"{b.name} from {b.origin}: {b.error}" for b in self.broken)

    def prepare_finalize(self, part: str | type[PrepareAndFinalize]) -> type[PrepareAndFinalize]:
        """Return the PrepareAndFinalize with this name; a class is returned unchanged."""
        return self._get("prepare_finalize", part)

    def experts(self, part: str | type[PermuteExpertsUnpermute]) -> type[PermuteExpertsUnpermute]:
        """Return the experts part with this name; a class is returned unchanged."""
        return self._get("experts", part)

    def _get(self, kind: Kind, name_or_class: str | type[P]) -> type[P]:
        if isinstance(name_or_class, type):
            if not issubclass(name_or_class, _BASES[kind]):
                need = f"a subclass of {_BASES[kind].__name__}"
                raise ConfigurationError(f"{kind} part", got=name_or_class.__name__, need=need)
            return name_or_class
        expect(f"{kind} part", name_or_class, str | type)
        matches = [part for part in self.parts if part.kind == kind and part.name == name_or_class]
        if len(matches) == 1:
            return matches[0].cls
        if matches:
            origins = " and ".join(part.origin for part in matches)
            raise DuplicatePartError(f"part {name_or_class!r}", got=origins, need="one origin")
        failures = [b for b in self.broken if name_or_class in (b.name, b.origin)]
        if failures:
            raise BrokenPartError(
                f"part {name_or_class!r}", got=failures[0].error, need="a part that can be imported"
            )
        planned_part = next((entry for entry in self.planned if entry.name == name_or_class), None)
        if planned_part is not None:
            need = f"an available part; this one is planned: {planned_part.blocked_on}"
            raise UnknownPartError(f"{kind} part", got=repr(name_or_class), need=need)
        names = self.names(kind)
        nearest = difflib.get_close_matches(name_or_class, names, n=3, cutoff=0.4)
        need = (
            f"one of {', '.join(names)}" if names else "a part, but none is usable on this machine"
        )
        if nearest:
            need = f"{need} (did you mean {nearest[0]}?)"
        if any(part.name == name_or_class for part in self.parts):
            need = f"{need}; {name_or_class} is a part of another kind"
        if self.broken:
            need = f"{need}. Not usable: {self._describe_failures()}"
        raise UnknownPartError(f"{kind} part", got=repr(name_or_class), need=need)


def build_catalog(offers: Iterable[Offer]) -> Catalog:
    """Load every offer. A failing offer or class becomes a Broken entry; the others still load."""
    parts: list[Part] = []
    broken: list[Broken] = []
    for offer in offers:
        # A third-party package can fail in any way on import; that must not affect the others.
        try:
            classes = _check_classes(_load_offer(offer))
        except (Exception, SystemExit) as error:  # noqa: BLE001
            broken.append(Broken(offer.name, offer.origin, describe_error(error)))
            continue
        for cls in classes:
            try:
                parts.append(_make_part(cls, offer))
            except Exception as error:  # noqa: BLE001  reading a declaration may run code
                broken.append(
                    Broken(_class_name(cls) or offer.name, offer.origin, describe_error(error))
                )
    return Catalog(tuple(parts), tuple(broken))


def _load_offer(offer: Offer) -> object:
    if offer.is_builtin:
        return offer.load()
    return load_with_deadline(offer.load, read_settings().import_deadline_s, offer.origin)


def _check_classes(value: object) -> tuple[type, ...]:
    if not isinstance(value, tuple) or not all(isinstance(cls, type) for cls in value):
        raise ConfigurationError("entry point", got=repr(value)[:200], need="a tuple of classes")
    return value


def _class_name(cls: type) -> str:
    """Return a class's name, which its metaclass cannot override; "" if it is no identifier."""
    name = type.__dict__["__name__"].__get__(cls)
    return name if name.isidentifier() else ""


def _make_part(cls: type, offer: Offer) -> Part:
    """Build the Part for a class.

    Raises ConfigurationError if the class lacks the declaration its kind requires.
    """
    name = _class_name(cls)
    if not name:
        raise ConfigurationError("part", got=repr(cls)[:200], need="a name that is an identifier")
    kind = next((kind for kind, base in _BASES.items() if issubclass(cls, base)), None)
    if kind is None:
        need = " or ".join(base.__name__ for base in _BASES.values())
        raise ConfigurationError(f"part {name}", got="no known base class", need=need)
    if kind == "topk_reduce":
        expect(f"{name}.kind", getattr(cls, "kind", "nothing"), Reduce | None)
    else:
        declared = getattr(cls, "requires", None)
        expect(f"{name}.requires", declared, _REQUIREMENTS[kind])
        check_fields(declared, f"{name}.requires.")
    return Part(name, kind, cls, offer.origin)


@cache
def load_catalog() -> Catalog:
    """Return the parts of every installed package. Entry points are read once per process.

    Backend stages registered without their counterparts are listed as broken.
    """
    entries = sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value))
    # An editable and a regular install of one distribution list the same entry point twice.
    unique = {(entry.name, entry.value): entry for entry in entries}
    catalog = build_catalog(_make_offer(entry) for entry in unique.values())
    broken = (*catalog.broken, *broken_stages())
    return replace(catalog, broken=broken, planned=_load_planned())


def broken_stages() -> tuple[Broken, ...]:
    """Return the backend stages that were registered without their counterparts."""
    return tuple(Broken(r.name, r.origin, r.missing) for r in unused_registrations())


def _load_planned() -> tuple[PlannedPart, ...]:
    """Return the parts this distribution plans but does not implement, ordered by name."""
    entries = {(entry.name, entry.value): entry for entry in entry_points(group=PLANNED_GROUP)}
    packages = {package for package in OWN_PACKAGES if shadow_of(package) is None}
    own_entries = [entry for _, entry in sorted(entries.items()) if entry.module in packages]
    return tuple(
        part for entry in own_entries for part in entry.load() if isinstance(part, PlannedPart)
    )


def _make_offer(entry: EntryPoint) -> Offer:
    package, _, attribute = entry.value.partition(":")
    is_builtin = package in OWN_PACKAGES and attribute == "COMPONENTS"

    def load() -> object:
        if is_builtin:
            require_own_package(package)
        return entry.load()

    distribution = entry.dist.name if entry.dist else "unknown"
    origin = printable(f"{distribution} ({entry.value})", max_chars=_MAX_ORIGIN_CHARS)
    return Offer(printable(entry.name, max_chars=_MAX_ORIGIN_CHARS), origin, load, is_builtin)


def packages_of(catalog: Catalog) -> frozenset[str]:
    """Return every optional package that a part requires."""
    declared = [getattr(part.cls, "requires", None) for part in catalog.parts]
    return frozenset(p for requires in declared if requires for p in requires.packages)


def probes_of(catalog: Catalog) -> tuple[PackageProbe, ...]:
    """Return the probes of all parts, for packages that share their name with other packages."""
    declared = [getattr(part.cls, "requires", None) for part in catalog.parts]
    return tuple(dict.fromkeys(p for requires in declared if requires for p in requires.providers))


def this_machine(*, device: Literal["cuda", "cpu"] | None = None) -> Machine:
    """Describe this machine, including which of the parts' packages are installed."""
    catalog = load_catalog()
    return current_machine(packages_of(catalog), device=device, probes=probes_of(catalog))


def needs_triton(
    prepare_finalize: str | type[PrepareAndFinalize],
    experts: str | type[PermuteExpertsUnpermute],
) -> bool:
    """Return whether either part uses Triton kernels. Raises UnknownPartError for unknown names."""
    catalog = load_catalog()
    parts = catalog.prepare_finalize(prepare_finalize), catalog.experts(experts)
    return any(part.requires.triton for part in parts)


def check(
    prepare_finalize: str | type[PrepareAndFinalize],
    experts: str | type[PermuteExpertsUnpermute],
    problem: Problem,
    machine: Machine | None = None,
) -> Verdict:
    """Judge one pair of parts, given as names or classes. machine: None means this machine.

    >>> problem = Problem(tokens=64, hidden=256, intermediate=192, experts=4, top_k=2)
    >>> hopper = Machine("cuda", (9, 0), frozenset({"triton"}))
    >>> verdict = check("BatchedPrepareAndFinalize", "TritonExperts", problem, hopper)
    >>> verdict.ok, [rejection.rule for rejection in verdict.rejections]
    (False, ['format', 'reduce'])
    """
    catalog = load_catalog()
    pf, ex = catalog.prepare_finalize(prepare_finalize), catalog.experts(experts)
    return judge(pf, ex, problem, this_machine() if machine is None else machine)


def check_all(problem: Problem, machine: Machine | None = None) -> Verdicts:
    """Judge every PrepareAndFinalize with every experts part.

    >>> problem = Problem(tokens=64, hidden=256, intermediate=192, experts=4, top_k=2)
    >>> [verdict.pairing for verdict in check_all(problem, Machine("cpu")) if verdict.ok][0]
    'MoEPrepareAndFinalizeNoEP x TorchExperts'
    """
    catalog = load_catalog()
    machine = this_machine() if machine is None else machine
    expect("problem", problem, Problem)  # also if there are no pairs to judge
    return Verdicts(
        check(pf, ex, problem, machine)
        for pf in catalog.names("prepare_finalize")
        for ex in catalog.names("experts")
    )


def make_kernel(  # noqa: PLR0913 (the arguments of a kernel, and the group of its part)
    prepare_finalize: str | type[PrepareAndFinalize],
    experts: str | type[PermuteExpertsUnpermute],
    problem: Problem,
    *,
    group: object | None = None,
    machine: Machine | None = None,
    checked: bool = False,
    poison: bool = False,
    auto_prepare: bool | None = None,
) -> FusedMoEModularKernel:
    """Build both parts and compose them; raise IncompatibleError with every reason if refused.

    group: the process group of a multi-rank layer. Other arguments: see FusedMoEModularKernel.

    >>> problem = Problem(tokens=64, hidden=256, intermediate=192, experts=4, top_k=2)
    >>> parts = "MoEPrepareAndFinalizeNoEP", "TorchExperts"
    >>> make_kernel(*parts, problem, machine=Machine("cpu"))
    <MoEPrepareAndFinalizeNoEP x TorchExperts, T64-H256-I192-E4-K2-bfloat16 on cpu>
    """
    expect("checked", checked, bool)
    expect("poison", poison, bool)
    process_status.log_once(process_status.states_without_replay())
    machine = this_machine() if machine is None else machine
    verdict = check(prepare_finalize, experts, problem, machine)
    if not verdict.ok:  # before a constructor touches a vendor library
        raise IncompatibleError(verdict.pairing, verdict.rejections)
    catalog = load_catalog()
    pf_part = catalog.prepare_finalize(prepare_finalize)(problem, group)
    experts_part = catalog.experts(experts)(problem)
    return FusedMoEModularKernel(
        pf_part,
        experts_part,
        machine=machine,
        checked=checked,
        poison=poison,
        auto_prepare=auto_prepare,
    )
