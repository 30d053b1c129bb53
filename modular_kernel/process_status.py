"""What this process runs with that changes what a user gets: each a word, and why.

`mk doctor` and `mk profile` show every state; the log (modular_kernel.process_status) has those
that have a reason once, as a warning where something does not hold that was asked for or can be
expected.
"""

import logging
from dataclasses import dataclass

import torch

from modular_kernel.machine import importable, interpreted_since_import
from modular_kernel.settings import c_compiler, read_settings, unknown_variables
from modular_kernel.text import printable
from modular_kernel.utils.optional_imports import OWN_PACKAGES, shadow_of

_LOG = logging.getLogger("modular_kernel.process_status")
_TOLD: set["State"] = set()


@dataclass(frozen=True)
class State:
    """One state. word: what holds. why: the reason where that is not the best there is, or "".

    loud: whether a user must hear of it unasked.
    """

    name: str
    word: str
    why: str = ""
    loud: bool = False

    def __str__(self) -> str:
        return f"{self.word}: {self.why}" if self.why else self.word


def replay() -> State:
    """Say whether plans replay their launches here: "on" or "off"."""
    from modular_kernel.replay.launch.launch import why_not_replayed  # noqa: PLC0415  imports triton

    why = why_not_replayed()
    return State("replay", "off", printable(why), _on_gpu()) if why else State("replay", "on")


def interpreter() -> State:
    """Say whether Triton's kernels are interpreted on the CPU: "on" or "off"."""
    asked, imported = read_settings().triton_interpret, interpreted_since_import()
    missing = sorted({"triton", "ml_dtypes"} - importable(("triton", "ml_dtypes")))
    why = ""
    if asked and missing:
        why = f"{' and '.join(missing)} cannot be imported"
    elif asked and imported is False:
        why = "TRITON_INTERPRET was set after triton was imported: set it before"
    elif not asked and imported:
        why = "TRITON_INTERPRET was unset after triton was imported: kernels are still interpreted"
        return State("interpreter", "on", why, loud=True)
    if asked:
        return State("interpreter", "off", why, loud=True) if why else State("interpreter", "on")
    if _on_gpu():
        return State("interpreter", "off")
    return State("interpreter", "off", "TRITON_INTERPRET is not set: Triton parts need a GPU then")


def packages() -> State:
    """Say whether the parts that ship are those that are imported: "ours" or "shadowed"."""
    found = {package: shadow_of(package) for package in OWN_PACKAGES}
    why = ", ".join(f"{package} by {path}" for package, path in found.items() if path is not None)
    return State("packages", "shadowed", printable(why), loud=True) if why else _OURS


def compiler() -> State:
    """Say whether there is a C compiler, "found" or "missing".

    Triton builds launchers with it.
    """
    if c_compiler() is not None:
        return State("C compiler", "found")
    why = "neither CC, nor gcc, nor clang: triton builds no launchers, and plans replay none"
    return State("C compiler", "missing", why, loud=_on_gpu())


def caches() -> State:
    """Say whether what is measured and compiled is kept: "kept" or "off"."""
    if read_settings().cache_dir is not None:
        return State("caches", "kept")
    return State("caches", "off", "there is no home folder; set MK_CACHE_DIR")


def variables() -> State:
    """Say whether every MK_ variable of the environment means something: "known" or "unknown"."""
    found = unknown_variables()
    if not found:
        return State("variables", "known")
    why = ", ".join(f"{v} (did you mean {near}?)" if near else v for v, near in found.items())
    return State("variables", "unknown", printable(why, most=500), loud=True)


def states() -> tuple[State, ...]:
    """Return every state of this process. Where replay is possible, cuda_replay.c is compiled."""
    return replay(), *without_compiling()


def without_compiling() -> tuple[State, ...]:
    """Return every state but that of replay, which is said when a plan first records a launch."""
    return interpreter(), packages(), compiler(), caches(), variables()


def tell(found: tuple[State, ...]) -> None:
    """Log each state that has a reason: once in a process."""
    for state in found:
        if state.why and state not in _TOLD:
            _TOLD.add(state)
            level = logging.WARNING if state.loud else logging.INFO
            _LOG.log(level, "%s %s", state.name, state)


def _on_gpu() -> bool:
    return torch.cuda.is_available()


_OURS = State("packages", "ours")
