"""The records of an engine: recordings of its life and their replay, the last steps before a death, crash reports."""
