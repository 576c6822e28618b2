"""One GPU of this machine: compiled kernels, memory, launches, timing and traces."""
