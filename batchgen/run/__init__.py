"""One invocation of run, merge or status on a run directory."""
