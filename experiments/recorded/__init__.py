"""Replays of recorded runs of real engines."""
