"""Numbers of few bits: `--products`, which multiplies them on any mesh, and functions for one process.

choices.py              the choices fp8, mxfp8, mxfp4 and nvfp4, and what they refuse
formats.py              floating-point formats of 4 to 8 bits, and the nearest number of each
block_scales.py         scales by tensor and by block: fp8, MXFP8, MXFP4, NVFP4
rounded_products.py     a layer's three products of such numbers, with the largest number of a tensor taken over the mesh
fp8_linear.py           a linear layer in fp8, by three ways to know the largest number
stochastic_rounding.py  rounding to bfloat16 that is exact on average
"""
