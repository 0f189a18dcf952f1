"""Kernels run in Triton's interpreter, on the CPU, where a test asks for the triton backend."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is loaded
