"""The scheduler: sequences, blocks, budgets and the prefix cache, in ints alone. No tensors, no I/O, no clock.

Others use `scheduler.Scheduler` (`schedule`, `commit`) and `blocks.BlockPool`.
"""
