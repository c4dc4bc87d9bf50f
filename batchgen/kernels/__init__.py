"""Kernels: the operations in which a step spends its time: one interface, and a back end per device."""
