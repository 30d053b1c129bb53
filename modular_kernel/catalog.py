"""Finds parts through entry points and resolves them by name.

A package offers parts in the entry-point group "modular_kernel.parts": each entry point names a
tuple of classes. The built-in parts come in the same way. Reading the entry points is a thin
impure shell (`load_catalog`); everything else is pure.
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
    Planned,
    PrepareFinalizeRequirements,
    Verdict,
)
from modular_kernel.compatibility.verdicts import Verdicts
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
from modular_kernel.runner import missing_halves
from modular_kernel.settings import read_settings
from modular_kernel.spec.problem import Machine, Problem, Reduce
from modular_kernel.text import printable
from modular_kernel.utils.argument_checks import check_fields, expect
from modular_kernel.utils.optional_imports import (
    OWN_PACKAGES,
    loaded_within,
    reason,
    require_own,
    shadow_of,
)
from modular_kernel.utils.package_probes import Provider

GROUP = "modular_kernel.parts"
PLANNED_GROUP = "modular_kernel.planned"
Kind = Literal["prepare_finalize", "experts", "topk_reduce"]
_BASES: dict[Kind, type] = {
    "prepare_finalize": PrepareAndFinalize,
    "experts": PermuteExpertsUnpermute,
    "topk_reduce": TopKWeightAndReduce,
}
_DECLARED: dict[Kind, type] = {
    "prepare_finalize": PrepareFinalizeRequirements,
    "experts": ExpertsRequirements,
}
_MOST_OF_AN_ORIGIN = 200
P = TypeVar("P")


@dataclass(frozen=True)
class Offer:
    """One entry point, not yet imported: its name, where it comes from, and how to load it.

    ours: of this distribution, so that its import needs no deadline.
    """

    name: str
    origin: str
    load: Callable[[], object]
    ours: bool = False


@dataclass(frozen=True)
class Part:
    """One class and the entry point it came from."""

    name: str
    kind: Kind
    cls: type
    origin: str


@dataclass(frozen=True)
class Broken:
    """An entry point, or one class of its parts, that could not be used, and why."""

    name: str
    origin: str
    error: str


@dataclass(frozen=True)
class Catalog:
    """Every part found, everything that failed, and what is not there yet."""

    parts: tuple[Part, ...]
    broken: tuple[Broken, ...] = ()
    planned: tuple[Planned, ...] = ()

    def names(self, kind: Kind) -> tuple[str, ...]:
        """Return the names of one kind that stand for exactly one class, in the order found.

        ConfigurationError where nothing offers parts.
        """
        self.require_parts()
        names = [part.name for part in self.parts if part.kind == kind]
        return tuple(name for name in dict.fromkeys(names) if names.count(name) == 1)

    def duplicates(self) -> dict[str, tuple[str, ...]]:
        """Name -> origins, for names that more than one class claims."""
        claims: dict[str, list[str]] = {}
        for part in self.parts:
            claims.setdefault(part.name, []).append(part.origin)
        return {name: tuple(origins) for name, origins in claims.items() if len(origins) > 1}

    def require_parts(self) -> None:
        """Raise a ConfigurationError that says what to do where nothing offers parts."""
        if not self.parts and not self.broken:
            need = (
                "an installed package that offers some: parts are found by entry points, and a "
                "checkout has them after `pip install -e .` or `python setup.py egg_info` in it"
            )
            raise ConfigurationError("parts", got=f"no entry point of {GROUP}", need=need)

    def require_pairs(self) -> None:
        """Raise a BrokenPartError with every failure where no pair can be made for them."""
        self.require_parts()
        kinds: tuple[Kind, ...] = ("prepare_finalize", "experts")
        if self.broken and not all(self.names(kind) for kind in kinds):
            raise BrokenPartError("parts", got=self._unusable(), need="parts to pair")

    def _unusable(self) -> str:
        return "; ".join(f"{b.name} from {b.origin}: {b.error}" for b in self.broken)

    def prepare_finalize(self, part: str | type[PrepareAndFinalize]) -> type[PrepareAndFinalize]:
        """Return the class of that name; a class is passed through."""
        return self._get("prepare_finalize", part)

    def experts(self, part: str | type[PermuteExpertsUnpermute]) -> type[PermuteExpertsUnpermute]:
        """Return the class of that name; a class is passed through."""
        return self._get("experts", part)

    def _get(self, kind: Kind, wanted: str | type[P]) -> type[P]:
        if isinstance(wanted, type):
            if not issubclass(wanted, _BASES[kind]):
                need = f"a subclass of {_BASES[kind].__name__}"
                raise ConfigurationError(f"{kind} part", got=wanted.__name__, need=need)
            return wanted
        expect(f"{kind} part", wanted, str | type)
        found = [part for part in self.parts if part.kind == kind and part.name == wanted]
        if len(found) == 1:
            return found[0].cls
        if found:
            origins = " and ".join(part.origin for part in found)
            raise DuplicatePartError(f"part {wanted!r}", got=origins, need="one origin")
        failed = [b for b in self.broken if wanted in (b.name, b.origin)]
        if failed:
            raise BrokenPartError(f"part {wanted!r}", got=failed[0].error, need="an import")
        meant = next((one for one in self.planned if one.name == wanted), None)
        if meant is not None:
            need = f"a part that is there; this one is planned: {meant.why}"
            raise UnknownPartError(f"{kind} part", got=repr(wanted), need=need)
        names = self.names(kind)
        nearest = difflib.get_close_matches(wanted, names, n=3, cutoff=0.4)
        hint = f"one of {', '.join(names)}" if names else "a part, and none can be used here"
        if nearest:
            hint = f"{hint} (did you mean {nearest[0]}?)"
        if any(part.name == wanted for part in self.parts):
            hint = f"{hint}; {wanted} is a part of another kind"
        if self.broken:
            hint = f"{hint}. Not usable: {self._unusable()}"
        raise UnknownPartError(f"{kind} part", got=repr(wanted), need=hint)


def build_catalog(offers: Iterable[Offer]) -> Catalog:
    """Load every offer; one that fails, or a class in it, is kept as Broken and harms no other."""
    parts: list[Part] = []
    broken: list[Broken] = []
    for offer in offers:
        # A foreign package can fail in any way at import; none of them may be fatal to others.
        try:
            classes = _classes(_loaded(offer))
        except (Exception, SystemExit) as error:  # noqa: BLE001
            broken.append(Broken(offer.name, offer.origin, reason(error)))
            continue
        for cls in classes:
            try:
                parts.append(_part(cls, offer))
            except Exception as error:  # noqa: BLE001  what they declare may be code too
                broken.append(Broken(_name(cls) or offer.name, offer.origin, reason(error)))
    return Catalog(tuple(parts), tuple(broken))


def _loaded(offer: Offer) -> object:
    if offer.ours:
        return offer.load()
    return loaded_within(offer.load, read_settings().import_deadline_s, offer.origin)


def _classes(loaded: object) -> tuple[type, ...]:
    if not isinstance(loaded, tuple) or not all(isinstance(cls, type) for cls in loaded):
        raise ConfigurationError("entry point", got=repr(loaded)[:200], need="a tuple of classes")
    return loaded


def _name(cls: type) -> str:
    """Return a class's own name, whatever its metaclass answers; "" if that is no identifier."""
    name = type.__dict__["__name__"].__get__(cls)
    return name if name.isidentifier() else ""


