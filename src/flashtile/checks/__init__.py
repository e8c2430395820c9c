"""Checks of arguments; each error names the argument."""
