"""Checks of what a caller gives, each with an error that names the argument."""
