"""Sources of the compiled kernels: numba functions on words of memory. Imported only to compile them."""
