"""What a call costs, without running it: its plan, its memory traffic, its trace."""
