"""Throughput of the engine on a workload, beside the roofline measured in the same process."""
