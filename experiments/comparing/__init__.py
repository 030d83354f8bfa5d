"""Simulated against measured, by us or by others."""
