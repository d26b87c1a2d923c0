"""Ours beside peers, in one run."""
