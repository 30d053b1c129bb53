"""Status of process-wide settings that affect users, each with a reason.

`mk doctor` and `mk profile` show all of them. A status with a reason is also logged once (logger
modular_kernel.process_status), as a warning if something requested or expected is not the case.
"""

import logging
from dataclasses import dataclass

import torch

from modular_kernel.machine import importable, interpreted_since_import
from modular_kernel.settings import c_compiler, read_settings, unknown_variables
from modular_kernel.text import printable
from modular_kernel.utils.optional_imports import OWN_PACKAGES, shadow_of

_LOG = logging.getLogger("modular_kernel.process_status")
_LOGGED: set["ProcessState"] = set()


@dataclass(frozen=True)
class ProcessState:
    """The state of one setting.

    word: the state in one word, such as "on". why: the reason, if another state would be better for
    the user; otherwise "". loud: whether to log it as a warning.
    """

    name: str
    word: str
    why: str = ""
    loud: bool = False

    def __str__(self) -> str:
        return f"{self.word}: {self.why}" if self.why else self.word


def replay() -> ProcessState:
    """Return whether plans replay their launches: "on" or "off"."""
    from modular_kernel.replay.launch.launch import why_not_replayed  # noqa: PLC0415  imports triton

    reason = why_not_replayed()
    return (
        ProcessState("replay", "off", printable(reason), _on_gpu())
        if reason
        else ProcessState("replay", "on")
    )


def interpreter() -> ProcessState:
    """Return whether Triton kernels are interpreted on the CPU: "on" or "off"."""
    requested, imported = read_settings().triton_interpret, interpreted_since_import()
    missing = sorted({"triton", "ml_dtypes"} - importable(("triton", "ml_dtypes")))
    reason = ""
    if requested and missing:
        reason = f"{' and '.join(missing)} cannot be imported"
    elif requested and imported is False:
        reason = "TRITON_INTERPRET was set after triton was imported: set it before"
    elif not requested and imported:
        reason = (
            "TRITON_INTERPRET was unset after triton was imported: kernels are still interpreted"
        )
        return ProcessState("interpreter", "on", reason, loud=True)
    if requested:
        return (
            ProcessState("interpreter", "off", reason, loud=True)
            if reason
            else ProcessState("interpreter", "on")
        )
    if _on_gpu():
        return ProcessState("interpreter", "off")
    return ProcessState(
        "interpreter", "off", "TRITON_INTERPRET is not set: Triton parts need a GPU"
    )


def packages() -> ProcessState:
    """Return whether the part packages are this distribution's: "ours" or "shadowed"."""
    shadows = {package: shadow_of(package) for package in OWN_PACKAGES}
    reason = ", ".join(
        f"{package} by {path}" for package, path in shadows.items() if path is not None
    )
    if reason:
        return ProcessState("packages", "shadowed", printable(reason), loud=True)
    return ProcessState("packages", "ours")


def compiler() -> ProcessState:
    """Return whether a C compiler, needed to build Triton launchers, is "found" or "missing"."""
    if c_compiler() is not None:
        return ProcessState("C compiler", "found")
    reason = "no CC, gcc or clang: triton cannot build launchers, so plans cannot replay"
    return ProcessState("C compiler", "missing", reason, loud=_on_gpu())


def caches() -> ProcessState:
    """Return whether measurements and compiled files are cached: "kept" or "off"."""
    if read_settings().cache_dir is not None:
        return ProcessState("caches", "kept")
    return ProcessState("caches", "off", "no home directory; set MK_CACHE_DIR")


def variables() -> ProcessState:
    """Return whether all MK_ environment variables are recognized: "known" or "unknown"."""
    unknown = unknown_variables()
    if not unknown:
        return ProcessState("variables", "known")
    reason = ", ".join(
        f"{v} (did you mean {suggestion}?)" if suggestion else v
        for v, suggestion in unknown.items()
    )
    return ProcessState("variables", "unknown", printable(reason, max_chars=500), loud=True)


def all_states() -> tuple[ProcessState, ...]:
    """Return all states of this process. If replay is possible, this compiles cuda_replay.c."""
    return replay(), *states_without_replay()


def states_without_replay() -> tuple[ProcessState, ...]:
    """Return all states except replay, which is logged when a plan first records a launch."""
    return interpreter(), packages(), compiler(), caches(), variables()


def log_once(states: tuple[ProcessState, ...]) -> None:
    """Log each state that has a reason, once per process."""
    for state in states:
        if state.why and state not in _LOGGED:
            _LOGGED.add(state)
            level = logging.WARNING if state.loud else logging.INFO
            _LOG.log(level, "%s %s", state.name, state)


def _on_gpu() -> bool:
    return torch.cuda.is_available()
