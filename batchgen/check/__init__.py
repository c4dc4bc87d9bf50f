"""Proofs of the engine's promises about its results, on the user's own machine and model."""
