"""The coding agents of `headrace launch`: for each, what sets it to a server for one run.

Only the agent's environment, its flags and files in a temporary folder are used, and none of the user's files is
written. What an agent sends to its vendor (telemetry, reports, updates, lists of models) is off where the agent has a
switch. Knows no server and runs nothing; called by `cli.launch`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

NO_KEY = "none"
"""The key for a server without one: the agents refuse to start without any."""
MAX_ANSWER = 8192
"""Tokens of an answer that agents ask for at most, where they must name a number; a quarter of the context if that is
less."""


class Target(NamedTuple):
    """A server and its model. context: tokens; cacert: the file of an https server's CA, empty for the system's."""

    url: str
    model: str
    key: str
    context: int
    cacert: str = ""

    @property
    def api(self) -> str:
        """The base of OpenAI's routes."""
        return f"{self.url}/v1"

    @property
    def max_answer(self) -> int:
        """Tokens that an answer may have."""
        return min(MAX_ANSWER, self.context // 4)


class Setting(NamedTuple):
    """What sets an agent to a server.

    variables: its environment; None takes a variable away. words: its flags, before the user's. files: names and
    contents of files in the folder that was named.
    """

    variables: dict[str, str | None]
    words: tuple[str, ...] = ()
    files: tuple[tuple[str, str], ...] = ()


class Agent(NamedTuple):
    """An agent. install: the command that installs it. needs: tokens of context without which its first prompt or its
    work does not fit, by docs/howto-agents.md. setting: takes the target, and the folder of the files."""

    program: str
    install: str
    needs: int
    setting: Callable[[Target, str], Setting]


def _claude(target: Target, folder: str) -> Setting:
    variables: dict[str, str | None] = {
        "ANTHROPIC_BASE_URL": target.url,
        "ANTHROPIC_AUTH_TOKEN": target.key,
        "ANTHROPIC_API_KEY": "",
        "ANTHROPIC_MODEL": target.model,
        "ANTHROPIC_SMALL_FAST_MODEL": target.model,
        **{f"ANTHROPIC_DEFAULT_{size}_MODEL": target.model for size in ("HAIKU", "SONNET", "OPUS", "FABLE")},
        "CLAUDE_CODE_SUBAGENT_MODEL": target.model,
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(target.context),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "CLAUDE_CODE_USE_BEDROCK": "0",
        "CLAUDE_CODE_USE_VERTEX": "0",
        "CLAUDE_CODE_USE_FOUNDRY": "0",
    }
    # The "env" of the user's settings would take the place of the environment.
    settings = _text({"env": variables, "model": target.model})
    return Setting(variables, ("--settings", f"{folder}/settings.json"), (("settings.json", settings),))


def _codex(target: Target, folder: str) -> Setting:
    values = {
        "model": target.model,
        "model_provider": "headrace",
        "model_catalog_json": f"{folder}/models.json",
        "model_providers.headrace.name": "headrace",
        "model_providers.headrace.base_url": target.api,
        "model_providers.headrace.env_key": "HEADRACE_API_KEY",
        "model_providers.headrace.wire_api": "responses",
        "web_search": "disabled",
        "check_for_update_on_startup": False,
        "analytics.enabled": False,
        "feedback.enabled": False,
    }
    model = {
        "slug": target.model,
        "display_name": target.model,
        "description": "A model served by headrace",
        "base_instructions": "You are a coding agent. You work in the user's folder, with the tools that you have.",
        "shell_type": "unified_exec",
        "apply_patch_tool_type": "freeform",
        "context_window": target.context,
        "truncation_policy": {"mode": "tokens", "limit": min(10_000, target.context // 4)},
        "supports_parallel_tool_calls": True,
        "supports_reasoning_summaries": False,
        "support_verbosity": False,
        "supported_reasoning_levels": [],
        "experimental_supported_tools": [],
        "visibility": "list",
        "supported_in_api": True,
        "priority": 1,
    }
    # JSON's texts and switches are TOML's too.
    words = [word for name, value in values.items() for word in ("-c", f"{name}={json.dumps(value)}")]
    return Setting({"HEADRACE_API_KEY": target.key}, tuple(words), (("models.json", _text({"models": [model]})),))


def _opencode(target: Target, folder: str) -> Setting:
    del folder
    model = {"name": target.model, "limit": {"context": target.context, "output": target.max_answer}}
    config = {
        "$schema": "https://opencode.ai/config.json",
        "provider": {
            "headrace": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "headrace",
                "options": {"baseURL": target.api, "apiKey": target.key},
                "models": {target.model: model},
            }
        },
        "enabled_providers": ["headrace"],
        "model": f"headrace/{target.model}",
        "small_model": f"headrace/{target.model}",
        "share": "disabled",
        "autoupdate": False,
    }
    variables: dict[str, str | None] = {
        "OPENCODE_CONFIG_CONTENT": json.dumps(config),
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        "OPENCODE_DISABLE_SHARE": "1",
    }
    return Setting(variables)


def _qwen(target: Target, folder: str) -> Setting:
    settings = {
        "general": {"enableAutoUpdate": False, "disableAutoUpdate": True, "disableUpdateNag": True},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "model": {"generationConfig": {"contextWindowSize": target.context}},
    }
    variables: dict[str, str | None] = {
        "OPENAI_BASE_URL": target.api,
        "OPENAI_API_KEY": target.key,
        "OPENAI_MODEL": target.model,
        "QWEN_CODE_MAX_OUTPUT_TOKENS": str(target.max_answer),
        "QWEN_CODE_SYSTEM_SETTINGS_PATH": f"{folder}/settings.json",
        "QWEN_TELEMETRY_ENABLED": "false",
    }
    words = ("--auth-type", "openai", "--model", target.model)
    return Setting(variables, words, (("settings.json", _text(settings)),))


def _aider(target: Target, folder: str) -> Setting:
    name = f"openai/{target.model}"
    facts = {
        "max_input_tokens": target.context,
        "max_output_tokens": target.max_answer,
        "input_cost_per_token": 0,
        "output_cost_per_token": 0,
        "litellm_provider": "openai",
        "mode": "chat",
    }
    variables: dict[str, str | None] = {
        "OPENAI_API_BASE": target.api,
        "OPENAI_API_KEY": target.key,
        "AIDER_MODEL": name,
        "AIDER_WEAK_MODEL": name,
        "AIDER_EDITOR_MODEL": name,
        "AIDER_MODEL_METADATA_FILE": f"{folder}/models.json",
        "AIDER_ANALYTICS": "false",
        "AIDER_CHECK_UPDATE": "false",
        "AIDER_SHOW_RELEASE_NOTES": "false",
        "AIDER_SHOW_MODEL_WARNINGS": "false",
        # Its table of prices comes from the network otherwise.
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    return Setting(variables, (), (("models.json", _text({name: facts})),))


def _pi(target: Target, folder: str) -> Setting:
    model = {
        "id": target.model,
        "name": target.model,
        "reasoning": False,
        "input": ["text"],
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        "contextWindow": target.context,
        "maxTokens": target.max_answer,
    }
    provider = {
        "baseUrl": target.api,
        "apiKey": "HEADRACE_API_KEY",
        "api": "openai-completions",
        "models": [model],
    }
    # An extension leaves the user's models, sessions and settings in their place.
    extension = f'export default (pi) => pi.registerProvider("headrace", {json.dumps(provider, indent=1)});\n'
    variables: dict[str, str | None] = {
        "HEADRACE_API_KEY": target.key,
        "PI_OFFLINE": "1",
        "PI_SKIP_VERSION_CHECK": "1",
        "PI_TELEMETRY": "0",
    }
    words = ("--extension", f"{folder}/headrace.js", "--provider", "headrace", "--model", target.model)
    return Setting(variables, words, (("headrace.js", extension),))


def _crush(target: Target, folder: str) -> Setting:
    model = {
        "id": target.model,
        "name": target.model,
        "context_window": target.context,
        "default_max_tokens": target.max_answer,
    }
    chosen = {"provider": "headrace", "model": target.model}
    provider = {
        "name": "headrace",
        "type": "openai-compat",
        "base_url": target.api,
        "api_key": "$HEADRACE_API_KEY",
        "models": [model],
    }
    config = {
        "providers": {"headrace": provider},
        "models": {"large": chosen, "small": chosen},
        "options": {"disable_provider_auto_update": True, "disable_metrics": True},
    }
    variables: dict[str, str | None] = {
        "HEADRACE_API_KEY": target.key,
        "CRUSH_GLOBAL_CONFIG": folder,
        "CRUSH_GLOBAL_DATA": f"{folder}/data",
        "CRUSH_DISABLE_PROVIDER_AUTO_UPDATE": "1",
        "CRUSH_DISABLE_METRICS": "1",
        "DO_NOT_TRACK": "1",
    }
    return Setting(variables, (), (("crush.json", _text(config)),))


def _text(value: Any) -> str:
    return json.dumps(value, indent=1) + "\n"


AGENTS = {
    "claude": Agent("claude", "npm install -g @anthropic-ai/claude-code", 65_536, _claude),
    "codex": Agent("codex", "npm install -g @openai/codex", 32_768, _codex),
    "opencode": Agent("opencode", "npm install -g opencode-ai", 32_768, _opencode),
    "qwen": Agent("qwen", "npm install -g @qwen-code/qwen-code", 32_768, _qwen),
    "aider": Agent("aider", "pip install aider-chat", 32_768, _aider),
    "pi": Agent("pi", "npm install -g @mariozechner/pi-coding-agent", 16_384, _pi),
    "crush": Agent("crush", "npm install -g @charmland/crush", 32_768, _crush),
}


def setting_of(agent: Agent, target: Target, folder: str) -> Setting:
    """Return the setting of an agent, with the CA of the server where that has one of its own: Node's programs and the
    others read it from different variables."""
    setting = agent.setting(target, folder)
    if not target.cacert:
        return setting
    authorities: dict[str, str | None] = {"NODE_EXTRA_CA_CERTS": target.cacert, "SSL_CERT_FILE": target.cacert}
    return setting._replace(variables=setting.variables | authorities)
