"""From a candidate to a launch: text, compiling, gates, loading."""
