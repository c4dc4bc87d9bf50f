"""One invocation of run, retry, merge or status on a run directory."""
