"""Kernels: the operations in which a step spends its time, behind one interface with a back end per device."""
