// Conversations, kept in this browser alone: each under a separate name, so that two tabs do not overwrite each other.

const PREFIX = "headrace.conversation.";

/** `system` is the system prompt, `knobs` has the values of `settings.js`, as texts. `messages` have the form of
 * `answers.js`. */
export function newConversation(like) {
  const id = `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 8)}`;
  return { id, title: "", changed: Date.now(), model: like?.model ?? "", system: like?.system ?? "", knobs: { ...like?.knobs }, messages: [] };
}

function read(name) {
  try {
    const conversation = JSON.parse(localStorage.getItem(name));
    if (!Array.isArray(conversation.messages)) return null;
    // The page was closed while the answer came.
    for (const message of conversation.messages) if (message.finish === null) message.finish = "stopped";
    return { ...newConversation(), ...conversation };
  } catch (error) {
    console.warn(`${name} is no conversation: ${error}`);
    return null;
  }
}

/** Return all conversations, the last changed first. */
export function conversations() {
  const names = Object.keys(localStorage).filter((name) => name.startsWith(PREFIX));
  return names.map(read).filter(Boolean).sort((a, b) => b.changed - a.changed);
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

export const titleOf = ({ title, messages }) => title || messages[0]?.content.slice(0, 60) || "New conversation";

/** Offer a conversation as a file. */
export function exportJson(conversation) {
  const url = URL.createObjectURL(new Blob([JSON.stringify(conversation, null, 2)], { type: "application/json" }));
  const link = Object.assign(document.createElement("a"), { href: url, download: `conversation-${conversation.id}.json` });
  link.click();
  URL.revokeObjectURL(url);
}
