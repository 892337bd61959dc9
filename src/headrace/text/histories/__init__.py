"""Conversations that a chat template does not take, and what makes of them ones that it takes, with the same contents.

`changes` has the table of the changes and applies them; `tools`, `calls` and `turns` make them. `needs` finds out which
of them a template needs, and `plain` writes tools and calls as text.
"""
