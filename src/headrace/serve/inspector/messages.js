// The messages of a conversation: questions with their documents, answers with all that belongs to them, results of tools.

import { isRunning, rateOf, ratesOf } from "./answers.js";
import { Sparkline } from "./engine.js";
import { bytes, count, html, seconds, useLayoutEffect, useMemo, useRef, useState } from "./lib.js";
import { markdown } from "./markdown.js";
import { Copy, Listing } from "./rich.js";
import { Bar, Tokens } from "./tokens.js";

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
export function Stats({ answer, limit }) {
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

function Reasoning({ answer }) {
  const { reasoning, times } = answer;
  const isOver = Boolean(times?.thought) || !isRunning(answer);
  const text = useMemo(() => markdown(reasoning), [reasoning]);
  const begun = times?.first ?? times?.sent;
  return html`<details class="reasoning" open=${!isOver}>
    <summary>${isOver ? "Reasoning" : "Reasoning …"}${times?.thought && `, ${seconds((times.thought - begun) / 1000)}`}</summary>${text}</details>`;
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    // Arguments that still come, or that are no JSON.
    return text;
  }
}

/** A call of a tool. `onResult`, if its result is waited for, takes that as a text. */
function Call({ call, isWhole, onResult }) {
  const submit = (event) => {
    event.preventDefault();
    onResult(event.target.elements.result.value);
  };
  return html`<section class="card" aria-label=${`Call of ${call.name}`}><h3>${call.name}</h3>
    <${Listing} language="json" text=${indented(call.arguments)} isWhole=${isWhole} />
    ${onResult && html`<form onSubmit=${submit}><label>Result of ${call.name} <textarea name="result" rows="2" required /></label>
      <button>Give the result</button></form>`}
  </section>`;
}

export const Result = ({ message, name }) => html`<section class="card" aria-label=${`Result of ${name}`}><h3>Result of ${name}</h3>
  <pre tabindex="0">${message.content}</pre></section>`;

/** An answer. `actions` {again, take, result} are of the last one; null: none can be done now. `given` are the calls that have results. */
export function Answer({ answer, model, limit, actions, given }) {
  const [showsTokens, setShowsTokens] = useState(false);
  const running = isRunning(answer);
  const text = useMemo(() => markdown(answer.content), [answer.content]);
  return html`<article class=${answer.isLeftOut ? "answer left-out" : "answer"} aria-label="Answer" aria-busy=${running}>
    ${answer.reasoning && html`<${Reasoning} answer=${answer} />`}
    <div class="text">${text}</div>
    ${answer.calls.map((call, i) => html`<${Call} key=${i} call=${call} isWhole=${!running}
      onResult=${actions?.result && !given.has(call.id) ? (result) => actions.result(call, result) : null} />`)}
    ${answer.error && html`<p role="alert">${answer.error}</p>`}
    <${Stats} answer=${answer} limit=${limit} />
    ${!running && html`<div class="actions">
      ${actions?.again && html`<button type="button" onClick=${() => actions.again(answer.seed)} disabled=${answer.seed === null}>Same seed again</button>
        <button type="button" onClick=${() => actions.again(null)}>Another answer</button>`}
      ${answer.ids.length > 0 && html`<button type="button" aria-expanded=${showsTokens} onClick=${() => setShowsTokens(!showsTokens)}>Tokens</button>`}
      ${answer.content && html`<${Copy} text=${answer.content} />`}
    </div>`}
    ${showsTokens && !running && html`<${Tokens} model=${model} answer=${answer} onTake=${actions?.take} />`}
    ${answer.explain && html`<${Why} explain=${answer.explain} />`}
  </article>`;
}

export const Documents = ({ of, onRemove }) => html`<ul class="documents">${of.map(({ name, text, image }, i) => html`<li key=${i}>
  ${image ? html`<img src=${image} alt=${name} />` : html`<details><summary>${name}, ${bytes(new Blob([text]).size)}</summary><pre tabindex="0" role="region" aria-label=${name}>${text}</pre></details>`}
  ${onRemove && html`<button type="button" aria-label=${`Take ${name} out`} onClick=${() => onRemove(i)}>✕</button>`}</li>`)}</ul>`;

/** A question. `onEdit(isEdited)` opens it for a change, `onResend(text)` sends it again. */
export function Question({ message, limit, isEdited, onEdit, onResend }) {
  const field = useRef(null);
  // Before the field is seen: the cursor must not move under a reader who writes at once.
  useLayoutEffect(() => {
    if (!isEdited) return;
    field.current.focus();
    field.current.setSelectionRange(message.content.length, message.content.length);
  }, [isEdited]);
  const { attachments = [] } = message;
  if (!isEdited) {
    return html`<article class=${message.isLeftOut ? "question left-out" : "question"} aria-label="You">
      ${attachments.length > 0 && html`<${Documents} of=${attachments} />`}<p>${message.content}</p>
      ${message.isLeftOut && html`<p class="why-left-out">Does not fit into the context${limit && ` of ${count(limit)} tokens`}: what follows is sent without it.</p>`}
      <div class="actions"><button type="button" onClick=${() => onEdit(true)}>Edit</button></div></article>`;
  }
  const submit = (event) => {
    event?.preventDefault();
    onEdit(false);
    onResend(field.current.value);
  };
  const press = (event) => {
    if (event.key === "Escape") onEdit(false);
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  };
  return html`<form class="question" onSubmit=${submit}>
    <label>Your message <textarea ref=${field} name="text" rows="3" required=${!attachments.length} onKeyDown=${press}>${message.content}</textarea></label>
    <div class="actions"><button>Send again</button><button type="button" onClick=${() => onEdit(false)}>Cancel</button></div>
  </form>`;
}
