"""How the records of each suite look as markdown: what a document shows, in whole or in brief, and all details."""
