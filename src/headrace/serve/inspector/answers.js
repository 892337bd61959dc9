// An answer as it comes. A message is {role, content}; an answer has more, see `newAnswer`.

import { events } from "./lib.js";

const BIN_MS = 250;
const MAX_BINS = 60;

/**
 * `ids` are the answer's tokens, of which the first `numKept` are of another answer; `promptIds` are those before them.
 * `knobs` are the sampling parameters, the server's defaults among them. `times` are milliseconds: sent, first token, end of
 * the reasoning, last token. `calls` are of tools, whose arguments are JSON as a text. An answer that `isLeftOut`, as its
 * question, is not sent with what follows: the question did not fit. `bins` count the tokens of each `BIN_MS`. `explain` is the server's explanation, `finish` its reason or "stopped".
 */
export const newAnswer = () => ({
  role: "assistant", content: "", reasoning: "", calls: [], isLeftOut: false, ids: [], numKept: 0, promptIds: [], knobs: {}, seed: null, usage: null, explain: null, finish: null, error: null,
  progress: null, times: null, bins: [], note: null,
});

export const isRunning = (answer) => answer.finish === null;

/** Tokens a second: of the last two seconds while the answer comes, of all of it afterwards. */
export function rateOf({ ids, numKept, times, bins, finish }) {
  if (!times?.first) return 0;
  if (finish) return times.last > times.first ? (1000 * (ids.length - numKept - 1)) / (times.last - times.first) : 0;
  const recent = bins.slice(-9, -1);
  return recent.length ? (1000 * recent.reduce((sum, num) => sum + num, 0)) / (recent.length * BIN_MS) : 0;
}

export const ratesOf = ({ bins }) => bins.slice(-MAX_BINS).map((num) => (1000 * num) / BIN_MS);

/** Send a request and put its reply into `answer`, calling `changed` after each part. An abort is no error. */
export async function receive(path, body, answer, signal, changed) {
  answer.times = { sent: performance.now(), first: null, thought: null, last: null };
  const fields = { stream: true, stream_options: { include_usage: true }, return_token_ids: true, return_progress: true, explain: true };
  try {
    for await (const chunk of events(path, { method: "POST", body: { ...body, ...fields }, signal })) {
      if (chunk.error) throw new Error(chunk.error.message);
      take(answer, chunk);
      changed();
    }
    answer.finish ??= "error";
  } catch (error) {
    answer.finish = signal.aborted ? "stopped" : "error";
    answer.isLeftOut = error.code === "context_length_exceeded";
    if (!signal.aborted) answer.error = error.message;
  }
  answer.progress = null;
  changed();
}

function take(answer, chunk) {
  answer.seed ??= chunk.seed ?? null;
  answer.usage = chunk.usage ?? answer.usage;
  answer.explain = chunk.explain?.[0] ?? answer.explain;
  answer.progress = chunk.prompt_progress ?? answer.progress;
  for (const { delta, text, prompt_token_ids: promptIds, token_ids: ids, finish_reason: reason } of chunk.choices) {
    if (promptIds && !answer.promptIds.length) answer.promptIds = promptIds;
    if (ids?.length) count(answer, ids);
    const written = text ?? delta?.content ?? "";
    if (answer.reasoning && (written.trim() || delta?.tool_calls || reason)) answer.times.thought ??= performance.now();
    answer.content += written;
    answer.reasoning += delta?.reasoning_content ?? "";
    for (const call of delta?.tool_calls ?? []) addCall(answer.calls, call);
    answer.finish = reason ?? answer.finish;
  }
}

function addCall(calls, { index, id, function: part }) {
  calls[index] ??= { id: "", name: "", arguments: "" };
  calls[index].id = id ?? calls[index].id;
  calls[index].name += part?.name ?? "";
  calls[index].arguments += part?.arguments ?? "";
}

function count(answer, ids) {
  const now = performance.now();
  answer.times.first ??= now;
  answer.times.last = now;
  answer.ids.push(...ids);
  const bin = Math.floor((now - answer.times.first) / BIN_MS);
  while (answer.bins.length <= bin) answer.bins.push(0);
  answer.bins[bin] += ids.length;
}

/** A question's text as the model reads it: its documents, and then the text. */
export function textOfQuestion({ content, attachments = [] }) {
  const documents = attachments.filter(({ image }) => !image).map(({ name, text }) => {
    // Longer than any fence within.
    const fence = "`".repeat(Math.max(3, ...[...text.matchAll(/`+/g)].map(([ticks]) => ticks.length + 1)));
    return `${name}:\n${fence}\n${text}\n${fence}`;
  });
  return [...documents, content].filter(Boolean).join("\n\n");
}

/** A question as the model reads it: its pictures, if there are any, and then the text. */
function contentOf(message) {
  const pictures = (message.attachments ?? []).filter(({ image }) => image);
  const text = textOfQuestion(message);
  if (!pictures.length) return text;
  return [...pictures.map(({ image }) => ({ type: "image_url", image_url: { url: image } })), ...(text ? [{ type: "text", text }] : [])];
}

/** Return the messages of a request for the next answer of a conversation. Those that do not fit, and failures, are left out. */
export function requestOf(messages) {
  const kept = messages.filter(({ role, content, calls, isLeftOut }) => !isLeftOut && (role !== "assistant" || content || calls.length));
  return kept.map((message) => {
    const { role, content, calls, callId } = message;
    if (role === "user") return { role, content: contentOf(message) };
    if (role === "tool") return { role, content, tool_call_id: callId };
    const tool_calls = calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
    return { role, content, ...(calls.length ? { tool_calls } : {}) };
  });
}

/** The place of the first token in which two answers differ, -1 if they are the same. */
export function differsAt({ ids: left }, { ids: right }) {
  const place = left.findIndex((id, i) => id !== right[i]);
  return place < 0 && left.length !== right.length ? left.length : place;
}
