// The chat at /: conversations, the answers of the selected one, and the engine at work beside it.

import { differsAt, isRunning, newAnswer, receive, requestOf } from "./answers.js";
import { Composer } from "./compose.js";
import { conversations, exportJson, forget, has, keep, newConversation, titleOf } from "./conversations.js";
import { Engine } from "./engine.js";
import { count, html, useEffect, useLayoutEffect, useRedraw, useRef, useState } from "./lib.js";
import { Answer, Question, Result } from "./messages.js";
import { ModelPicker, Settings, knobsOf, systemOf, toolsOf, useServer } from "./settings.js";
import { ends, textOf } from "./tokens.js";
import { Welcome } from "./welcome.js";

const NEAR_PX = 80;

function List({ all, current, onSelect, onNew, onChange, onDelete }) {
  const rename = () => {
    const title = prompt("Name of the conversation", titleOf(current));
    if (title !== null) onChange(Object.assign(current, { title: title.trim() }));
  };
  const remove = () => confirm(`Delete “${titleOf(current)}”?`) && onDelete(current);
  const [words, seek] = useState("");
  const found = words.trim() ? all.filter((each) => has(each, words)) : all;
  return html`<nav class="conversations" aria-label="Conversations">
    <details open=${matchMedia("(min-width: 60rem)").matches}><summary>Conversations</summary>
      <button type="button" onClick=${onNew}>New</button>
      ${all.length > 1 && html`<label><span class="hidden">Search in conversations</span>
        <input type="search" placeholder="Search" value=${words} onInput=${(event) => seek(event.target.value)} /></label>`}
      ${words.trim() && html`<p class="muted" role="status">${count(found.length)} of ${count(all.length)}</p>`}
      <ul>${found.map((each) => html`<li key=${each.id}><button type="button" aria-current=${each === current ? "true" : undefined}
        onClick=${() => onSelect(each)}>${titleOf(each)}</button></li>`)}</ul>
      <div class="actions">
        <button type="button" onClick=${rename}>Rename</button>
        <button type="button" onClick=${() => exportJson(current)}>Export</button>
        <button type="button" onClick=${remove}>Delete</button>
      </div>
    </details></nav>`;
}

/** Keep the end of the page in sight while an answer comes, unless the reader has scrolled away from it. Returns a reference:
 * true lets it be seen again. */
function useFollow(hasMessages) {
  const isAtEnd = useRef(true);
  const page = document.documentElement;
  useEffect(() => {
    const note = () => (isAtEnd.current = page.scrollHeight - page.clientHeight - page.scrollTop < NEAR_PX);
    addEventListener("scroll", note);
    return () => removeEventListener("scroll", note);
  }, []);
  useLayoutEffect(() => {
    if (isAtEnd.current && hasMessages) page.scrollTop = page.scrollHeight;
  });
  return isAtEnd;
}

/** Mark the question that an answer was refused for, so that the conversation can go on without it. */
function markLeftOut(messages) {
  const question = messages.findLast(({ role }) => role === "user");
  if (question) question.isLeftOut = true;
}

