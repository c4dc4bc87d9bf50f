"""Throughput of the engine on a workload, next to the roofline measured in the same process."""
