"""Whether plans on this machine replay their launches, for those who report on it."""

from modular_kernel.ops.launch import why_not_replayed


def replay_state() -> str:
    """Say in a few words whether planned calls replay their launches here, and if not, why."""
    reason = why_not_replayed()
    return f"off: {reason}" if reason else "on"
