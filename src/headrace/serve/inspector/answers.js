// An answer as it comes. A message is {role, content}; an answer has more, see `newAnswer`.

import { events } from "./lib.js";

const BIN_MS = 250;
const MAX_BINS = 60;

/**
 * `ids` are the answer's tokens, of which the first `numKept` are of another answer; `promptIds` are those before them.
 * `knobs` are the sampling parameters, the server's defaults among them. `times` are milliseconds: sent, first token, last.
 * `bins` count the tokens of each `BIN_MS`. `explain` is the server's explanation, `finish` its reason or "stopped".
 */
export const newAnswer = () => ({
  role: "assistant", content: "", reasoning: "", ids: [], numKept: 0, promptIds: [], knobs: {}, seed: null, usage: null, explain: null, finish: null, error: null,
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
  answer.times = { sent: performance.now(), first: null, last: null };
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
    answer.content += text ?? delta?.content ?? "";
    answer.reasoning += delta?.reasoning_content ?? "";
    answer.finish = reason ?? answer.finish;
  }
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
