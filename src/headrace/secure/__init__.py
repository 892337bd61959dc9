"""Connections between hosts whose two ends have proven themselves: certificates, a secret, frames with signs of life.

Knows no messages but those of the handshake. Used by `fleet.remote` (engines) and `parallel.hosts` (ranks).
"""
