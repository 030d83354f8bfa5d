"""One HTML page of a finished run."""
