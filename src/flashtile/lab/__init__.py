"""What measures, explains and teaches, and the command line: nothing that a call reaches imports it."""
