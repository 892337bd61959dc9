"""A fleet of replicas: which of them gets a request, and how that goes by a modelled clock, before a machine is bought.

Knows the scheduler, tokens and numbers; must not know models, sockets or clocks. Called by `headrace simulate`.
"""
