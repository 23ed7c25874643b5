"""Quantised weights on CUDA.

1. `widening.py` packs weights into 8 bits where the kernel does not take their own format.
2. `linear.py` multiplies by the kernel or by dequantised weights, in the layers of a model;
   `kernel.py` has the kernel's source, and how the work is divided.
"""
