"""Cost models: how long the GPU takes for one step of a given shape."""
