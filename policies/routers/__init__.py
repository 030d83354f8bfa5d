"""Routers: which engine of a fleet a request goes to, one file each."""
