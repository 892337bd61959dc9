"""CamemBERT (Martin et al. 2020): RoBERTa with a vocabulary of French."""

from __future__ import annotations

from headrace.models.encoders import roberta

TINY = roberta.TINY | {"model_type": "camembert"}


class Model(roberta.Model):
    pass
