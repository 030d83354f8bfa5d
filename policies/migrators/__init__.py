"""Migrators: which requests move from engine to engine while they decode, one file each."""
