"""`headrace bench`: the commands, their plans, the measurements and the printed reports."""
