"""The needs of a model, from its config.json alone: bytes, operations, seconds and money, before any weight exists.

Knows models, operators and forms of weights; must not know files of weights, requests or HTTP. Called by `headrace
plan` and `headrace simulate`.
"""
