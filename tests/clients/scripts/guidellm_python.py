"""guidellm: a short benchmark over requests of a file."""

import json
import os
import tempfile

import report
from report import check, expect

FOLDER = tempfile.mkdtemp()
DATA = os.path.join(FOLDER, "prompts.jsonl")
with open(DATA, "w") as file:
    for _ in range(3):
        file.write(json.dumps({"prompt": "Say hello."}) + "\n")


def run(url=report.URL, model="builtin", key="none", code=0):
    return report.command(
        *("guidellm", "run", "--disable-console-interactive"),
        *("--backend", f"kind=openai_http,target={url},model={model},api_key={key}"),
        *("--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=2"),
        *("--data", f"kind=json_file,path={DATA}", "--output", f"kind=json,path={FOLDER}/out.json"),
        code=code,
        folder=FOLDER,
        HF_HUB_OFFLINE="1",
    )


@check("stream")
def _():
    run()
    with open(os.path.join(FOLDER, "out.json")) as file:
        text = file.read()
    expect(text, "no report")


report.lacks("a benchmark of streams", *[name for name in os.environ["CLIENT_FEATURES"].split(";") if name != "stream"])
