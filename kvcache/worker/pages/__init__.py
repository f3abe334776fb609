"""The memory of a pool by page, and the tensors that attention kernels see over it."""
