"""Floats of few bits: matrix products of them on any mesh (`--products`), and functions for a single process.

choices.py              the choices fp8, mxfp8, mxfp4 and nvfp4 of --products, and which configurations they refuse
formats.py              floating-point formats of 4 to 8 bits, and rounding to them
block_scales.py         rounding with a scale per tensor or per block: fp8, MXFP8, MXFP4, NVFP4
rounded_products.py     the three products of a linear layer with rounded operands; a tensor's amax is taken over the mesh
fp8_linear.py           a linear layer in fp8, with three ways of scaling
stochastic_rounding.py  rounding to bfloat16 that is exact on average
"""
