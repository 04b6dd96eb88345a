"""The device work of a round, each fast kernel beside its slow twin of the same name and signature.

The twins are plain torch: they are the CPU path and the oracle of the fast kernels. Shapes are fixed by the arguments'
shapes, never by their contents, so that a round made of them can be captured in a CUDA graph.
"""
