"""What kernels reach of their device, learnt from public tables of kernels."""
