"""States of process-wide settings that affect users, such as launch replay and the interpreter.

`mk doctor` and `mk profile` show all states. A state that has a reason is also logged once, by the
logger "modular_kernel.process_status". A state that the user did not request or expect is logged as
a warning.
"""

import logging
from dataclasses import dataclass

import torch

from modular_kernel.machine import find_importable, was_imported_with_interpreter
from modular_kernel.settings import find_c_compiler, find_unknown_variables, read_settings
from modular_kernel.text import escape_nonprintable
from modular_kernel.utils.optional_imports import DISTRIBUTION_PACKAGES, find_shadow

_LOG = logging.getLogger("modular_kernel.process_status")
_LOGGED: set["ProcessState"] = set()


@dataclass(frozen=True)
class ProcessState:
    """The state of one setting.

    name: name of the setting.
    word: the state in one word, such as "on".
    why: the reason for the state; "" if the state is what the user wants.
    loud: whether to log the state as a warning.
    """

    name: str
    word: str
    why: str = ""
    loud: bool = False

    def __str__(self) -> str:
        return f"{self.word}: {self.why}" if self.why else self.word


def get_replay_state() -> ProcessState:
    """Return whether plans replay their launches: "on" or "off"."""
    from modular_kernel.replay.launch.launch import why_not_replayed  # noqa: PLC0415  imports triton

    reason = why_not_replayed()
    return (
        ProcessState("replay", "off", escape_nonprintable(reason), _has_gpu())
        if reason
        else ProcessState("replay", "on")
    )


def get_interpreter_state() -> ProcessState:
    """Return whether Triton kernels are interpreted on the CPU: "on" or "off"."""
    requested, imported = read_settings().triton_interpret, was_imported_with_interpreter()
    missing = sorted({"triton", "ml_dtypes"} - find_importable(("triton", "ml_dtypes")))
    reason = ""
    if requested and missing:
        reason = f"{' and '.join(missing)} cannot be imported"
    elif requested and imported is False:
        reason = "TRITON_INTERPRET was set after triton was imported; set it before the import"
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
    if _has_gpu():
        return ProcessState("interpreter", "off")
    return ProcessState(
        "interpreter", "off", "TRITON_INTERPRET is not set: Triton parts need a GPU"
    )


def get_packages_state() -> ProcessState:
    """Return whether the packages with parts belong to this distribution: "ours" or "shadowed"."""
    shadows = {package: find_shadow(package) for package in DISTRIBUTION_PACKAGES}
    reason = ", ".join(
        f"{package} by {path}" for package, path in shadows.items() if path is not None
    )
    if reason:
        return ProcessState("packages", "shadowed", escape_nonprintable(reason), loud=True)
    return ProcessState("packages", "ours")


def get_compiler_state() -> ProcessState:
    """Return whether a C compiler, needed to build Triton launchers, is "found" or "missing"."""
    if find_c_compiler() is not None:
        return ProcessState("C compiler", "found")
    reason = "no CC, gcc or clang: triton cannot build launchers, so plans cannot replay launches"
    return ProcessState("C compiler", "missing", reason, loud=_has_gpu())


def get_caches_state() -> ProcessState:
    """Return whether measurements and compiled files are cached: "kept" or "off"."""
    if read_settings().cache_dir is not None:
        return ProcessState("caches", "kept")
    return ProcessState("caches", "off", "no home directory; set MK_CACHE_DIR")


def get_variables_state() -> ProcessState:
    """Return whether all MK_ environment variables are recognized: "known" or "unknown"."""
    unknown = find_unknown_variables()
    if not unknown:
        return ProcessState("variables", "known")
    reason = ", ".join(
        f"{v} (did you mean {suggestion}?)" if suggestion else v
        for v, suggestion in unknown.items()
    )
    return ProcessState(
        "variables", "unknown", escape_nonprintable(reason, max_chars=500), loud=True
    )


def get_all_states() -> tuple[ProcessState, ...]:
    """Return all states of this process. If replay is possible, this compiles cuda_replay.c."""
    return get_replay_state(), *get_states_without_replay()


def get_states_without_replay() -> tuple[ProcessState, ...]:
    """Return all states except replay, which is logged when a plan records a launch."""
    return (
        get_interpreter_state(),
        get_packages_state(),
        get_compiler_state(),
        get_caches_state(),
        get_variables_state(),
    )


def log_once(states: tuple[ProcessState, ...]) -> None:
    """Log each state that has a reason, once per process."""
    for state in states:
        if state.why and state not in _LOGGED:
            _LOGGED.add(state)
            level = logging.WARNING if state.loud else logging.INFO
            _LOG.log(level, "%s %s", state.name, state)


def _has_gpu() -> bool:
    return torch.cuda.is_available()
