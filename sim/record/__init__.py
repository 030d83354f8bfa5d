"""What a run leaves behind: logs, steps, results."""
