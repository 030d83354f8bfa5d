"""The Triton kernels of the real backend, each with what launches it."""
