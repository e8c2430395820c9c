"""Error classes. Each message names the argument, what was expected and what it got."""


class FlashtileError(Exception):
    """Base class of all errors that flashtile raises itself."""


class ShapeError(FlashtileError, ValueError):
    """A shape, length or value is invalid."""


class DTypeError(FlashtileError, TypeError):
    """An argument has the wrong type, dtype or library."""


class UnsupportedError(FlashtileError, NotImplementedError):
    """The chosen backend cannot run this call; the message says why, and which backends can."""
