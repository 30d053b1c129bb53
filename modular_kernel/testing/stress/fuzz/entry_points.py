"""Third-party packages: entry points that raise, return junk, or provide invalid parts."""

from collections.abc import Callable
from dataclasses import fields, replace
from random import Random
from typing import Any

from modular_kernel.catalog import Offer, build_catalog, load_catalog
from modular_kernel.compatibility.rules import judge, unavailable
from modular_kernel.machine import current_machine
from modular_kernel.testing.stress.fuzz.outcome import (
    ACCEPTED,
    RIGHT,
    WRONG,
    FuzzOutcome,
    run_or_outcome,
)
from modular_kernel.testing.stress.fuzz.random_problems import draw_problem
from modular_kernel.testing.stress.fuzz.specs import JUNK, shorten

_RAISED: tuple[Callable[[], BaseException], ...] = (
    lambda: ModuleNotFoundError("No module named 'moon'"),
    lambda: SyntaxError("invalid syntax"),
    lambda: SystemExit(3),
    lambda: KeyboardInterrupt(),
    lambda: RecursionError("deep"),
    lambda: ValueError("\x1b[2J"),
    lambda: GeneratorExit(),
)
_GOOD = ("MoEPrepareAndFinalizeNoEP", "BatchedPrepareAndFinalize", "TorchExperts")


def entry_points(rng: Random) -> FuzzOutcome:
    """Load up to four broken packages beside a good one.

    The good one's parts must work, and each broken one must be listed as unusable or be checked
    without an error.
    """
    good = load_catalog()
    broken_offers = [_offer(rng, place) for place in range(rng.randint(1, 4))]
    offers = [offer for offer, _, _ in broken_offers]
    what = ", ".join(description for _, description, _ in broken_offers)
    parts = tuple(part.cls for part in good.parts if part.name in _GOOD)
    offers.insert(rng.randrange(len(offers) + 1), Offer("good", "good (good:PARTS)", lambda: parts))

    def call() -> str:
        catalog = build_catalog(offers)
        names = [part.name for part in catalog.parts]
        if not set(_GOOD) <= set(names):
            return f"only {names}"
        unusable = {name for _, _, broken in broken_offers for name in broken}
        if unusable & set(names):
            return f"usable: {sorted(unusable & set(names))}"
        if any(not text.isprintable() for b in catalog.broken for text in (b.name, b.error)):
            return "a text that is not printable"
        return _judged(catalog, rng)

    fault = run_or_outcome(what, call)
    if isinstance(fault, FuzzOutcome):
        return fault
    if fault.startswith("usable"):
        return FuzzOutcome(ACCEPTED, f"{what}: {fault}")
    return FuzzOutcome(WRONG, f"{what}: {fault}") if fault else FuzzOutcome(RIGHT, what)


def _judged(catalog: Any, rng: Random) -> str:
    """Check all pairings; return what is wrong with a verdict, or "". None may raise."""
    problem, machine = draw_problem(rng), current_machine()
    for part in catalog.parts:
        unavailable(part.name, part.cls.requires, machine)
    for pf in catalog.names("prepare_finalize"):
        for experts in catalog.names("experts"):
            parts = catalog.prepare_finalize(pf), catalog.experts(experts)
            verdict = judge(*parts, problem, machine)
            if not str(verdict).isprintable() and not all(
                str(rejection).isprintable() for rejection in verdict.rejections
            ):
                return f"a reason that is not printable, of {pf} x {experts}"
    return ""


def _offer(rng: Random, place: int) -> tuple[Offer, str, tuple[str, ...]]:
    """Return an entry point, its description, and the names of its parts that must be unusable."""
    kind = rng.randrange(5)
    name = f"theirs{place}"
    origin = f"{name} ({name}:PARTS)"
    if kind == 0:
        make_error = rng.choice(_RAISED)

        def load() -> object:
            raise make_error()

        return Offer(name, origin, load), f"raises {shorten(make_error())}", ()
    if kind == 1:
        junk = rng.choice(JUNK)
        offered = rng.choice((junk, (junk,), [junk]))
        return Offer(name, origin, lambda: offered), f"offers {shorten(offered)}", ()
    base = load_catalog().experts("TorchExperts")
    if rng.random() < 0.5:
        base = load_catalog().prepare_finalize("MoEPrepareAndFinalizeNoEP")  # type: ignore[assignment]
    label = f"Theirs{place}"
    if kind == 2:  # junk instead of the whole declaration
        junk = rng.choice(JUNK)
        part = type(label, (base,), {"requires": junk})
        return Offer(name, origin, lambda: (part,)), f"requires={shorten(junk)}", (label,)
    if kind == 3:
        field = rng.choice(fields(base.requires)).name
        junk = rng.choice(JUNK)
        requires = run_or_outcome("", lambda: replace(base.requires, **{field: junk}))
        part = type(label, (base,), {"requires": requires})
        return Offer(name, origin, lambda: (part,)), f"requires.{field}={shorten(junk)}", ()
    junk = rng.choice(JUNK)
    part = type(label, (base,), {"extra_rejections": classmethod(lambda *_: junk)})
    return Offer(name, origin, lambda: (part,)), f"extra_rejections gives {shorten(junk)}", ()
