// The chat at /: conversations, the answers of the selected one, and the engine at work beside it.

import { isRunning, newAnswer, rateOf, ratesOf, receive } from "./answers.js";
import { conversations, exportJson, forget, keep, newConversation, titleOf } from "./conversations.js";
import { Engine, Sparkline } from "./engine.js";
import { count, html, json, seconds, useEffect, useLayoutEffect, useMemo, useReducer, useRef, useState } from "./lib.js";
import { markdown } from "./markdown.js";
import { Settings, knobsOf } from "./settings.js";
import { Bar, Tokens, ends, textOf } from "./tokens.js";

const NEAR_PX = 80;

/** Return a function that draws the component again, at most once for each frame of the screen. */
function useRedraw() {
  const [, redraw] = useReducer((number) => number + 1, 0);
  const frame = useRef(0);
  return () => {
    frame.current ||= requestAnimationFrame(() => {
      frame.current = 0;
      redraw();
    });
  };
}

/** The served models, and the server's defaults of the knobs; none of a folder of which no model, or no one model, is loaded. */
function useServer() {
  const [server, setServer] = useState({ models: [], defaults: {}, error: null });
  useEffect(() => {
    Promise.all([json("/v1/models"), json("/props").catch((error) => (error.status === 400 ? { default_generation_settings: { params: {} } } : Promise.reject(error)))]).then(
      ([{ data }, props]) => {
        const { temperature, top_p, top_k, min_p, repeat_penalty } = props.default_generation_settings.params;
        setServer({ models: data, defaults: { temperature, top_p, top_k, min_p, repetition_penalty: repeat_penalty }, error: null });
      },
      (error) => setServer({ models: [], defaults: {}, error }),
    );
  }, []);
  return server;
}

function Why({ explain }) {
  const cache = explain.prefix_cache[0];
  return html`<details class="why"><summary>Why so slow?</summary>
    ${explain.sentences.length > 0 && html`<ul>${explain.sentences.map((sentence) => html`<li>${sentence}</li>`)}</ul>`}
    <table><caption>Where ${seconds(explain.latency)} went${explain.parts.some(({ estimated }) => estimated) && ` (≈ is an estimate by ${explain.split})`}</caption>
      <tbody>${explain.parts.map(({ name, seconds: time, estimated }) => html`<tr>
        <th scope="row">${name.replaceAll("_", " ")}</th><td class="number">${estimated && "≈ "}${seconds(time)}</td>
        <td><${Bar} share=${time / explain.latency} /></td></tr>`)}</tbody></table>
    ${cache && html`<p>Prefix cache: ${count(cache.num_cached_tokens)} tokens; ${cache.sentence}.</p>`}
  </details>`;
}

/** Prompt progress, speed, time to the first token, and how full the context is. */
function Stats({ answer, limit }) {
  const { progress, times, usage, ids, promptIds } = answer;
  const running = isRunning(answer);
  if (running && progress && !times.first) {
    return html`<p class="stats"><progress max=${progress.total} value=${progress.processed} aria-label="Prompt" />
      reading ${count(progress.processed)} of ${count(progress.total)}</p>`;
  }
  const used = usage ? usage.prompt_tokens + usage.completion_tokens : promptIds.length + ids.length;
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  return html`<p class="stats">
    ${times?.first && html`<span>${rateOf(answer).toFixed(1)} tok/s</span>
      <${Sparkline} rates=${ratesOf(answer)} label=${`tokens a second, ${Math.round(Math.max(0, ...ratesOf(answer)))} at most`} />
      <span>first token after ${seconds((times.first - times.sent) / 1000)}</span>`}
    ${used > 0 && html`<span>context ${count(used)}${limit && ` of ${count(limit)}`}${cached > 0 && `, ${count(cached)} cached`}</span>`}
    ${answer.seed !== null && html`<span>seed ${answer.seed}</span>`}
    ${answer.finish === "length" && html`<span>cut at max tokens</span>`}${answer.finish === "stopped" && html`<span>stopped</span>`}
    ${answer.note && html`<span>${answer.note}</span>`}
  </p>`;
}