export function Chat() {
  const redraw = useRedraw();
  const { models, defaults, error } = useServer();
  const [stored] = useState(conversations), [all, setAll] = useState(stored.all);
  const [current, setCurrent] = useState(() => all[0] ?? newConversation());
  const [status, setStatus] = useState("");
  // What stops the answer of each conversation that has one coming.
  const running = useRef(new Map());
  const [edited, setEdited] = useState(-1);
  const isAtEnd = useFollow(current.messages.length > 0);

  const model = models.some(({ id }) => id === current.model) ? current.model : models[0]?.id;
  const limit = models.find(({ id }) => id === model)?.max_model_len;
  const { messages } = current;
  const last = messages.at(-1);

  const changed = (conversation) => {
    redraw();
    if (!conversation.messages.length) return;
    conversation.changed = Date.now();
    if (!keep(conversation)) setStatus("This browser has no room for the conversation: it is lost when the page is closed.");
    setAll((before) => (before.includes(conversation) ? before : [conversation, ...before]));
  };

  /** Let the model write `answer` at the end of the conversation. */
  const run = async (path, body, answer) => {
    const conversation = current;
    const controller = new AbortController();
    running.current.set(conversation.id, controller);
    conversation.messages.push(answer);
    changed(conversation);
    setStatus("The answer is coming.");
    await receive(path, { model, ...body }, answer, controller.signal, redraw);
    running.current.delete(conversation.id);
    if (answer.isLeftOut) markLeftOut(conversation.messages);
    setStatus(answer.error ? "The answer failed." : `The answer is there: ${count(answer.ids.length)} tokens.`);
    changed(conversation);
  };

  const reply = (more = {}) => {
    isAtEnd.current = true;
    const knobs = { ...knobsOf(current), ...more };
    const answer = Object.assign(newAnswer(), { knobs: { ...defaults, ...knobs } });
    try {
      const body = { messages: [...systemOf(current), ...requestOf(messages)], ...toolsOf(current), ...defaults, ...knobs };
      return [answer, run("/v1/chat/completions", body, answer)];
    } catch (failure) {
      messages.push(Object.assign(answer, { finish: "error", error: failure.message }));
      return [answer, changed(current)];
    }
  };

  const send = (content, attachments = [], index = messages.length) => {
    messages.splice(index, Infinity, { role: "user", content, ...(attachments.length ? { attachments } : {}) });
    reply();
  };

  /** Give the result of a tool; when all calls of the answer have theirs, the model goes on. */
  const give = (call, content) => {
    messages.push({ role: "tool", content, callId: call.id });
    const { calls } = messages.findLast(({ role }) => role === "assistant");
    if (calls.every(({ id }) => given.has(id) || id === call.id)) reply();
    else changed(current);
  };

  const again = async (seed) => {
    const before = messages.pop();
    const [answer, done] = reply(seed === null ? {} : { seed });
    await done;
    if (seed === null || answer.error) return;
    const place = differsAt(answer, before);
    answer.note = place < 0 ? `the same ${count(answer.ids.length)} tokens as before` : `differs from token ${count(place + 1)} on`;
    changed(current);
  };

  /** Go on from the answer's first `index` tokens and the token `id`, in place of the token that came there. */
  const take = async (index, id) => {
    const before = messages.at(-1);
    const ids = [...before.ids.slice(0, index), id];
    const { promptIds, knobs, seed } = before;
    const content = await textOf(model, ids);
    const note = `${id === before.ids[index] ? "the same" : "another"} token ${count(index + 1)} was taken`;
    const answer = Object.assign(newAnswer(), { ids, numKept: ids.length, promptIds, knobs, seed, content, note });
    const most = Math.min(knobs.max_tokens ?? Infinity, limit - promptIds.length) - ids.length;
    const endsHere = most <= 0 || (await ends(model, [...promptIds, ...before.ids.slice(0, index)], id));
    messages.pop();
    if (!endsHere) return run("/v1/completions", { prompt: [...promptIds, ...ids], ...knobs, seed, max_tokens: most }, answer);
    messages.push(Object.assign(answer, { finish: "stop" }));
    return changed(current);
  };
  const takeOrFail = (index, id) =>
    take(index, id).catch((failure) => {
      last.error = failure.message;
      redraw();
    });

  const select = (conversation) => {
    setEdited(-1);
    isAtEnd.current = true;
    setCurrent(conversation);
  };
  const remove = (conversation) => {
    running.current.get(conversation.id)?.abort();
    forget(conversation);
    const rest = all.filter((each) => each !== conversation);
    setAll(rest);
    select(rest[0] ?? newConversation(conversation));
  };

  const isBusy = running.current.has(current.id);
  const stop = () => running.current.get(current.id)?.abort();
  useEffect(() => {
    const press = (event) => event.key === "Escape" && running.current.get(current.id)?.abort();
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, [current.id]);
  const answered = messages.findLast(({ role }) => role === "assistant");
  const calls = new Map(messages.flatMap((each) => each.calls ?? []).map(({ id, name }) => [id, name]));
  const given = new Set(messages.filter(({ role }) => role === "tool").map(({ callId }) => callId));
  const editLast = () => {
    const index = messages.findLastIndex(({ role }) => role === "user");
    setEdited(index);
    return index >= 0;
  };
  const actionsOf = (message) => {
    if (isBusy || message !== answered) return null;
    // A token is taken in a prompt of ids, which holds no pictures.
    const hasPictures = messages.some(({ attachments }) => attachments?.some(({ image }) => image));
    const further = message === last ? { again, ...(hasPictures ? {} : { take: takeOrFail }) } : {};
    return { ...further, ...(message.calls.length ? { result: give } : {}) };
  };
  const shown = (message, i) => {
    if (message.role === "tool") return html`<${Result} key=${`${current.id} ${i}`} message=${message} name=${calls.get(message.callId) ?? "a tool"} />`;
    if (message.role === "user") {
      return html`<${Question} key=${`${current.id} ${i} ${message.content}`} message=${message} limit=${limit} isEdited=${edited === i}
        onEdit=${(isOpen) => setEdited(isOpen ? i : -1)} onResend=${(text) => send(text, message.attachments, i)} />`;
    }
    return html`<${Answer} key=${`${current.id} ${i} ${message.seed} ${message.note}`} answer=${message} model=${model} limit=${limit}
      actions=${actionsOf(message)} given=${given} />`;
  };
  return html`
    <h1 class="hidden">Chat</h1>
    <${List} all=${all} current=${current} onSelect=${select} onNew=${() => select(newConversation(current))}
      onChange=${changed} onDelete=${remove} />
    <section class="thread" aria-label="Conversation">
      ${error && html`<p role="alert">${error.message}</p>`}
      ${stored.numDamaged > 0 && html`<p role="note">Conversations that are damaged in this browser's store, and left out: ${count(stored.numDamaged)}.</p>`}
      ${messages.length ? messages.map(shown) : html`<${Welcome} model=${model} limit=${limit} isBusy=${isBusy} onSend=${send} />`}
      <div class="foot">
        <${Composer} key=${current.id} isReady=${model !== undefined} isBusy=${isBusy} onSend=${send} onStop=${stop} onEditLast=${editLast} />
        <div class="below"><${ModelPicker} models=${models} model=${model} isAwaited=${isBusy && !last?.times?.first} onChoose=${(id) => changed(Object.assign(current, { model: id }))} />
          <${Settings} conversation=${current} defaults=${defaults} onChange=${changed} /></div>
        <p class="hidden" role="status">${status}</p>
      </div>
    </section>
    <${Engine} answer=${last?.role === "assistant" ? last : null} />`;
}
