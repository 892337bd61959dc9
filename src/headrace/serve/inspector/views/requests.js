// The requests as a table; one of them as a waterfall of where its time went.

import { Choice, Facts, percent, Table } from "../canvas.js";
import { count, html, seconds, useAddress, useState } from "../lib.js";
import { live, useJson, useLive } from "../live.js";

const POLL_MS = 1500;
const TEXT_MS = 1000;
const MAX_ROWS = 500;

export const shortId = (id) => (/^[0-9a-f]{8}-/.test(id) ? id.slice(0, 8) : id);
export const linkTo = (id) => html`<a href="#requests/${encodeURIComponent(id)}" title=${id}>${shortId(id)}</a>`;

/** What follows the view's name in the address. */
const restOfAddress = () => decodeURIComponent(location.hash.split("/").slice(1).join("/"));

/** The parts of a latency over time: a row for each, in the order in which they began. */
function Waterfall({ explanation }) {
  const { latency, parts, spans, split } = explanation;
  const first = (name) => spans.find((span) => span[0] === name)?.[1] ?? latency;
  const share = (number) => `${(100 * number) / Math.max(latency, 1e-9)}%`;
  const rows = [...parts].sort((a, b) => first(a.name) - first(b.name));
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Where the time went"><table class="waterfall">
    <thead><tr><th scope="col">part</th><th scope="col" class="number">time</th><th scope="col" class="number">share</th>
      <th scope="col">when, of ${seconds(latency)}</th></tr></thead>
    <tbody>${rows.map(({ name, seconds: time, estimated }) => html`<tr key=${name}>
      <th scope="row">${name.replaceAll("_", " ")}${estimated ? " (estimated)" : ""}</th>
      <td class="number">${seconds(time)}</td>
      <td class="number">${percent(time / Math.max(latency, 1e-9))}</td>
      <td class="track">${spans.filter((span) => span[0] === name).map(([, begin, end]) =>
        html`<span class="bar ${name}" style=${{ left: share(begin), width: share(end - begin) }}></span>`)}
        ${!spans.some((span) => span[0] === name) && html`<span class="bar spread" style=${{ left: 0, width: share(time) }}></span>`}</td>
    </tr>`)}</tbody>
    <tfoot><tr><th scope="row">sum</th><td class="number">${seconds(parts.reduce((sum, part) => sum + part.seconds, 0))}</td>
      <td></td><td></td></tr></tfoot>
  </table></div>
  <p class="hint">Hatched bars are spread over the request's life: their length is their time.${
    parts.some(({ estimated }) => estimated) && ` Estimated parts: steps that others used too are split by ${split}.`}</p>`;
}

function Explanation({ explanation }) {
  const { latency, ttft, sentences, memory } = explanation;
  return html`
    <${Facts} of=${{
      latency: seconds(latency), "first token": ttft === null ? "none" : seconds(ttft), ended: explanation.finish_reason,
      "cached tokens": explanation.num_cached_tokens, "guesses kept": `${count(explanation.num_accepted_tokens)} of ${count(explanation.num_draft_tokens)}`,
      preemptions: explanation.preemptions, replica: explanation.replica ?? 0,
      ...(memory ? { [memory.is_measured ? "of the memory's limit" : "of the fastest step"]: percent(memory.share, 0) } : {}),
    }} />
    <ul class="sentences">${sentences.map((sentence) => html`<li key=${sentence}>${sentence}</li>`)}</ul>
    <${Waterfall} explanation=${explanation} />
    ${explanation.prefix_cache.map((verdict) => html`<p>Prefix cache: ${count(verdict.num_cached_tokens)} of ${
      count(verdict.num_prompt_tokens)} tokens; ${verdict.sentence}.</p>`)}`;
}

function Detail({ id, row }) {
  const recorded = live.recording?.requests.find((request) => request.id === id);
  const isOpen = Boolean(row?.phase);
  const { data, error } = useJson(recorded || isOpen ? "" : `/v1/requests/${encodeURIComponent(id)}/explain`);
  const explanations = recorded ? [recorded] : data?.data ?? [];
  return html`<section aria-label="Request ${id}" class="detail">
    <h2>Request ${shortId(id)}</h2>
    <p><a href="#requests">All requests</a></p>
    ${isOpen && html`<p role="status">It is open (${row.phase}, ${seconds(row.latency)}) and explained when it has ended.</p>`}
    ${error && !isOpen && html`<p role="alert">${error.message}</p>`}
    ${explanations.map((explanation) => html`<${Explanation} explanation=${explanation} key=${explanation.id} />`)}
  </section>`;
}

export function Requests() {
  const { isRecorded } = useLive(TEXT_MS);
  const id = useAddress(restOfAddress);
  const [order, setOrder] = useState("newest");
  const { data, error } = useJson(isRecorded ? "" : "/inspect/requests", POLL_MS);
  const all = live.recording?.requests ?? data?.requests ?? [];
  const shown = order === "slowest" ? [...all].sort((a, b) => b.latency - a.latency) : all;
  const rows = shown.map((each) => Object.assign([
    linkTo(each.id), each.replica ?? 0, each.phase || each.reason, each.num_prompt_tokens, each.num_cached_tokens, each.num_generated_tokens,
    each.ttft === null ? "" : seconds(each.ttft), seconds(each.latency), each.num_preemptions,
    each.num_guessed ? `${count(each.num_kept)} of ${count(each.num_guessed)}` : "",
  ], { key: each.id }));
  const open = all.filter((each) => each.phase).length;
  return html`<h1>Requests</h1>
    ${error && html`<p role="alert">${error.message}</p>`}
    ${id && html`<${Detail} id=${id} row=${all.find((each) => each.id === id)} key=${id} />`}
    <p>${count(open)} open, ${count(all.length - open)} ended. A request's id opens where its time went.</p>
    <div class="controls"><${Choice} label="Order" value=${order} choose=${setOrder}
      options=${[["newest", "newest first"], ["slowest", "slowest first"]]} /></div>
    <${Table} caption="Requests" maxRows=${MAX_ROWS} rows=${rows} columns=${["request", ["replica"], "state", ["prompt"], ["cached"], ["generated"],
      ["first token"], ["latency"], ["preemptions"], ["guesses kept"]]} />`;
}
