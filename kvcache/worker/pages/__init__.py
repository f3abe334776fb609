"""The memory of a pool's pages, and the tensors over it that attention kernels read."""
