"""Every exception the toolkit raises on purpose.

A user's mistake raises a subclass of `ModularKernelError` that names what was wrong, what it got
and what it needs, before anything is launched. `assert` is left for our own invariants.
"""

from collections.abc import Sequence

from modular_kernel.text import counted, printable


class ModularKernelError(Exception):
    """Base of every error raised on purpose. Can be pickled: errors cross processes."""

    def __reduce__(self) -> tuple[object, ...]:
        # Not by calling the class: what a subclass is made from is not in `args`.
        return _restored, (type(self), self.args), self.__dict__


class InputError(ModularKernelError, ValueError):
    """A value the caller gave is not usable: `what` it is, what we `got`, what we `need`."""

    def __init__(self, what: str, *, got: object, need: object) -> None:
        self.what, self.got, self.need = what, got, need
        # What was given may come from a downloaded file or another package.
        shown = printable(got) or "''"
        super().__init__(f"{printable(what)}: got {shown}, need {printable(need)}")


class ConfigurationError(InputError):
    """A declared option or problem field is wrong, or two of them contradict each other."""


class ShapeError(InputError):
    """A tensor has the wrong rank or shape, or two tensors disagree."""


class DtypeError(InputError):
    """A tensor has a dtype the declared problem does not allow."""


class DeviceError(InputError):
    """A tensor lives on another device than its peers or than the kernel."""


class LayoutError(InputError):
    """A tensor is strided in a way the operation cannot read, where that matters."""


class RoutingError(InputError):
    """Top-k ids outside [-1, experts) in checked mode, or routing that fits no weights."""


class WeightsError(InputError):
    """Expert weights that do not fit the declared problem (scales, biases, placement)."""


class CapacityError(InputError):
    """More tokens than a plan, a part or a buffer was made for, or more adapters than slots."""


class UnsupportedError(InputError):
    """A method was called that the part declares not to have."""


class StateError(InputError):
    """Something was used at a time when it must not be: a call was finished twice, or a plan was
    called from within its own call."""


class CorruptionError(ModularKernelError):
    """A part wrote outside its workspace (red zones are watched in poison mode), or a kernel
    touched memory that no argument of its launch holds (watched where kernels are interpreted)."""


class UnknownPartError(InputError):
    """No part has this name; `need` lists the nearest names."""


class DuplicatePartError(InputError):
    """Two packages offer a part under one name; using that name is refused."""


class BrokenPartError(InputError):
    """The entry point that should provide parts failed to import; `got` is its error."""


class IncompatibleError(ModularKernelError, ValueError):
    """A pairing was refused; `rejections` holds every violated rule, not only the first."""

    def __init__(self, pairing: str, rejections: Sequence[object]) -> None:
        self.pairing, self.rejections = pairing, tuple(rejections)
        reasons = "\n".join(f"  - {rejection}" for rejection in self.rejections)
        count = counted(len(self.rejections), "reason")
        super().__init__(f"{pairing} is refused for {count}:\n{reasons}")


class CommunicationError(ModularKernelError):
    """Ranks that had to take part in an exchange did not in time, went away, or disagree.

    rank: where it was raised. phase: "construct", "counts", "dispatch" or "combine". step: the
    manager's exchange for a call, counted from 1 by every rank. layer, call: which part of the
    manager, and which of its calls, both counted from 1; 0 where unknown. peers: the ranks to look
    at, () if nothing tells.
    """

    def __init__(
        self,
        what: str,
        *,
        got: object,
        need: object,
        rank: int,
        phase: str,
        step: int = 0,
        peers: Sequence[int] = (),
    ) -> None:
        self.what, self.got, self.need = what, got, need
        self.layer = self.call = 0
        self.rank, self.phase, self.step, self.peers = rank, phase, step, tuple(peers)
        named = ", ".join(map(str, self.peers)) or "unknown"
        word = "peer" if len(self.peers) == 1 else "peers"
        where = f"rank {rank}, {phase} of step {step}, {word} {named}"
        super().__init__(f"{what}: got {got}, need {need} ({where})")


def _restored(cls: type[ModularKernelError], args: tuple[object, ...]) -> ModularKernelError:
    return cls.__new__(cls, *args)
