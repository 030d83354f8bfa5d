"""Experiments: specification, runner, sweeps, tables, figures and the command line."""
