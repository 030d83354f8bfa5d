"""Calibration of a device, and comparison of both backends."""
