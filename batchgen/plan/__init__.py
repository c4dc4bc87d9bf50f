"""The dry run: counts the rows and tokens of a job and estimates its time, without torch or weights."""
