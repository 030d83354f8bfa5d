"""GPUs, models, number formats, and what fits into memory."""
