"""Finds parts through entry points and resolves them by name.

A package offers parts in the entry-point group "modular_kernel.parts": each entry point names a
tuple of classes. The built-in parts come in the same way. Reading the entry points is a thin
impure shell (`load_catalog`); everything else is pure.
"""

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Literal, TypeVar

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
from modular_kernel.fields import expect
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.machine import current_machine
from modular_kernel.rules import judge
from modular_kernel.support import Verdict
from modular_kernel.types import Machine, Problem

GROUP = "modular_kernel.parts"
Kind = Literal["prepare_finalize", "experts", "topk_reduce"]
_BASES: dict[Kind, type] = {
    "prepare_finalize": PrepareAndFinalize,
    "experts": PermuteExpertsUnpermute,
    "topk_reduce": TopKWeightAndReduce,
}
P = TypeVar("P")


@dataclass(frozen=True)
class Offer:
    """One entry point, not yet imported: its name, where it comes from, and how to load it."""

    name: str
    origin: str
    load: Callable[[], object]


@dataclass(frozen=True)
class Part:
    """One class and the entry point it came from."""

    name: str
    kind: Kind
    cls: type
    origin: str


@dataclass(frozen=True)
class Broken:
    """An entry point that could not be used, and why."""

    name: str
    origin: str
    error: str


@dataclass(frozen=True)
class Catalog:
    """Every part found, and every entry point that failed."""

    parts: tuple[Part, ...]
    broken: tuple[Broken, ...] = ()

    def names(self, kind: Kind) -> tuple[str, ...]:
        """Names of one kind that stand for exactly one class, in the order found."""
        names = [part.name for part in self.parts if part.kind == kind]
        return tuple(name for name in dict.fromkeys(names) if names.count(name) == 1)

    def duplicates(self) -> dict[str, tuple[str, ...]]:
        """Name -> origins, for names that more than one class claims."""
        claims: dict[str, list[str]] = {}
        for part in self.parts:
            claims.setdefault(part.name, []).append(part.origin)
        return {name: tuple(origins) for name, origins in claims.items() if len(origins) > 1}

    def prepare_finalize(self, part: str | type[PrepareAndFinalize]) -> type[PrepareAndFinalize]:
        """The class of that name; a class is passed through."""
        return self._get("prepare_finalize", part)

    def experts(self, part: str | type[PermuteExpertsUnpermute]) -> type[PermuteExpertsUnpermute]:
        """The class of that name; a class is passed through."""
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
        names = self.names(kind)
        nearest = difflib.get_close_matches(wanted, names, n=3, cutoff=0.4)
        hint = f"one of {', '.join(names)}"
        if nearest:
            hint = f"did you mean {nearest[0]}? One of {', '.join(names)}"
        raise UnknownPartError(f"{kind} part", got=repr(wanted), need=hint)


def build_catalog(offers: Iterable[Offer]) -> Catalog:
    """Load every offer; one that fails is kept as Broken and harms no other."""
    parts: list[Part] = []
    broken: list[Broken] = []
    for offer in offers:
        try:
            parts += [_part(cls, offer) for cls in _classes(offer.load())]
        # A foreign package can fail in any way at import; none of them may be fatal to others.
        except (Exception, SystemExit) as error:  # noqa: BLE001
            broken.append(Broken(offer.name, offer.origin, f"{type(error).__name__}: {error}"))
    return Catalog(tuple(parts), tuple(broken))


def _classes(loaded: object) -> tuple[type, ...]:
    if not isinstance(loaded, tuple) or not all(isinstance(cls, type) for cls in loaded):
        raise ConfigurationError("entry point", got=repr(loaded), need="a tuple of classes")
    return loaded


def _part(cls: type, offer: Offer) -> Part:
    for kind, base in _BASES.items():
        if issubclass(cls, base):
            return Part(cls.__name__, kind, cls, offer.origin)
    need = " or ".join(base.__name__ for base in _BASES.values())
    raise ConfigurationError(f"part {cls.__name__}", got="no known base class", need=need)


@cache
def load_catalog() -> Catalog:
    """The parts of every installed package, read once per process."""
    found = sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value))
    # An editable and a built copy of one distribution list the same entry point twice.
    unique = {(entry.name, entry.value): entry for entry in found}
    return build_catalog(
        Offer(e.name, f"{e.dist.name if e.dist else 'unknown'} ({e.value})", e.load)
        for e in unique.values()
    )


def packages_of(catalog: Catalog) -> frozenset[str]:
    """Every optional package that some part requires."""
    declared = [getattr(part.cls, "requires", None) for part in catalog.parts]
    return frozenset(p for requires in declared if requires for p in requires.packages)


def this_machine(*, device: Literal["cuda", "cpu"] | None = None) -> Machine:
    """This machine, with every package that some part asks for looked up."""
    return current_machine(packages_of(load_catalog()), device=device)


def check(
    prepare_finalize: str | type[PrepareAndFinalize],
    experts: str | type[PermuteExpertsUnpermute],
    problem: Problem,
    machine: Machine | None = None,
) -> Verdict:
    """Judge a pairing by names or classes. machine: None means this one."""
    catalog = load_catalog()
    pf, ex = catalog.prepare_finalize(prepare_finalize), catalog.experts(experts)
    return judge(pf, ex, problem, this_machine() if machine is None else machine)


def check_all(problem: Problem, machine: Machine | None = None) -> tuple[Verdict, ...]:
    """Judge every PrepareAndFinalize with every experts part."""
    catalog = load_catalog()
    machine = this_machine() if machine is None else machine
    expect("problem", problem, Problem)  # where there is no part to judge it with, too
    return tuple(
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
    """
    expect("checked", checked, bool)
    expect("poison", poison, bool)
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
