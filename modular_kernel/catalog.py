"""Catalog of parts: discovery through entry points, and lookup by name.

A package provides parts in the entry-point group "modular_kernel.parts". Each entry point names a
tuple of classes. Built-in parts are registered in the same way. `load_catalog` imports the entry
points of all installed packages.
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
from modular_kernel.runner import find_unused_registrations
from modular_kernel.settings import read_settings
from modular_kernel.spec.problem import Machine, Problem, Reduce
from modular_kernel.text import escape_nonprintable
from modular_kernel.utils.argument_checks import check_fields, expect
from modular_kernel.utils.optional_imports import (
    DISTRIBUTION_PACKAGES,
    check_not_shadowed,
    describe_error,
    find_shadow,
    load_with_timeout,
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
class PartSource:
    """An entry point whose object has not been imported yet.

    name: name of the entry point.
    origin: its distribution and its value.
    load: imports and returns the object that the entry point names.
    is_builtin: whether it belongs to this distribution. The import of built-in parts has no
        timeout.
    """

    name: str
    origin: str
    load: Callable[[], object]
    is_builtin: bool = False


@dataclass(frozen=True)
class Part:
    """A part class. `origin` describes the entry point that provides it."""

    name: str
    kind: Kind
    cls: type
    origin: str


@dataclass(frozen=True)
class BrokenEntry:
    """An entry point, or one of its classes, that cannot be used. `error` says why."""

    name: str
    origin: str
    error: str


@dataclass(frozen=True)
class Catalog:
    """All usable parts, all failures, and the parts that are planned but not implemented."""

    parts: tuple[Part, ...]
    broken: tuple[BrokenEntry, ...] = ()
    planned: tuple[PlannedPart, ...] = ()

    def names(self, kind: Kind) -> tuple[str, ...]:
        """Return the names of parts of one kind, in discovery order.

        Names that several classes share are omitted. Raises ConfigurationError if no entry point
        provides parts.
        """
        self.require_parts()
        names = [part.name for part in self.parts if part.kind == kind]
        return tuple(name for name in dict.fromkeys(names) if names.count(name) == 1)

    def duplicates(self) -> dict[str, tuple[str, ...]]:
        """Return the names that several classes share, with the origins of the classes."""
        origins_by_name: dict[str, list[str]] = {}
        for part in self.parts:
            origins_by_name.setdefault(part.name, []).append(part.origin)
        return {
            name: tuple(origins) for name, origins in origins_by_name.items() if len(origins) > 1
        }

    def require_parts(self) -> None:
        """Raise ConfigurationError, with installation advice, if no entry point provides parts."""
        if not self.parts and not self.broken:
            need = (
                "an installed package that provides parts through entry points; in a checkout, run "
                "`pip install -e .` or `python setup.py egg_info`"
            )
            raise ConfigurationError("parts", got=f"no entry point of {GROUP}", need=need)

    def require_pairs(self) -> None:
        """Raise BrokenPartError, with every failure, if no part of a kind can be used."""
        self.require_parts()
        kinds: tuple[Kind, ...] = ("prepare_finalize", "experts")
        if self.broken and not all(self.names(kind) for kind in kinds):
            need = "at least one usable part of each kind"
            raise BrokenPartError("parts", got=self._describe_failures(), need=need)

    def _describe_failures(self) -> str:
        return "; ".join(f"{b.name} from {b.origin}: {b.error}" for b in self.broken)

    def prepare_finalize(self, part: str | type[PrepareAndFinalize]) -> type[PrepareAndFinalize]:
        """Return the PrepareAndFinalize class with this name. A class is returned unchanged."""
        return self._get("prepare_finalize", part)

    def experts(self, part: str | type[PermuteExpertsUnpermute]) -> type[PermuteExpertsUnpermute]:
        """Return the experts class with this name. A class is returned unchanged."""
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
            need = "a name that only one installed package provides"
            raise DuplicatePartError(f"part {name_or_class!r}", got=origins, need=need)
        failures = [b for b in self.broken if name_or_class in (b.name, b.origin)]
        if failures:
            raise BrokenPartError(
                f"part {name_or_class!r}", got=failures[0].error, need="a part that can be imported"
            )
        planned_part = next((entry for entry in self.planned if entry.name == name_or_class), None)
        if planned_part is not None:
            need = f"an available part; {name_or_class} is planned: {planned_part.blocked_on}"
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


def build_catalog(sources: Iterable[PartSource]) -> Catalog:
    """Import all sources. A source or class that fails becomes a BrokenEntry."""
    parts: list[Part] = []
    broken: list[BrokenEntry] = []
    for source in sources:
        # A third-party package can fail in any way on import, which must not affect other packages.
        try:
            classes = _check_classes(_load_source(source))
        except (Exception, SystemExit) as error:  # noqa: BLE001
            broken.append(BrokenEntry(source.name, source.origin, describe_error(error)))
            continue
        for cls in classes:
            try:
                parts.append(_make_part(cls, source))
            except Exception as error:  # noqa: BLE001  reading a declaration may run code
                name = _get_class_name(cls) or source.name
                broken.append(BrokenEntry(name, source.origin, describe_error(error)))
    return Catalog(tuple(parts), tuple(broken))


def _load_source(source: PartSource) -> object:
    if source.is_builtin:
        return source.load()
    return load_with_timeout(source.load, read_settings().import_timeout_s, source.origin)


def _check_classes(value: object) -> tuple[type, ...]:
    if not isinstance(value, tuple) or not all(isinstance(cls, type) for cls in value):
        raise ConfigurationError("entry point", got=repr(value)[:200], need="a tuple of classes")
    return value


def _get_class_name(cls: type) -> str:
    """Return the name of a class, or "" if the name is not an identifier."""
    name = type.__dict__["__name__"].__get__(cls)  # a metaclass may override cls.__name__
    return name if name.isidentifier() else ""


def _make_part(cls: type, source: PartSource) -> Part:
    """Return the Part for a class. Raises ConfigurationError for an invalid class."""
    name = _get_class_name(cls)
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
    return Part(name, kind, cls, source.origin)


@cache
def load_catalog() -> Catalog:
    """Return the parts of all installed packages. Entry points are read once per process.

    Stages of a MoE runner backend that lack another stage are listed as broken.
    """
    entries = sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value))
    # An editable and a regular install of one distribution list the same entry point twice.
    unique = {(entry.name, entry.value): entry for entry in entries}
    catalog = build_catalog(_make_source(entry) for entry in unique.values())
    broken = (*catalog.broken, *list_broken_stages())
    return replace(catalog, broken=broken, planned=_load_planned())


def list_broken_stages() -> tuple[BrokenEntry, ...]:
    """Return the registered stages of MoE runner backends that lack another stage."""
    return tuple(BrokenEntry(r.name, r.origin, r.missing) for r in find_unused_registrations())


def _load_planned() -> tuple[PlannedPart, ...]:
    """Return the parts that this distribution plans but does not implement, ordered by name."""
    entries = {(entry.name, entry.value): entry for entry in entry_points(group=PLANNED_GROUP)}
    packages = {package for package in DISTRIBUTION_PACKAGES if find_shadow(package) is None}
    builtin_entries = [entry for _, entry in sorted(entries.items()) if entry.module in packages]
    return tuple(
        part for entry in builtin_entries for part in entry.load() if isinstance(part, PlannedPart)
    )


def _make_source(entry: EntryPoint) -> PartSource:
    package, _, attribute = entry.value.partition(":")
    is_builtin = package in DISTRIBUTION_PACKAGES and attribute == "COMPONENTS"

    def load() -> object:
        if is_builtin:
            check_not_shadowed(package)
        return entry.load()

    distribution = entry.dist.name if entry.dist else "unknown"
    origin = escape_nonprintable(f"{distribution} ({entry.value})", max_chars=_MAX_ORIGIN_CHARS)
    return PartSource(
        escape_nonprintable(entry.name, max_chars=_MAX_ORIGIN_CHARS), origin, load, is_builtin
    )


def collect_packages(catalog: Catalog) -> frozenset[str]:
    """Return the optional packages that parts require or exclude."""
    requirements = [getattr(part.cls, "requires", None) for part in catalog.parts]
    return frozenset(
        package for requires in requirements if requires for package in requires.inspected_packages
    )


def collect_probes(catalog: Catalog) -> tuple[PackageProbe, ...]:
    """Return the probes of all parts, for packages that share their name with other packages."""
    requirements = [getattr(part.cls, "requires", None) for part in catalog.parts]
    return tuple(
        dict.fromkeys(
            package for requires in requirements if requires for package in requires.providers
        )
    )


def this_machine(*, device: Literal["cuda", "cpu"] | None = None) -> Machine:
    """Return this machine, with the installed packages that parts require.

    device: "cpu" returns this machine without its GPU. None prefers the GPU.
    """
    catalog = load_catalog()
    packages, probes = collect_packages(catalog), collect_probes(catalog)
    return current_machine(packages, device=device, probes=probes)


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
    """Return whether a pair of parts supports a problem on a machine, and if not, why.

    prepare_finalize, experts: names or classes of the parts.
    machine: None means this machine.

    >>> problem = Problem(tokens=64, hidden=256, intermediate=192, experts=4, top_k=2)
    >>> hopper = Machine("cuda", (9, 0), frozenset({"triton"}))
    >>> verdict = check("BatchedPrepareAndFinalize", "TritonExperts", problem, hopper)
    >>> verdict.ok, [rejection.rule for rejection in verdict.rejections]
    (False, ['format', 'reduce'])
    """
    catalog = load_catalog()
    parts = catalog.prepare_finalize(prepare_finalize), catalog.experts(experts)
    return judge(*parts, problem, this_machine() if machine is None else machine)


def check_all(problem: Problem, machine: Machine | None = None) -> Verdicts:
    """Return the verdict of `check` for every PrepareAndFinalize with every experts part.

    >>> problem = Problem(tokens=64, hidden=256, intermediate=192, experts=4, top_k=2)
    >>> [verdict.pairing for verdict in check_all(problem, Machine("cpu")) if verdict.ok][0]
    'MoEPrepareAndFinalizeNoEP x TorchExperts'
    """
    catalog = load_catalog()
    machine = this_machine() if machine is None else machine
    expect("problem", problem, Problem)  # `check` is not called if there are no pairs
    return Verdicts(
        check(prepare_finalize, experts, problem, machine)
        for prepare_finalize in catalog.names("prepare_finalize")
        for experts in catalog.names("experts")
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
    """Construct two parts and compose them into a kernel.

    prepare_finalize, experts: names or classes of the parts.
    group: process group of a multi-rank layer.
    machine: None means this machine.

    FusedMoEModularKernel describes the other arguments.

    Raises IncompatibleError, with every reason, if the parts do not support the problem.

    >>> problem = Problem(tokens=64, hidden=256, intermediate=192, experts=4, top_k=2)
    >>> parts = "MoEPrepareAndFinalizeNoEP", "TorchExperts"
    >>> make_kernel(*parts, problem, machine=Machine("cpu"))
    <MoEPrepareAndFinalizeNoEP x TorchExperts, T64-H256-I192-E4-K2-bfloat16 on cpu>
    """
    expect("checked", checked, bool)
    expect("poison", poison, bool)
    process_status.log_once(process_status.get_states_without_replay())
    machine = this_machine() if machine is None else machine
    verdict = check(prepare_finalize, experts, problem, machine)
    if not verdict.ok:  # raise before a constructor imports a vendor library
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
