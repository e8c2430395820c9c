"""Error classes. Each message names the argument, what was expected and what it got."""


class FlashtileError(Exception):
    """Base class of all errors that flashtile raises itself."""


class ShapeError(FlashtileError, ValueError):
    """A shape, length or value is invalid."""


class DTypeError(FlashtileError, TypeError):
    """An argument has the wrong type, dtype or library."""


class UnsupportedError(FlashtileError, NotImplementedError):
    """The chosen backend cannot run this call; the message says why, and which backends can."""


class PeerError(FlashtileError, RuntimeError):
    """A rank of a distributed call died, stopped, left or failed; the message names it, the method and the step."""

    def __init__(self, message: str, peers: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.peers = peers  # ranks, within the group, of those at fault


class MismatchError(FlashtileError, ValueError):
    """The ranks of a distributed call disagree about an argument, or one of them refused the call."""
