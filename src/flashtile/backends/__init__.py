"""The ways to run a Problem: each has forward() and backward(), and none knows another."""
