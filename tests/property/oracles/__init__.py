"""Naive schedulers, each written from its source and not from the policy that it decides as."""
