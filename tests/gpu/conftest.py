"""Without a GPU the Triton kernels are interpreted, which triton decides when it is imported."""

import os
import sys

try:
    import torch
except ImportError:
    torch = None

if torch is not None and not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"
