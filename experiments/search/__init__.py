"""Search over experiments: the highest rate under a target, the best limits."""
