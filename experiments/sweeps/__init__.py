"""Many points: jobs, workers, the store they go to."""
