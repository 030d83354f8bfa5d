"""The figures, one file a subject; `experiments.plotting.plots` names them all."""
