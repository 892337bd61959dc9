"""Chat templates under llama-server's names of common formats, and the template for models that have none: chatml.

A row of `FORMS` has the texts before and after the messages of each role; `source` makes a Jinja template of it. Knows
no requests; `template_of` is called by `serve.loading`, `llm` and `cli.chat`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from headrace.protocol.bounds import BOUNDS
from headrace.protocol.errors import RequestError
from headrace.protocol.params import SamplingParams
from headrace.text.bounded import BoundedProcess
from headrace.text.templates import ChatTemplate
from headrace.text.tokenizer import Tokenizer

logger = logging.getLogger("headrace.server")

FALLBACK = "chatml"
SEP = "<｜end▁of▁sentence｜>"


class Form(NamedTuple):
    """A format of conversations. `system`, `user` and `assistant`: the texts before and after such a message.

    opening: the text that begins an answer; None: the text before the assistant's messages. start: begins the
    conversation. ends: the texts that end an answer; None: the text after the assistant's messages. trims: whether
    messages lose white space at their ends. inside: whether a system message stands within the user's next message.
    """

    system: tuple[str, str]
    user: tuple[str, str]
    assistant: tuple[str, str]
    opening: str | None = None
    start: str = ""
    ends: tuple[str, ...] | None = None
    trims: bool = False
    inside: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts that end an answer."""
        mark = self.assistant[1].strip()
        return self.ends if self.ends is not None else (mark,) if mark else ()


def _by_role(before: str, after: str, **more: str | bool | tuple[str, ...]) -> Form:
    """Return a format whose texts have the role's name in the place of {}."""
    texts = [(before.format(role), after) for role in ("system", "user", "assistant")]
    return Form(*texts, **more)  # type: ignore[arg-type]


def _llama2(system: tuple[str, str], between: str = "", trims: bool = False) -> Form:
    return Form(system, ("[INST] ", " [/INST]"), ("", "</s>" + between), ends=("</s>",), trims=trims, inside=True)


_SYS = ("<<SYS>>\n", "\n<</SYS>>\n\n")
_TURN = "<|END_OF_TURN_TOKEN|>"
_GLM_ENDS = ("<|user|>", "<|observation|>")
_EXAONE = Form(("[|system|]", "[|endofturn|]\n"), ("[|user|]", "\n"), ("[|assistant|]", "[|endofturn|]\n"), trims=True)

