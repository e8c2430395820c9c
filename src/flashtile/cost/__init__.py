"""The cost of a call without running it: its plan, its memory traffic, its trace."""
