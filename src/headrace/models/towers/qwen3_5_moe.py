"""The tower of Qwen3.5's and 3.6's mixtures of experts."""

from headrace.models.towers.qwen3_5 import Tower as Tower
