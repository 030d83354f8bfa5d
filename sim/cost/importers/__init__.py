"""Importers of performance profiles that other projects publish, one file a format."""
