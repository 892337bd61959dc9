"""x"""


def chat() -> None:
    """x"""
