"""The tower of Qwen3-VL's mixtures of experts."""

from headrace.models.towers.qwen3_vl import Tower as Tower
