"""Ranks on several hosts: `rendezvous.Rendezvous` is rank 0's side of their connections, `server.RankServer` a rank's.

Frames go over TCP with mutual TLS. Made by `engine.ranks` and the command `rank`.
"""
