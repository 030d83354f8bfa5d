"""Many points: run on many processors, kept by content, taken up again, searched."""
