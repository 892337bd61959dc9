"""The small trained model that ships with the package, so that a first run works offline.

A Llama directory in Hugging Face's layout; MODEL_CARD.md tells what it is, training/ how it was made. Here is only
where it lies. Whoever turns a model's name into a directory calls it.
"""

from __future__ import annotations

from pathlib import Path

PATH: Path = Path(__file__).parent
