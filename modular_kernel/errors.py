"""Exceptions that the toolkit raises on purpose.

An invalid argument raises a subclass of `ModularKernelError` before anything is launched. The
message names the argument, and says what was passed and what is needed. `assert` is reserved for
internal invariants.
"""

from collections.abc import Sequence

from modular_kernel.text import escape_nonprintable, format_count


class ModularKernelError(Exception):
    """Base class of all errors that the toolkit raises on purpose. Instances can be pickled."""

    def __reduce__(self) -> tuple[object, ...]:
        # `args` holds the message, not the constructor arguments of a subclass.
        return _restore, (type(self), self.args), self.__dict__


class InputError(ModularKernelError, ValueError):
    """A value that the caller passed is not valid.

    what: name of the value.
    got: the value, or what is wrong with it.
    need: which values are valid.
    """

    def __init__(self, what: str, *, got: object, need: object) -> None:
        self.what, self.got, self.need = what, got, need
        # The value may come from a downloaded file or another package.
        got_text = escape_nonprintable(got) or "''"
        super().__init__(
            f"{escape_nonprintable(what)}: got {got_text}, need {escape_nonprintable(need)}"
        )


class ConfigurationError(InputError):
    """An option or a field of the problem is invalid, or two of them contradict each other."""


class ShapeError(InputError):
    """A tensor has a wrong number of dimensions or a wrong shape, or two shapes do not match."""


class DtypeError(InputError):
    """A tensor has a dtype that the problem does not allow."""


class DeviceError(InputError):
    """A tensor is on another device than the kernel or the other tensors."""


class LayoutError(InputError):
    """A tensor has strides that the operation cannot read."""


class RoutingError(InputError):
    """Top-k ids are outside [-1, experts) in checked mode, or a routing is otherwise invalid."""


class WeightsError(InputError):
    """Expert weights, or their scales or biases, do not match the problem."""


class CapacityError(InputError):
    """A call has more tokens than a plan, part or buffer can hold, or no adapter slot is free."""


class UnsupportedError(InputError):
    """A method, option or format is not supported."""


class StateError(InputError):
    """An object is in the wrong state, for example because a call is finished twice."""


class CorruptionError(ModularKernelError):
    """A part wrote outside its workspace buffers (`poison=True`), or an interpreted kernel accessed
    memory outside its arguments."""


class UnknownPartError(InputError):
    """No part has this name. `need` lists the valid names."""


class DuplicatePartError(InputError):
    """Several packages provide a part or quantization scheme with this name, so none is used."""


class BrokenPartError(InputError):
    """An entry point for parts or quantization schemes cannot be used. `got` says why."""


class IncompatibleError(ModularKernelError, ValueError):
    """A pair of parts does not support the problem. `rejections` lists every violated rule.

    verdicts: the verdict on each pairing if several pairings were checked and none is valid.
    """

    def __init__(
        self, pairing: str, rejections: Sequence[object], *, verdicts: Sequence[object] = ()
    ) -> None:
        self.pairing, self.rejections = pairing, tuple(rejections)
        self.verdicts = tuple(verdicts)
        reasons = "\n".join(f"  - {rejection}" for rejection in self.rejections)
        count = format_count(len(self.rejections), "reason")
        super().__init__(f"{pairing} is refused for {count}:\n{reasons}")


class CommunicationError(ModularKernelError):
    """Ranks of an exchange were late, disappeared, or made different calls.

    A manager owns the connections of a process to the other ranks, and is shared by layers.

    rank: the rank that raised the error.
    phase: "construct", "counts", "dispatch" or "combine".
    step: number of the call among all calls of the manager, from 1.
    layer: number of the layer among the layers that share the manager, from 1; 0 if unknown.
    call: number of the call among the calls of its layer, from 1; 0 if unknown.
    peers: ranks that may have caused the error; () if unknown.
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
