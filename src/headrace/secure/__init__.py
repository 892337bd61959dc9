"""Connections between hosts whose two ends have proven themselves: certificates, a secret, frames with signs of life.

Knows no messages but the handshake's. Used by `fleet.remote` (engines) and `parallel.hosts` (ranks).
"""