FORMS: dict[str, Form] = {
    "chatml": _by_role("<|im_start|>{}\n", "<|im_end|>\n"),
    "bailing": Form(("<role>SYSTEM</role>", ""), ("<role>HUMAN</role>", ""), ("<role>ASSISTANT</role>", ""),
                    ends=("<|role_end|>", "<role>HUMAN</role>")),
    "bailing-think": Form(("<role>SYSTEM</role>", ""), ("<role>HUMAN</role>", ""), ("<role>ASSISTANT</role>", ""),
                          "<role>ASSISTANT</role><think>", ends=("<|role_end|>", "<role>HUMAN</role>")),
    "bailing2": Form(("<role>SYSTEM</role>", "<|role_end|>"), ("<role>HUMAN</role>", "<|role_end|>"),
                     ("<role>ASSISTANT</role>", "<|role_end|>")),
    "chatglm3": _by_role("<|{}|>\n ", "", start="[gMASK]sop", opening="<|assistant|>", ends=_GLM_ENDS),
    "chatglm4": _by_role("<|{}|>\n", "", start="[gMASK]<sop>", ends=_GLM_ENDS),
    "glmedge": _by_role("<|{}|>\n", "", opening="<|assistant|>", ends=_GLM_ENDS),
    "command-r": Form(("<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>", _TURN),
                      ("<|START_OF_TURN_TOKEN|><|USER_TOKEN|>", _TURN),
                      ("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", _TURN), trims=True),
    "deepseek": Form(("", ""), ("### Instruction:\n", "\n"), ("### Response:\n", "\n<|EOT|>\n")),
    "deepseek2": Form(("", "\n\n"), ("User: ", "\n\n"), ("Assistant: ", SEP), "Assistant:"),
    "deepseek3": Form(("", "\n\n"), ("<｜User｜>", ""), ("<｜Assistant｜>", SEP)),
    "exaone3": _EXAONE,
    "exaone4": _EXAONE,
    "falcon3": _by_role("<|{}|>\n", "\n", ends=("<|user|>", "<|endoftext|>")),
    "gemma": Form(("", "\n\n"), ("<start_of_turn>user\n", "<end_of_turn>\n"),
                  ("<start_of_turn>model\n", "<end_of_turn>\n"), trims=True, inside=True),
    "gigachat": Form(("", "<|message_sep|>"),
                     ("user<|role_sep|>", "<|message_sep|>available functions<|role_sep|>[]<|message_sep|>"),
                     ("assistant<|role_sep|>", "<|message_sep|>")),
    "gpt-oss": _by_role("<|start|>{}<|message|>", "<|end|>", opening="<|start|>assistant", ends=("<|return|>",)),
    "granite": _by_role("<|start_of_role|>{}<|end_of_role|>", "<|end_of_text|>\n"),
    "granite-4.0": _by_role("<|start_of_role|>{}<|end_of_role|>", "<|end_of_text|>\n"),
    "granite-4.1": _by_role("<|start_of_role|>{}<|end_of_role|>", "<|end_of_text|>\n"),
    "grok-2": Form(("System: ", "<|separator|>\n\n"), ("Human: ", "<|separator|>\n\n"),
                   ("Assistant: ", "<|separator|>\n\n"), "Assistant:", trims=True),
    "hunyuan-dense": Form(("", "<｜hy_place▁holder▁no▁3｜>"), ("<｜hy_User｜>", ""),
                          ("<｜hy_Assistant｜>", "<｜hy_place▁holder▁no▁2｜>"), start="<｜hy_begin▁of▁sentence｜>"),
    "hunyuan-moe": Form(("<|startoftext|>", "<|extra_4|>"), ("<|startoftext|>", "<|extra_0|>"), ("", "<|eos|>")),
    "kimi-k2": Form(("<|im_system|>system<|im_middle|>", "<|im_end|>"), ("<|im_user|>user<|im_middle|>", "<|im_end|>"),
                    ("<|im_assistant|>assistant<|im_middle|>", "<|im_end|>")),
    "llama2": _llama2(("", "\n")),
    "llama2-sys": _llama2(_SYS),
    "llama2-sys-bos": _llama2(_SYS, "<s>"),
    "llama2-sys-strip": _llama2(_SYS, trims=True),
    "llama3": _by_role("<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>", trims=True),
    "llama4": _by_role("<|header_start|>{}<|header_end|>\n\n", "<|eot|>", trims=True),
    "megrez": _by_role("<|role_start|>{}<|role_end|>", "<|turn_end|>"),
    "minicpm": Form(("", ""), ("<用户>", "<AI>"), ("", ""), trims=True),
    "mistral-v1": Form(("", "\n\n"), (" [INST] ", " [/INST]"), (" ", "</s>"), "", inside=True),
    "mistral-v3": Form(("", "\n\n"), ("[INST] ", "[/INST]"), (" ", "</s>"), "", trims=True, inside=True),
    "mistral-v3-tekken": Form(("", "\n\n"), ("[INST]", "[/INST]"), ("", "</s>"), inside=True),
    "mistral-v7": Form(("[SYSTEM_PROMPT] ", "[/SYSTEM_PROMPT]"), ("[INST] ", "[/INST]"), (" ", "</s>"), ""),
    "mistral-v7-tekken": Form(("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"), ("[INST]", "[/INST]"), ("", "</s>")),
    "monarch": _by_role("<s>{}\n", "</s>\n"),
    "openchat": Form(("", "<|end_of_turn|>"), ("GPT4 Correct User: ", "<|end_of_turn|>"),
                     ("GPT4 Correct Assistant: ", "<|end_of_turn|>"), "GPT4 Correct Assistant:"),
    "orion": Form(("", "\n\n"), ("Human: ", "\n\nAssistant: </s>"), ("", "</s>"), inside=True),
    "phi3": _by_role("<|{}|>\n", "<|end|>\n"),
    "phi4": _by_role("<|im_start|>{}<|im_sep|>", "<|im_end|>"),
    "rwkv-world": Form(("System: ", "\n\n"), ("User: ", "\n\n"), ("Assistant: ", "\n\n"), "Assistant:", ends=("\n\n",),
                       trims=True),
    "seed_oss": _by_role("<seed:bos>{}\n", "<seed:eos>"),
    "smolvlm": Form(("", "\n\n"), ("User: ", "<end_of_utterance>\n"), ("Assistant: ", "<end_of_utterance>\n"),
                    "Assistant:", start="<|im_start|>"),
    "vicuna": Form(("", "\n\n"), ("USER: ", "\n"), ("ASSISTANT: ", "</s>\n"), "ASSISTANT:"),
    "vicuna-orca": Form(("SYSTEM: ", "\n"), ("USER: ", "\n"), ("ASSISTANT: ", "</s>\n"), "ASSISTANT:"),
    "yandex": Form(("", "\n\n"), (" Пользователь: ", "\n\n"), (" Ассистент: ", "\n\n"),
                   " Ассистент:[SEP]", ends=("\n\n",), inside=True),
    "zephyr": _by_role("<|{}|>\n", "<|endoftext|>\n"),
}  # fmt: skip
"""By llama-server's names. Each is the format as its model's makers describe it, for plain texts without tools."""


