"""The events of blocks go on in an engine that was restarted, and only while somebody watches."""

from headrace.engine.replica import Watching
from headrace.protocol.frames import ToEngine, Watch


def test_a_new_engine_is_watched_like_the_last() -> None:
    posted: list[ToEngine] = []
    watching = Watching(posted.append)
    watching.renew()
    assert posted == []
    watching.watch(True)
    watching.renew()
    assert posted == [Watch(True), Watch(True)]
    watching.watch(False)
    watching.renew()
    assert posted[2:] == [Watch(False)]
