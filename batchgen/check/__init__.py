"""Proofs, on the user's own machine and model, of what the engine promises about its results."""
