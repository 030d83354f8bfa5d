"""Folders and tables of finished runs."""
