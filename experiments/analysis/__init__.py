"""What is computed over finished runs."""