def _part(cls: type, offer: Offer) -> Part:
    """Return the part that a class is.

    ConfigurationError if it does not declare what its kind must.
    """
    name = _name(cls)
    if not name:
        raise ConfigurationError("part", got=repr(cls)[:200], need="an identifier for its name")
    kind = next((kind for kind, base in _BASES.items() if issubclass(cls, base)), None)
    if kind is None:
        need = " or ".join(base.__name__ for base in _BASES.values())
        raise ConfigurationError(f"part {name}", got="no known base class", need=need)
    if kind == "topk_reduce":
        expect(f"{name}.kind", getattr(cls, "kind", "nothing"), Reduce | None)
    else:
        declared = getattr(cls, "requires", None)
        expect(f"{name}.requires", declared, _DECLARED[kind])
        check_fields(declared, f"{name}.requires.")
    return Part(name, kind, cls, offer.origin)


@cache
def load_catalog() -> Catalog:
    """Return the parts of every installed package; they are read once per process.

    Stages of backends that were registered without their counterparts are among what is broken.
    """
    found = sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value))
    # An editable and a built copy of one distribution list the same entry point twice.
    unique = {(entry.name, entry.value): entry for entry in found}
    catalog = build_catalog(_offer(entry) for entry in unique.values())
    broken = (*catalog.broken, *broken_halves())
    return replace(catalog, broken=broken, planned=_planned())


