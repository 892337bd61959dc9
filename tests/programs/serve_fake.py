"""`headrace serve` with the fake engine for a child.

`serve_fake.py TOKENIZER_DIR PORT DELAY MAX_RESTARTS [DRAIN [SHUTDOWN_DELAY]]`
"""

from __future__ import annotations

import sys

from tests.support import fake

from headrace.engine import logs
from headrace.engine.client import EngineClient
from headrace.engine.links import ProcessLink
from headrace.protocol.config import EngineConfig, ServerConfig
from headrace.serve.app import create_app
from headrace.serve.loading import ModelParts
from headrace.serve.process import run
from headrace.text.templates import ChatTemplate
from headrace.text.tokenizer import Tokenizer

if __name__ == "__main__":
    tokenizer = Tokenizer.load(sys.argv[1])
    drain = float(sys.argv[5]) if len(sys.argv) > 5 else 30.0
    leave = float(sys.argv[6]) if len(sys.argv) > 6 else 0.0
    server = ServerConfig(port=int(sys.argv[2]), log_stats_interval=0.05, shutdown_timeout=drain, shutdown_delay=leave)
    link = ProcessLink(EngineConfig(model="fake"), fake.command(float(sys.argv[3])))
    client = EngineClient(link, max_restarts=int(sys.argv[4]))
    logs.set_up("info")
    app = create_app(client, server, "fake", ModelParts(tokenizer, ChatTemplate.of(tokenizer)))
    sys.exit(run(app, server))
