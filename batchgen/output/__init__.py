"""Results out: payloads, journal, run directory, and the output files made of them. Imports no engine and no torch."""
