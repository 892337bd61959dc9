"""Guesses of the tokens that follow, one file for each method.

Others use `build.make_drafter`, `build.make_speculator` and the protocol in `base`.
"""
