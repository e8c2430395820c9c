"""Other libraries' interfaces on flashtile: torch's SDPA, flash_attn's functions, transformers' layers."""
