"""Results out: records, journal, run directory, and the output files made of them. No engine and no torch."""
