"""Mutation testing: plant one small bug at a time, and see whether a test fails."""
