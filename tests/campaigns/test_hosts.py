"""A slice of the campaign of ranks on several hosts, and its negative controls. Needs root."""

from __future__ import annotations

import json

import pytest
from tests.campaigns import hosts

needs_root = pytest.mark.skipif(not hosts.can_run(), reason="needs root, ip, unshare, nsenter and /dev/net/tun")


@needs_root
@pytest.mark.slow
def test_streams_survive_a_cut_link() -> None:
    words = ("--faults", "1", "--streams", "8", "--max-tokens", "48", "--timeout", "2", "--seed", "1")
    report = hosts.outside(*words)
    assert not report["problems"], json.dumps(report["problems"][:3], indent=1)
    counts = report["links"]["veth"]["counts"]
    assert counts["faults: cut"] == counts["groups lost: cut"] == 1
    assert report["streams_compared"] >= 8


@needs_root
@pytest.mark.slow
def test_streams_survive_faults_of_every_kind() -> None:
    report = hosts.outside("--faults", "15", "--streams", "8", "--max-tokens", "48", "--seed", "2")
    assert not report["problems"], json.dumps(report["problems"][:3], indent=1)
    assert report["faults"] == 15


def test_control_what_is_noticed_late_is_a_problem() -> None:
    assert hosts.late("kill", 0.9, 5.0) == hosts.late("cut", 9.9, 5.0) == []
    assert hosts.late("host-kill", 1.1, 5.0) == ["host-kill: noticed after 1.10 s, at most 1.0"]
    assert hosts.late("silence", 10.1, 5.0) == ["silence: noticed after 10.10 s, at most 10.0"]


def test_every_kind_of_fault_has_a_method() -> None:
    for kind in {*hosts.KINDS_OF_VETH, *hosts.KINDS_OF_TUN}:
        assert callable(getattr(hosts.HostCampaign, "_" + kind.replace("-", "_")))
