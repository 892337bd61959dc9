"""Changes of conversations that a chat template does not take into ones that it takes, with the same contents.

`changes` has the table of the changes and applies them; `tools`, `calls` and `turns` make them. `needs` detects the
changes that a template needs, and `plain` writes tools and calls as text.
"""
