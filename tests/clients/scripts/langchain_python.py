"""langchain with its packages for OpenAI's, Anthropic's and Ollama's API, and an agent."""

import anthropic
import openai
import report
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_ollama import ChatOllama, OllamaEmbeddings
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from report import check, expect

OPEN = {"base_url": report.URL + "/v1", "api_key": "none", "max_retries": 0}
SCRIPTED = {"base_url": report.SCRIPTED_URL + "/v1", "api_key": report.KEY, "max_retries": 0, "model": "scripted"}
ANTHROPIC = {"max_retries": 0, "max_tokens": 200}


def openai_model(**more):
    return ChatOpenAI(**OPEN | {"model": "builtin", "max_tokens": 20} | more)


scripted = {
    "openai": ChatOpenAI(**SCRIPTED),
    "anthropic": ChatAnthropic(model="scripted", base_url=report.SCRIPTED_URL, api_key=report.KEY, **ANTHROPIC),
    "ollama": ChatOllama(
        model="scripted",
        base_url=report.SCRIPTED_URL,
        client_kwargs={"headers": {"Authorization": f"Bearer {report.KEY}"}},
    ),
}


def weather(city: str) -> str:
    """The weather in a city."""
    return report.RESULT


@check("chat")
def _():
    expect(openai_model().invoke("Say hello.").text, "no text")
    expect(ChatAnthropic(model="builtin", base_url=report.URL, api_key="none", **ANTHROPIC).invoke("Hello.").text, "no")
    expect(ChatOllama(model="builtin", base_url=report.URL, num_predict=20).invoke("Say hello.").text, "no text")


@check("stream")
def _():
    for name, model in scripted.items():
        pieces = [part.text for part in model.stream("Hello.")]
        expect(len(pieces) > 2 and "".join(pieces) == "Hello from the script.", (name, pieces))


@check("system prompt")
def _():
    for name, model in scripted.items():
        reply = model.invoke([("system", report.SYSTEM), ("user", report.QUOTE)])
        expect(report.SYSTEM in reply.text, (name, reply))


@check("tool call")
def _():
    for name, model in scripted.items():
        reply = model.bind_tools([weather]).invoke("How warm is Rome?")
        expect(reply.tool_calls[0]["args"] == {"city": "Rome"}, (name, reply))


@check("tool result")
def _():
    for name, model in scripted.items():
        state = create_agent(model, [weather]).invoke({"messages": [("user", "How warm is Rome?")]})
        last = state["messages"][-1]
        expect(report.RESULT in last.text and len(state["messages"]) == 4, (name, state))


@check("structured output")
def _():
    schema = report.SCHEMA | {"title": "answer", "description": "A colour and a number"}
    for method in ("json_schema", "function_calling"):
        model = openai_model(max_tokens=200).with_structured_output(schema, method=method)
        report.check_document(model.invoke("Name a colour."))
    ollama = ChatOllama(model="builtin", base_url=report.URL, num_predict=200)
    report.check_document(ollama.with_structured_output(schema, method="json_schema").invoke("Name a colour."))


@check("embeddings")
def _():
    # Its own tokenizer would be loaded from the network.
    model = OpenAIEmbeddings(**OPEN, model="builtin", check_embedding_ctx_length=False)
    one, two = model.embed_documents(["A cat.", "A dog."])
    expect(len(one) == len(two) > 1, one)
    expect(
        len(OllamaEmbeddings(model="builtin", base_url=report.URL).embed_query("A cat.")) == len(one), "another size"
    )


@check("any model name")
def _():
    expect(openai_model(model="gpt-3.5-turbo").invoke("Say hello.").text, "no text")


report.refuses(
    "unknown model", openai.NotFoundError, lambda: ChatOpenAI(**SCRIPTED | {"model": "none"}).invoke("Hello.")
)


@check("context overflow")
def _():
    from langchain_core.exceptions import ContextOverflowError

    report.refusal(ContextOverflowError, lambda: openai_model().invoke(report.TOO_LONG))
    claude = ChatAnthropic(model="builtin", base_url=report.URL, api_key="none", **ANTHROPIC)
    report.refusal(ContextOverflowError, lambda: claude.invoke(report.TOO_LONG))


@check("wrong key")
def _():
    report.refusal(openai.AuthenticationError, lambda: ChatOpenAI(**SCRIPTED | {"api_key": "wrong"}).invoke("Hello."))
    wrong = ChatAnthropic(model="scripted", base_url=report.SCRIPTED_URL, api_key="wrong", **ANTHROPIC)
    report.refusal(anthropic.AuthenticationError, lambda: wrong.invoke("Hello."))


@check("usage")
def _():
    for name, model in scripted.items():
        usage = model.invoke("Hello.").usage_metadata
        expect(usage["input_tokens"] and usage["output_tokens"], (name, usage))


@check("cancel")
def _():
    for model in scripted.values():
        more = {} if isinstance(model, ChatOllama) else {"max_tokens": 50_000}
        stream = model.stream(report.COUNT, **more)
        for _ in zip(range(5), stream, strict=False):
            pass
        stream.close()
        report.await_stop()


@check("max_tokens above the context")
def _():
    report.refusal(openai.BadRequestError, lambda: openai_model(max_tokens=report.MAX_TOKENS).invoke("Hello."))
    model = ChatOllama(model="builtin", base_url=report.URL, num_predict=report.MAX_TOKENS)
    expect(model.invoke("Say hello.").text, "no text")


@check("reasoning")
def _():
    reply = scripted["ollama"].model_copy(update={"reasoning": True}).invoke("Think.")
    expect("Two and two" in reply.additional_kwargs["reasoning_content"], reply)
    claude = scripted["anthropic"].model_copy(
        update={"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000}
    )
    expect(claude.invoke("Think.").content[0]["type"] == "thinking", "no thinking by Anthropic's API")
