"""Workers on this machine or on a Ray cluster, which one driver feeds with rows."""