def source(form: Form, has_bos: bool) -> str:
    """Return a Jinja template that writes conversations in a format. `has_bos`: it begins with the token bos_token.

    A message of a role that the format lacks, such as tool, is written as the user's."""
    text = "(message.content | trim)" if form.trims else "message.content"
    system, user, assistant = (_around(pair, text) for pair in (form.system, form.user, form.assistant))
    opening = form.assistant[0] if form.opening is None else form.opening
    note = rest = ""
    if form.inside:
        note = "{%- set ns = namespace(note='') -%}"
        before, after = map(_quoted, form.system)
        system = f"{{%- set ns.note = ns.note + {before} + {text} + {after} -%}}"
        user = _around(form.user, f"ns.note + {text}") + "{%- set ns.note = '' -%}"
        rest = f"{{%- if ns.note -%}}{_around(form.user, 'ns.note')}{{%- endif -%}}"
    # A format that begins with a mark of its own needs no bos_token.
    bos = "{{- bos_token -}}" if has_bos and not form.start and not form.user[0].startswith("<s>") else ""
    return (
        f"{note}{bos}{_write(form.start)}{{%- for message in messages -%}}"
        f"{{%- if message.role == 'system' or message.role == 'developer' -%}}{system}"
        f"{{%- elif message.role == 'assistant' -%}}{assistant}{{%- else -%}}{user}{{%- endif -%}}{{%- endfor -%}}"
        f"{rest}{{%- if add_generation_prompt -%}}{_write(opening)}{{%- endif -%}}"
    )


def _around(pair: tuple[str, str], text: str) -> str:
    return f"{{{{- {_quoted(pair[0])} + {text} + {_quoted(pair[1])} -}}}}"


def _write(text: str) -> str:
    return f"{{{{- {_quoted(text)} -}}}}" if text else ""


def _quoted(text: str) -> str:
    """Return a literal of Jinja's."""
    return json.dumps(text, ensure_ascii=False)


def template_of(
    tokenizer: Tokenizer,
    chat_template: str | None = None,
    process: BoundedProcess | None = None,
    warn: Callable[..., None] = logger.warning,
) -> ChatTemplate:
    """Return the chat template of `tokenizer`, or `chat_template`: a name of `FORMS`, a Jinja source, or a file. A
    tokenizer without one gets chatml, with a warning by `warn`, which takes a format and its values. Raises
    `RequestError` where there is no such file."""
    if chat_template is not None and chat_template not in FORMS:
        is_text = "{" in chat_template or "\n" in chat_template
        if not is_text and not Path(chat_template).is_file():
            raise RequestError(
                "chat_template", chat_template, f"a Jinja template, the path of one, or one of {', '.join(FORMS)}"
            )
        return ChatTemplate.of(tokenizer, chat_template, process)
    if chat_template is None and tokenizer.chat_template is not None:
        return ChatTemplate.of(tokenizer, None, process)
    if chat_template is None:
        warn(
            "the model has no chat template, so chats are written as %s, which it may not know; --chat-template names "
            "another",
            FALLBACK,
        )
    form = FORMS[chat_template or FALLBACK]
    # A model may have a template for requests with tools alone.
    others = {} if chat_template is not None else tokenizer.chat_templates
    sources = {"default": source(form, _adds_bos(tokenizer)), **others}
    return ChatTemplate(sources, tokenizer.special_tokens, process, form.marks, tokenizer.begin_of_chats)


def with_ends(params: SamplingParams, template: ChatTemplate, tokenizer: Tokenizer) -> SamplingParams:
    """Return the parameters of a chat whose answer also ends at the end of a turn in the template: at a special token,
    or at another text."""
    if not template.ends:
        return params
    token_ids = {end: tokenizer.token_to_id(end) for end in template.ends}
    special = [i for i in token_ids.values() if i is not None and tokenizer.is_special(i)]
    texts = [end for end, i in token_ids.items() if i not in special]
    # Both lists are bounded; the request's own come first.
    stop = [*(params.stop or ()), *texts][: int(BOUNDS["stop"].high)]
    stop_ids = [*(params.stop_token_ids or ()), *special][: int(BOUNDS["stop_token_ids"].high)]
    return msgspec.structs.replace(params, stop=stop or None, stop_token_ids=stop_ids or None)


def _adds_bos(tokenizer: Tokenizer) -> bool:
    """Return whether the tokenizer puts bos_token before a text."""
    bos = tokenizer.special_tokens.get("bos_token")
    first = tokenizer.encode("a", add_special_tokens=True)[:1]
    return bos is not None and first == [tokenizer.token_to_id(bos)]
