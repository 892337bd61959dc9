"""Computes one model by several processes, its ranks, with the bits of one process (ADR 0037, 0038).

Each rank computes some columns of every matrix and some heads, and the columns are put together; or each has some
layers, and rows pass from one to the next. No sum is ever cut, so no bit depends on the number of ranks.
"""
