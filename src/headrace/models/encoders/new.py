"""GTE (`gte`) under the type of its first files."""

from __future__ import annotations

from headrace.models.encoders import gte

TINY = gte.TINY | {"model_type": "new"}


class Model(gte.Model):
    default_theta = 10000.0
