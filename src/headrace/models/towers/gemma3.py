"""The tower of Gemma 3 (Gemma Team 2025): SigLIP, means of squares of patches, a norm, and one linear layer. Rows of
the text see the whole picture that they stand in.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from headrace.backends.base import Array
from headrace.models.decoder import RMSNorm
from headrace.models.encoders.base import LayerNorm
from headrace.models.towers import llava
from headrace.models.towers.base import F32, Connector
from headrace.models.weights import Linear
from headrace.protocol.errors import CheckpointError

MAX_WHOLE = 512
"""Rows of a picture: a program computes as many at once (`backends.cpu`)."""


class Tower(llava.SiglipTower):
    sees_whole: ClassVar[bool] = True
    spare = r"vision_tower\.(.+\.)?(head|position_ids)(\..+)?"
    strategy = "default"
    norm: Any

    def depth(self) -> int:
        return self.num_layers

    def connect(self) -> None:
        """Read the last norm, and what is behind the means."""
        num = self.outer.integer("mm_tokens_per_image", 256, high=MAX_WHOLE)
        self.num_means = math.isqrt(num)
        if self.num_means**2 != num or self.num_sides % self.num_means:
            raise CheckpointError(
                f"config.json: mm_tokens_per_image is {num}, expected the square of a divisor of {self.num_sides}, the "
                "patches of a side"
            )
        self.norm = LayerNorm(self, f"{self.root}.post_layernorm")
        ops, width, name = self.ops, self.hidden_size, "multi_modal_projector"
        before = RMSNorm(self.weights, ops, f"{name}.mm_soft_emb_norm", width, self.eps, 1.0)
        joined = self.weights.matrix(Linear([f"{name}.mm_input_projection"], width, [self.text_size], transposed=True))
        self.connector = Connector(ops, width, self.text_size, lambda x: ops.linear(before(x), joined))

    def final(self, hidden: Array, rows: Array) -> Array:
        return self.norm(self.ops.select(hidden, rows))

    def merged(self, hidden: F32, height: int, width: int) -> F32:
        """The mean of each square of patches, added line by line."""
        factor, num = self.num_sides // self.num_means, self.num_means
        parts = hidden.reshape(num, factor, num, factor, -1)
        total = np.zeros((num, num, hidden.shape[1]), np.float32)
        for line in range(factor):
            for column in range(factor):
                total += parts[:, line, :, column]
        return (total / np.float32(factor**2)).reshape(num**2, -1)

    def num_rows(self, height: int, width: int) -> int:
        return self.num_means**2 if super().num_rows(height, width) else 0
