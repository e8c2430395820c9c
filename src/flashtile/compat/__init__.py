"""The calls of other libraries, answered by flashtile: torch's SDPA, flash_attn's functions, transformers' layers."""
