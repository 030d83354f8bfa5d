"""Policies inside vLLM's own engine."""

from schedlab import core

# The ledger there is a subclass, and what a policy sees is vLLM's: compiled code refuses both.
core.use_python()
