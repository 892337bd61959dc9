"""`headrace bench`: the commands, their plans, what measures and what prints."""
