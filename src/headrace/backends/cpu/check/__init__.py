"""The records of a step against the operators of `torch_ref`, one by one."""
