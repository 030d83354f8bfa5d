"""Experiments: what is run, how often, on what, and what comes out.

From a specification to a page, a folder each: `specification` (the YAML), `running` (one point),
`sweeps` (many), `results` (their folders and tables), `analysis` and `figures` (what is computed
and drawn from them), `search` (the best rate, the best limits), `comparing` (simulated against
measured), `claims` (what papers say against what comes out), `regression`, `training`
(predictors), `report` (one HTML page), `bench`, and `commands` (the command line over all of it).
Experiments to start from are the YAML files here and in `papers`.
"""
