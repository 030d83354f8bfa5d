"""What is computed from a run."""
