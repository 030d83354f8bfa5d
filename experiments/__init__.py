"""Experiments: what is run, how often, on what, and what comes out.

`cli` is the command line, `run` the one function under all of it, `run_all` and `sweeping` run
many points. The folders: `spec` (the YAML), `real` (calibration and comparison), `recorded` (runs
of other engines), `claimed` (claims of papers), `regression`, `plotting`, `reporting`, `importers`
(profiles of other projects), `predictor_training`. Experiments to start from are the YAML files
here, in `policies` and in `claims`.
"""
