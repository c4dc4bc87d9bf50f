"""Settings of a run: each key declared once, read from a job file and flags, validated, frozen."""
