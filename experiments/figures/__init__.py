"""The figures, one file a subject; `schedlab.experiments.figures.plots` names them all."""