function Answer({ answer, model, limit, actions }) {
  const [showsTokens, setShowsTokens] = useState(false);
  const running = isRunning(answer);
  const text = useMemo(() => markdown(answer.content), [answer.content]);
  return html`<article class="answer" aria-label="Answer" aria-busy=${running}>
    ${answer.reasoning && html`<details class="reasoning" open=${running && !answer.content}><summary>Reasoning</summary>${markdown(answer.reasoning)}</details>`}
    <div class="text">${text}</div>
    ${answer.error && html`<p role="alert">${answer.error}</p>`}
    <${Stats} answer=${answer} limit=${limit} />
    ${!running && html`<div class="actions">
      ${actions && html`<button type="button" onClick=${() => actions.again(answer.seed)} disabled=${answer.seed === null}>Same seed again</button>
        <button type="button" onClick=${() => actions.again(null)}>Another answer</button>`}
      ${answer.ids.length > 0 && html`<button type="button" aria-expanded=${showsTokens} onClick=${() => setShowsTokens(!showsTokens)}>Tokens</button>`}
      ${navigator.clipboard && html`<button type="button" onClick=${() => navigator.clipboard.writeText(answer.content)}>Copy</button>`}
    </div>`}
    ${showsTokens && !running && html`<${Tokens} model=${model} answer=${answer} onTake=${actions?.take} />`}
    ${answer.explain && html`<${Why} explain=${answer.explain} />`}
  </article>`;
}

function Question({ message, onResend }) {
  const [isEdited, setEdited] = useState(false);
  if (!isEdited) {
    return html`<article class="question" aria-label="You"><p>${message.content}</p>
      <div class="actions"><button type="button" onClick=${() => setEdited(true)}>Edit</button></div></article>`;
  }
  const submit = (event) => {
    event.preventDefault();
    setEdited(false);
    onResend(event.target.elements.text.value);
  };
  return html`<form class="question" onSubmit=${submit}>
    <label>Your message <textarea name="text" rows="3" required autofocus>${message.content}</textarea></label>
    <div class="actions"><button>Send again</button><button type="button" onClick=${() => setEdited(false)}>Cancel</button></div>
  </form>`;
}

function List({ all, current, onSelect, onNew, onChange, onDelete }) {
  const rename = () => {
    const title = prompt("Name of the conversation", titleOf(current));
    if (title !== null) onChange(Object.assign(current, { title: title.trim() }));
  };
  const remove = () => confirm(`Delete “${titleOf(current)}”?`) && onDelete(current);
  return html`<nav class="conversations" aria-label="Conversations">
    <details open=${matchMedia("(min-width: 60rem)").matches}><summary>Conversations</summary>
      <button type="button" onClick=${onNew}>New</button>
      <ul>${all.map((each) => html`<li key=${each.id}><button type="button" aria-current=${each === current ? "true" : undefined}
        onClick=${() => onSelect(each)}>${titleOf(each)}</button></li>`)}</ul>
      <div class="actions">
        <button type="button" onClick=${rename}>Rename</button>
        <button type="button" onClick=${() => exportJson(current)}>Export</button>
        <button type="button" onClick=${remove}>Delete</button>
      </div>
    </details></nav>`;
}

function Composer({ isReady, isBusy, onSend, onStop }) {
  const field = useRef(null);
  const submit = (event) => {
    event?.preventDefault();
    const text = field.current.value.trim();
    if (!text || isBusy || !isReady) return;
    field.current.value = "";
    onSend(text);
  };
  const press = (event) => {
    if (event.key === "Escape" && isBusy) onStop();
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  };
  return html`<form class="composer" onSubmit=${submit}>
    <label><span class="hidden">Message</span>
      <textarea ref=${field} rows="2" placeholder="Message; Enter sends, Shift+Enter begins a line" onKeyDown=${press} autofocus /></label>
    <button disabled=${isBusy || !isReady}>Send</button>
    ${isBusy && html`<button type="button" onClick=${onStop} aria-keyshortcuts="Escape">Stop</button>`}
  </form>`;
}

