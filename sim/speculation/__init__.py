"""Drafts: what becomes of them, and what making them takes."""
