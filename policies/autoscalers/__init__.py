"""Autoscalers: how many engines a pool of a fleet should have, one file each."""
