"""Candidates on a live device: compiled, verified, measured."""
