"""The GPU suites: ours beside every peer that is there, in one process, taking turns in random order."""
