"""Fuzz target: entry points of packages that raise, return junk, or provide invalid parts.

A part is an exchange or experts class, which packages provide through the entry-point group of
`modular_kernel.catalog`. A broken package must not make the parts of other packages unusable.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from hypothesis import strategies as st

from modular_kernel.catalog import PartSource, build_catalog, load_catalog
from modular_kernel.compatibility.rules import judge, judge_part
from modular_kernel.machine import current_machine
from modular_kernel.spec.problem import Problem
from modular_kernel.testing.stress.fuzz.junk import junk, shorten
from modular_kernel.testing.stress.fuzz.outcome import (
    CORRECT,
    INVALID_ACCEPTED,
    WRONG_RESULT,
    FuzzOutcome,
    run_or_classify,
)
from modular_kernel.testing.stress.fuzz.random_problems import problem_fields
from modular_kernel.testing.stress.fuzz.target import Target

_ERROR_FACTORIES: tuple[Callable[[], BaseException], ...] = (
    lambda: ModuleNotFoundError("No module named 'moon'"),
    lambda: SyntaxError("invalid syntax"),
    lambda: SystemExit(3),
    lambda: KeyboardInterrupt(),
    lambda: RecursionError("deep"),
    lambda: ValueError("\x1b[2J"),
    lambda: GeneratorExit(),
)
_VALID_PARTS = ("MoEPrepareAndFinalizeNoEP", "BatchedPrepareAndFinalize", "TorchExperts")


@dataclass(frozen=True)
class BrokenPackage:
    """A package whose entry point raises an error or provides junk.

    Attributes:
        kind: what is wrong with the package.
        value: junk, or an index in _ERROR_FACTORIES.
        role: "experts" or "prepare_finalize".
        field: the field of the part's requirements that is junk.
    """

    kind: str
    value: Any
    role: str
    field: str


@st.composite
def _broken_packages(draw: st.DrawFn) -> BrokenPackage:
    kind = draw(st.sampled_from(("raises", "offers", "requires", "field", "extra_rejections")))
    role = draw(st.sampled_from(sorted(_BASE_PARTS)))
    names = sorted(field.name for field in fields(_load_base_part(role).requires))
    value = st.integers(0, len(_ERROR_FACTORIES) - 1) if kind == "raises" else junk
    if kind == "offers":
        value = draw(junk)
        value = st.sampled_from((value, (value,), [value]))
    return BrokenPackage(kind, draw(value), role, draw(st.sampled_from(names)))


@dataclass(frozen=True)
class PackagesCase:
    """Broken packages, the position of a valid package among them, and a problem to check."""

    broken: list[BrokenPackage]
    index: int
    fields: dict[str, Any]


def check_entry_points(case: PackagesCase) -> FuzzOutcome:
    """Load up to four broken packages together with a valid one.

    The parts of the valid package must be in the catalog. Each broken package must either be listed
    as broken, or checks of its parts must not raise an error.
    """
    catalog_of_valid_parts = load_catalog()
    broken_sources = [_make_source(package, index) for index, package in enumerate(case.broken)]
    sources = [source for source, _, _ in broken_sources]
    descriptions = ", ".join(description for _, description, _ in broken_sources)
    parts = tuple(part.cls for part in catalog_of_valid_parts.parts if part.name in _VALID_PARTS)
    index = case.index % (len(sources) + 1)
    sources.insert(index, PartSource("good", "good (good:PARTS)", lambda: parts))

    def call() -> str:
        catalog = build_catalog(sources)
        names = [part.name for part in catalog.parts]
        if not set(_VALID_PARTS) <= set(names):
            return f"only {names}"
        unusable = {name for _, _, broken in broken_sources for name in broken}
        if unusable & set(names):
            return f"usable: {sorted(unusable & set(names))}"
        if any(not text.isprintable() for b in catalog.broken for text in (b.name, b.error)):
            return "a text that is not printable"
        return _find_verdict_defect(catalog, case.fields)

    mismatch = run_or_classify(descriptions, call)
    if isinstance(mismatch, FuzzOutcome):
        return mismatch
    if mismatch.startswith("usable"):
        return FuzzOutcome(INVALID_ACCEPTED, f"{descriptions}: {mismatch}")
    if mismatch:
        return FuzzOutcome(WRONG_RESULT, f"{descriptions}: {mismatch}")
    return FuzzOutcome(CORRECT, descriptions)


def _find_verdict_defect(catalog: Any, problem_fields: dict[str, Any]) -> str:
    """Check all pairings, which must not raise an error; describe a defect of a verdict, or ""."""
    problem, machine = Problem(**problem_fields), current_machine()
    for part in catalog.parts:
        judge_part(part.name, part.cls.requires, machine)
    for pf in catalog.names("prepare_finalize"):
        for experts in catalog.names("experts"):
            parts = catalog.prepare_finalize(pf), catalog.experts(experts)
            verdict = judge(*parts, problem, machine)
            if not str(verdict).isprintable() and not all(
                str(rejection).isprintable() for rejection in verdict.rejections
            ):
                return f"a reason that is not printable, of {pf} x {experts}"
    return ""


_BASE_PARTS = {"experts": "TorchExperts", "prepare_finalize": "MoEPrepareAndFinalizeNoEP"}


def _load_base_part(role: str) -> Any:
    catalog = load_catalog()
    return getattr(catalog, role)(_BASE_PARTS[role])


def _make_source(package: BrokenPackage, index: int) -> tuple[PartSource, str, tuple[str, ...]]:
    """Make an entry point; return it, its description, and names of parts that must be unusable."""
    kind, value = package.kind, package.value
    name = f"theirs{index}"
    origin = f"{name} ({name}:PARTS)"
    if kind == "raises":
        make_error = _ERROR_FACTORIES[value]

        def load() -> object:
            raise make_error()

        return PartSource(name, origin, load), f"raises {shorten(make_error())}", ()
    if kind == "offers":
        return PartSource(name, origin, lambda: value), f"offers {shorten(value)}", ()
    base_part, class_name = _load_base_part(package.role), f"Theirs{index}"
    if kind == "requires":  # all requirements are replaced by junk
        part = type(class_name, (base_part,), {"requires": value})
        return (
            PartSource(name, origin, lambda: (part,)),
            f"requires={shorten(value)}",
            (class_name,),
        )
    if kind == "field":
        requires = run_or_classify(
            "", lambda: replace(base_part.requires, **{package.field: value})
        )
        part = type(class_name, (base_part,), {"requires": requires})
        description = f"requires.{package.field}={shorten(value)}"
        return PartSource(name, origin, lambda: (part,)), description, ()
    part = type(class_name, (base_part,), {"extra_rejections": classmethod(lambda *_: value)})
    return PartSource(name, origin, lambda: (part,)), f"extra_rejections gives {shorten(value)}", ()


_CASES = st.builds(
    PackagesCase,
    broken=st.lists(_broken_packages(), min_size=1, max_size=4),
    index=st.integers(0, 4),
    fields=problem_fields(),
)
TARGETS: tuple[Target[Any], ...] = (Target("entry_points", 1, _CASES, check_entry_points),)
