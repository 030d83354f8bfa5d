"""KV memory: blocks, allocators, prefix cache."""
