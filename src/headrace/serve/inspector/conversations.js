// Conversations, kept in this browser alone: each under a separate name, so that two tabs do not overwrite each other. Each is
// checked by itself, and one that does not have the form of a conversation is left out: other programs write here too.

import { newAnswer, textOfQuestion } from "./answers.js";

const PREFIX = "headrace.conversation.";

/** `system` is the system prompt, `tools` the JSON of the tools that the model may call, `knobs` has the values of `settings.js`,
 * as texts. A message is a question {role: "user", content, attachments: [{name, text, image}]}, an answer as in `answers.js`, or
 * the result of a tool {role: "tool", content, callId}. */
export function newConversation(like) {
  const id = `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 8)}`;
  return { id, title: "", changed: Date.now(), model: like?.model ?? "", system: like?.system ?? "", tools: like?.tools ?? "", knobs: { ...like?.knobs }, messages: [] };
}

// A form is a sample of a text or number, a list of one form, an object of forms, or a function that checks a value.
const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
function fits(value, form) {
  if (typeof form === "function") return form(value);
  if (Array.isArray(form)) return Array.isArray(value) && value.every((each) => fits(each, form[0]));
  if (typeof form === "object") return isObject(value) && Object.entries(form).every(([name, each]) => fits(value[name], each));
  return typeof value === typeof form;
}
const orNone = (form) => (value) => value === undefined || fits(value, form);
const orNull = (form) => (value) => value === null || fits(value, form), mapOf = (form) => (value) => isObject(value) && Object.values(value).every((each) => fits(each, form));
const ANSWER = {
  content: "", reasoning: "", calls: [{ id: "", name: "", arguments: "" }], isLeftOut: false, ids: [0], promptIds: [0], bins: [0], numKept: 0, knobs: mapOf(orNull(0)), seed: orNull(0), finish: "", error: orNull(""),
  note: orNull(""), usage: orNull({ prompt_tokens: 0, completion_tokens: 0 }), times: orNull({ sent: 0, first: orNull(0), thought: orNone(orNull(0)), last: orNull(0) }),
  explain: orNull({ latency: 0, split: "", sentences: [""], parts: [{ name: "", seconds: 0 }], prefix_cache: [{ num_cached_tokens: 0, sentence: "" }] }),
};
const FORMS = {
  assistant: ANSWER, tool: { content: "", callId: "" }, user: { content: "", isLeftOut: orNone(false), attachments: orNone([{ name: "", text: "", image: orNone("") }]) },
};
const CONVERSATION = { ...newConversation(), knobs: mapOf(""), messages: [(value) => isObject(value) && Object.hasOwn(FORMS, value.role) && fits(value, FORMS[value.role])] };

/** Return the conversation under a name, or null if the entry holds none. */
function read(name) {
  try {
    const conversation = { ...newConversation(), ...JSON.parse(localStorage.getItem(name)) };
    // An answer without a reason: the page was closed while it came.
    conversation.messages = conversation.messages.map((each) => (each.role !== "assistant" ? each : { ...newAnswer(), ...each, finish: each.finish ?? "stopped" }));
    return fits(conversation, CONVERSATION) && PREFIX + conversation.id === name ? conversation : null;
  } catch {
    return null;
  }
}

/** Return all conversations, the last changed first, and how many entries hold none. */
export function conversations() {
  const names = Object.keys(localStorage).filter((name) => name.startsWith(PREFIX));
  const all = names.map(read).filter(Boolean).sort((a, b) => b.changed - a.changed);
  return { all, numDamaged: names.length - all.length };
}

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

export const forget = (conversation) => localStorage.removeItem(PREFIX + conversation.id);

export const titleOf = ({ title, messages }) => title || (messages[0]?.content || messages[0]?.attachments?.[0]?.name)?.slice(0, 60) || "New conversation";

/** Return whether a conversation has some words: in its title, system prompt, messages or documents. */
export function has(conversation, words) {
  const sought = words.trim().toLowerCase();
  const texts = [titleOf(conversation), conversation.system, ...conversation.messages.map(textOfQuestion)];
  return texts.some((text) => text.toLowerCase().includes(sought));
}

/** Offer a conversation as a file. */
export function exportJson(conversation) {
  const url = URL.createObjectURL(new Blob([JSON.stringify(conversation, null, 2)], { type: "application/json" }));
  Object.assign(document.createElement("a"), { href: url, download: `conversation-${conversation.id}.json` }).click();
  URL.revokeObjectURL(url);
}
