"""Beam search in the core: `rules` chooses among beams by numbers alone, `searches` keeps their sequences and blocks.

The scheduler is the only caller, through `searches.Searches`. Neither module decides which sequence runs.
"""
