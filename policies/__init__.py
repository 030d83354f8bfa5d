"""Scheduling policies, one file each, and the predictors that inform them."""

from policies.continuous_batching import ContinuousBatching
from policies.policy import Policy
from policies.registry import register

__all__ = ["ContinuousBatching", "Policy", "register"]
