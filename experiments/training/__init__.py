"""Train predictors of output length and of serving time, and say how good they are."""
