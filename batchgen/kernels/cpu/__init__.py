"""The CPU back end: kernels compiled by numba for the machine they run on."""
