"""What is asked: families, shapes, problems and devices, as frozen dataclasses; no torch."""
