"""The simulator: core types, the scheduling loop, KV accounting, cost models, metrics."""
