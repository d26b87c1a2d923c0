"""How the rows and keys of a call are found: kinds of one path, not paths."""
