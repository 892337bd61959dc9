// Conversations, kept in this browser alone: each under a separate name, so that two tabs do not overwrite each other. Each is
// checked by itself, and one that does not have the form of a conversation is left out: other programs write here too.

import { newAnswer } from "./answers.js";

const PREFIX = "headrace.conversation.";

/** `system` is the system prompt, `knobs` has the values of `settings.js`, as texts. `messages` have the form of
 * `answers.js`. */
export function newConversation(like) {
  const id = `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 8)}`;
  return { id, title: "", changed: Date.now(), model: like?.model ?? "", system: like?.system ?? "", knobs: { ...like?.knobs }, messages: [] };
}

// Checks of a value, made of checks of its parts.
const isText = (value) => typeof value === "string";
const isNumber = Number.isFinite;
const orNull = (is) => (value) => value === null || is(value);
const isList = (is) => (value) => Array.isArray(value) && value.every(is);
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const isMap = (is) => (value) => isObject(value) && Object.values(value).every(is);
const isRecord = (fields) => (value) => isObject(value) && Object.entries(fields).every(([name, is]) => is(value[name]));

const EXPLAIN = {
  latency: isNumber, split: isText, sentences: isList(isText), parts: isList(isRecord({ name: isText, seconds: isNumber })),
  prefix_cache: isList(isRecord({ num_cached_tokens: isNumber, sentence: isText })),
};
const ANSWER = {
  content: isText, reasoning: isText, ids: isList(isNumber), promptIds: isList(isNumber), bins: isList(isNumber), numKept: isNumber,
  knobs: isMap(orNull(isNumber)), seed: orNull(isNumber), finish: orNull(isText), error: orNull(isText), note: orNull(isText),
  usage: orNull(isRecord({ prompt_tokens: isNumber, completion_tokens: isNumber })), explain: orNull(isRecord(EXPLAIN)),
  times: orNull(isRecord({ sent: isNumber, first: orNull(isNumber), last: orNull(isNumber) })),
};
const MESSAGES = { user: isRecord({ content: isText }), assistant: isRecord(ANSWER) };
const isMessage = (value) => Object.hasOwn(MESSAGES, value.role) && MESSAGES[value.role](value);
const isConversation = isRecord({
  id: isText, title: isText, changed: isNumber, model: isText, system: isText, knobs: isMap(isText), messages: isList(isMessage),
});

/** Return the conversation under a name, or null if there is none in that entry. */
function read(name) {
  try {
    const conversation = { ...newConversation(), ...JSON.parse(localStorage.getItem(name)) };
    conversation.messages = conversation.messages.map((each) => (each.role === "user" ? each : { ...newAnswer(), ...each }));
    // The page was closed while the answer came.
    for (const message of conversation.messages) if (message.finish === null) message.finish = "stopped";
    if (isConversation(conversation) && PREFIX + conversation.id === name) return conversation;
  } catch (error) {
    console.warn(`${name}: ${error}`);
  }
  return null;
}

/** Return all conversations, the last changed first, and the names of the entries that hold none. */
export function conversations() {
  const names = Object.keys(localStorage).filter((name) => name.startsWith(PREFIX));
  const entries = names.map((name) => [name, read(name)]);
  return {
    all: entries.map(([, each]) => each).filter(Boolean).sort((a, b) => b.changed - a.changed),
    damaged: entries.filter(([, each]) => !each).map(([name]) => name),
  };
}

/** Delete entries of this browser. */
export const removeEntries = (names) => names.forEach((name) => localStorage.removeItem(name));

/** Keep a conversation. Returns false if the browser has no room for it. */
export function keep(conversation) {
  try {
    localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
    return true;
  } catch (error) {
    if (error.name !== "QuotaExceededError") throw error;
    return false;
  }
}

export const forget = (conversation) => removeEntries([PREFIX + conversation.id]);

export const titleOf = ({ title, messages }) => title || messages[0]?.content.slice(0, 60) || "New conversation";

/** Offer a conversation as a file. */
export function exportJson(conversation) {
  const url = URL.createObjectURL(new Blob([JSON.stringify(conversation, null, 2)], { type: "application/json" }));
  const link = Object.assign(document.createElement("a"), { href: url, download: `conversation-${conversation.id}.json` });
  link.click();
  URL.revokeObjectURL(url);
}
