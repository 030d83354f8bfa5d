"""Policies inside vLLM's own engine."""
