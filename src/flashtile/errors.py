"""The three ways a call can be wrong; each message names the argument, what was expected and what came."""


class FlashtileError(Exception):
    """Base of every error that flashtile raises on purpose."""


class ShapeError(FlashtileError, ValueError):
    """A shape, a length or a value does not fit."""


class DTypeError(FlashtileError, TypeError):
    """An argument is of the wrong type, dtype or library."""


class UnsupportedError(FlashtileError, NotImplementedError):
    """The chosen backend cannot run this call; the message says why, and which backends could."""
