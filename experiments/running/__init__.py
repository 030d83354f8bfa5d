"""One point: everything that decides what a run gives."""
