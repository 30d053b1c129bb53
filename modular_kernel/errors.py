"""Exceptions that the toolkit raises on purpose.

A user's mistake raises a subclass of `ModularKernelError` that states the subject, what it got and
what it needs, before anything is launched. `assert` is reserved for internal invariants.
"""

from collections.abc import Sequence

from modular_kernel.text import counted, printable


class ModularKernelError(Exception):
    """Base of every error raised on purpose. Picklable, so that errors can cross processes."""

    def __reduce__(self) -> tuple[object, ...]:
        # Do not call the class: a subclass's constructor arguments are not in `args`.
        return _restore, (type(self), self.args), self.__dict__


class InputError(ModularKernelError, ValueError):
    """A value that the caller passed is not valid.

    what: the name of the value. got: the value, or what is wrong with it. need: what is valid.
    """

    def __init__(self, what: str, *, got: object, need: object) -> None:
        self.what, self.got, self.need = what, got, need
        # The value may come from a downloaded file or another package.
        got_text = printable(got) or "''"
        super().__init__(f"{printable(what)}: got {got_text}, need {printable(need)}")


class ConfigurationError(InputError):
    """A declared option or problem field is wrong, or two of them contradict each other."""


class ShapeError(InputError):
    """A tensor has the wrong rank or shape, or two tensors disagree."""


class DtypeError(InputError):
    """A tensor has a dtype that the declared problem does not allow."""


class DeviceError(InputError):
    """A tensor is on another device than its peers or the kernel."""


class LayoutError(InputError):
    """A tensor has strides that the operation cannot read."""


class RoutingError(InputError):
    """Top-k ids are outside [-1, experts) in checked mode, or routing does not fit the weights."""


class WeightsError(InputError):
    """Expert weights do not match the declared problem (scales, biases, placement)."""


class CapacityError(InputError):
    """More tokens than a plan, a part or a buffer was made for, or more adapters than slots."""


class UnsupportedError(InputError):
    """A method was called that the part declares unsupported."""


class StateError(InputError):
    """An object was used in the wrong state, for example a call was finished twice, or a plan was
    called from within its own call."""


class CorruptionError(ModularKernelError):
    """A part wrote outside its workspace (red zones are checked in poison mode), or an interpreted
    kernel accessed memory that none of its launch arguments covers."""


class UnknownPartError(InputError):
    """No part has this name; `need` lists the nearest names."""


class DuplicatePartError(InputError):
    """Two packages provide a part or a quantization scheme under the same name, so the name cannot
    be used."""


class BrokenPartError(InputError):
    """The entry point that should provide a part or a quantization scheme cannot be used; `got` is
    its error."""


class IncompatibleError(ModularKernelError, ValueError):
    """A pairing was refused; `rejections` holds every violated rule, not only the first."""

    def __init__(self, pairing: str, rejections: Sequence[object]) -> None:
        self.pairing, self.rejections = pairing, tuple(rejections)
        reasons = "\n".join(f"  - {rejection}" for rejection in self.rejections)
        count = counted(len(self.rejections), "reason")
        super().__init__(f"{pairing} is refused for {count}:\n{reasons}")


class CommunicationError(ModularKernelError):
    """Ranks of an exchange were late, disappeared, or disagreed.

    rank: the rank that raised. phase: "construct", "counts", "dispatch" or "combine". step: number
    of the call among all calls of the manager. layer: number of the layer among those that share
    the manager. call: number of the call among those of its layer. All three count from 1; layer
    and call are 0 if unknown. peers: ranks that may be at fault, () if unknown.
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
        peer_list = ", ".join(map(str, self.peers)) or "unknown"
        noun = "peer" if len(self.peers) == 1 else "peers"
        location = f"rank {rank}, {phase} of step {step}, {noun} {peer_list}"
        super().__init__(f"{what}: got {got}, need {need} ({location})")


def _restore(cls: type[ModularKernelError], args: tuple[object, ...]) -> ModularKernelError:
    return cls.__new__(cls, *args)
