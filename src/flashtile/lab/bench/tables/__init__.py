"""The markdown of each suite's records: what a document shows, a brief, and all details."""