def broken_halves() -> tuple[Broken, ...]:
    """Return stages of backends that were registered without what has to go with them."""
    return tuple(Broken(half.name, half.origin, half.lacks) for half in missing_halves())


def _planned() -> tuple[Planned, ...]:
    """Return what this distribution's packages name and do not have, in the order of names."""
    found = {(entry.name, entry.value): entry for entry in entry_points(group=PLANNED_GROUP)}
    packages = {package for package in OWN_PACKAGES if shadow_of(package) is None}
    ours = [entry for _, entry in sorted(found.items()) if entry.module in packages]
    return tuple(one for entry in ours for one in entry.load() if isinstance(one, Planned))


def _offer(entry: EntryPoint) -> Offer:
    package, _, rest = entry.value.partition(":")
    ours = package in OWN_PACKAGES and rest == "COMPONENTS"

    def load() -> object:
        if ours:
            require_own(package)
        return entry.load()

    distribution = entry.dist.name if entry.dist else "unknown"
    origin = printable(f"{distribution} ({entry.value})", most=_MOST_OF_AN_ORIGIN)
    return Offer(printable(entry.name, most=_MOST_OF_AN_ORIGIN), origin, load, ours)


def packages_of(catalog: Catalog) -> frozenset[str]:
    """Return every optional package that some part requires."""
    declared = [getattr(part.cls, "requires", None) for part in catalog.parts]
    return frozenset(p for requires in declared if requires for p in requires.packages)


def providers_of(catalog: Catalog) -> tuple[Provider, ...]:
    """Return how packages are told that some part requires, and whose names prove nothing."""
    declared = [getattr(part.cls, "requires", None) for part in catalog.parts]
    return tuple(dict.fromkeys(p for requires in declared if requires for p in requires.providers))


def this_machine(*, device: Literal["cuda", "cpu"] | None = None) -> Machine:
    """Describe this machine, with every package that some part asks for looked up."""
    catalog = load_catalog()
    return current_machine(packages_of(catalog), device=device, providers=providers_of(catalog))


def needs_triton(
    prepare_finalize: str | type[PrepareAndFinalize],
    experts: str | type[PermuteExpertsUnpermute],
) -> bool:
    """Return whether either part's kernels are Triton's; UnknownPartError for an unknown part."""
    catalog = load_catalog()
    parts = catalog.prepare_finalize(prepare_finalize), catalog.experts(experts)
    return any(part.requires.triton for part in parts)


def check(
    prepare_finalize: str | type[PrepareAndFinalize],
    experts: str | type[PermuteExpertsUnpermute],
    problem: Problem,
    machine: Machine | None = None,
) -> Verdict:
    """Judge a pairing by names or classes. machine: None means this one.

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
    expect("problem", problem, Problem)  # where there is no part to judge it with, too
    return Verdicts(
        check(pf, ex, problem, machine)
        for pf in catalog.names("prepare_finalize")
        for ex in catalog.names("experts")
    )


def make_kernel(
    prepare_finalize: str | type[PrepareAndFinalize],
    experts: str | type[PermuteExpertsUnpermute],
    problem: Problem,
    *,
    group: object | None = None,
    machine: Machine | None = None,
    checked: bool = False,
    poison: bool = False,
) -> FusedMoEModularKernel:
    """Build both parts and compose them; IncompatibleError with every reason if refused.

    group: the process group where ranks take part. The rest as FusedMoEModularKernel.

    >>> problem = Problem(tokens=64, hidden=256, intermediate=192, experts=4, top_k=2)
    >>> parts = "MoEPrepareAndFinalizeNoEP", "TorchExperts"
    >>> make_kernel(*parts, problem, machine=Machine("cpu"))
    <MoEPrepareAndFinalizeNoEP x TorchExperts, T64-H256-I192-E4-K2-bfloat16 on cpu>
    """
    expect("checked", checked, bool)
    expect("poison", poison, bool)
    process_status.tell(process_status.without_compiling())
    machine = this_machine() if machine is None else machine
    verdict = check(prepare_finalize, experts, problem, machine)
    if not verdict.ok:  # before a constructor may touch a vendor library
        raise IncompatibleError(verdict.pairing, verdict.rejections)
    catalog = load_catalog()
    pf_part = catalog.prepare_finalize(prepare_finalize)(problem, group)
    experts_part = catalog.experts(experts)(problem)
    return FusedMoEModularKernel(
        pf_part, experts_part, machine=machine, checked=checked, poison=poison
    )
