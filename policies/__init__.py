"""Scheduling policies, one file each, and the predictors that inform them."""

from schedlab.policies.continuous_batching import ContinuousBatching
from schedlab.policies.policy import Policy
from schedlab.policies.registry import register

__all__ = ["ContinuousBatching", "Policy", "register"]
