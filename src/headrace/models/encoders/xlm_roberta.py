"""XLM-RoBERTa (Conneau et al. 2020): RoBERTa with a vocabulary of many languages."""

from __future__ import annotations

from headrace.models.encoders import roberta

TINY = roberta.TINY | {"model_type": "xlm-roberta"}


class Model(roberta.Model):
    pass
