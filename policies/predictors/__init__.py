"""Predictors of output length: emulated ones with a known error, and trained ones."""
