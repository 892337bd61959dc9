"""SmolVLM's tower (Marafioti et al. 2025): Idefics3's."""

from headrace.models.towers.idefics3 import Tower as Tower
