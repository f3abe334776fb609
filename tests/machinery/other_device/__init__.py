"""The data plane on a device that is neither CPU nor CUDA: all of it works there, or refuses.

`python -m tests.machinery.other_device [NAME...]` prints the matrix: every public name that holds or
moves tensors.
"""