/** Keep the end of the page in sight while an answer comes, unless the reader has scrolled away from it. */
function useFollow() {
  const isAtEnd = useRef(true);
  const page = document.documentElement;
  useEffect(() => {
    const note = () => (isAtEnd.current = page.scrollHeight - page.clientHeight - page.scrollTop < NEAR_PX);
    addEventListener("scroll", note);
    return () => removeEventListener("scroll", note);
  }, []);
  useLayoutEffect(() => {
    if (isAtEnd.current) page.scrollTop = page.scrollHeight;
  });
}

export function Chat() {
  const redraw = useRedraw();
  const { models, defaults, error } = useServer();
  const [stored] = useState(conversations), [all, setAll] = useState(stored.all);
  const [current, setCurrent] = useState(() => all[0] ?? newConversation());
  const [status, setStatus] = useState("");
  // What stops the answer of each conversation that has one coming.
  const running = useRef(new Map());
  useFollow();

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
    setStatus(answer.error ? "The answer failed." : `The answer is there: ${count(answer.ids.length)} tokens.`);
    changed(conversation);
  };

  const reply = (more = {}) => {
    const knobs = { ...knobsOf(current), ...more };
    const system = current.system.trim() ? [{ role: "system", content: current.system }] : [];
    const body = { messages: [...system, ...current.messages.map(({ role, content }) => ({ role, content }))], ...defaults, ...knobs };
    const answer = Object.assign(newAnswer(), { knobs: { ...defaults, ...knobs } });
    return [answer, run("/v1/chat/completions", body, answer)];
  };

  const send = (text, index = messages.length) => {
    messages.splice(index, Infinity, { role: "user", content: text });
    reply();
  };

  const again = async (seed) => {
    const before = messages.pop();
    const [answer, done] = reply(seed === null ? {} : { seed });
    await done;
    if (seed === null || answer.error) return;
    const place = answer.ids.findIndex((id, i) => id !== before.ids[i]);
    const isSame = place < 0 && answer.ids.length === before.ids.length;
    answer.note = isSame ? `the same ${count(answer.ids.length)} tokens as before` : `differs from token ${count((place < 0 ? answer.ids.length : place) + 1)} on`;
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

  const remove = (conversation) => {
    running.current.get(conversation.id)?.abort();
    forget(conversation);
    const rest = all.filter((each) => each !== conversation);
    setAll(rest);
    setCurrent(rest[0] ?? newConversation(conversation));
  };

  const isBusy = running.current.has(current.id);
  return html`
    <h1 class="hidden">Chat</h1>
    <${List} all=${all} current=${current} onSelect=${setCurrent} onNew=${() => setCurrent(newConversation(current))}
      onChange=${changed} onDelete=${remove} />
    <section class="thread" aria-label="Conversation">
      ${error && html`<p role="alert">${error.message}</p>`}
      ${stored.numDamaged > 0 && html`<p role="note">Conversations that are damaged in this browser's store, and left out: ${count(stored.numDamaged)}.</p>`}
      ${messages.map((message, i) => message.role === "user"
        ? html`<${Question} key=${`${current.id} ${i} ${message.content}`} message=${message} onResend=${(text) => send(text, i)} />`
        : html`<${Answer} key=${`${current.id} ${i} ${message.seed} ${message.note}`} answer=${message} model=${model} limit=${limit}
            actions=${message === last && !isBusy ? { again, take: takeOrFail } : null} />`)}
      <div class="foot">
        <${Composer} isReady=${model !== undefined} isBusy=${isBusy} onSend=${send} onStop=${() => running.current.get(current.id)?.abort()} />
        <${Settings} conversation=${current} models=${models} defaults=${defaults} onChange=${changed} />
        <p class="hidden" role="status">${status}</p>
      </div>
    </section>
    <${Engine} answer=${last?.role === "assistant" ? last : null} />`;
}
