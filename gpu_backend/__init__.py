"""The real engine: paged attention on real kernels, under the same policies."""
