"""What may be tried: configs, knobs, named constraints with reasons, and where a search starts."""
