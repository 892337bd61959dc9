// The prefix cache as a tree of the prompts in it, and why its latest lookups missed.

import { Facts, percent, Table } from "../canvas.js";
import { count, html, seconds } from "../lib.js";
import { live, useJson, useLive } from "../live.js";
import { linkTo } from "./requests.js";

const POLL_MS = 2000;
const TEXT_MS = 1000;
const MAX_CHILDREN = 100;
const OPEN_DEPTH = 2;

/** The nodes by their parents, those with the most hits first. */
function childrenOf(nodes) {
  const children = new Map();
  for (const node of nodes) {
    if (!children.has(node.parent)) children.set(node.parent, []);
    children.get(node.parent).push(node);
  }
  for (const each of children.values()) each.sort((a, b) => b.hits - a.hits || b.num_tokens - a.num_tokens);
  return children;
}

function Branch({ nodes, children, most, depth }) {
  return html`<ul class="tree">
    ${nodes.slice(0, MAX_CHILDREN).map((node) => {
      const below = children.get(node.id) ?? [];
      const used = node.last_use === null ? "" : `, ${seconds(node.last_use)} ago`;
      const line = html`<span class="text">${node.text === null ? "a prefix" : `“${node.text}…”`}</span>
        <span class="hits">${count(node.num_tokens)} tokens, ${count(node.hits)} ${node.hits === 1 ? "hit" : "hits"}${used}${node.is_held ? ", in use" : ""}</span>
        <span class="meter" style=${{ width: `${(8 * node.hits) / most}rem` }}></span>`;
      return html`<li key=${node.id}>${below.length
        ? html`<details open=${depth < OPEN_DEPTH}><summary>${line}</summary>
            <${Branch} nodes=${below} children=${children} most=${most} depth=${depth + 1} /></details>`
        : html`<div class="leaf">${line}</div>`}</li>`;
    })}
    ${nodes.length > MAX_CHILDREN && html`<li>${count(nodes.length - MAX_CHILDREN)} more</li>`}
  </ul>`;
}

const recordedMisses = (now) => live.recording.requests.filter((request) => request.arrived <= now).flatMap((request) =>
  request.prefix_cache.filter(({ reason }) => reason !== "none").map((each) => ({ id: request.id, time: request.arrived, ...each })));

export function Cache() {
  const { state, isRecorded } = useLive(TEXT_MS);
  const { data, error } = useJson(isRecorded ? "" : "/inspect/cache", POLL_MS);
  const now = state?.time ?? 0;
  const nodes = data?.nodes ?? [];
  const misses = isRecorded ? recordedMisses(now) : data?.misses ?? [];
  const children = childrenOf(nodes);
  const rows = misses.map((miss) => Object.assign([
    seconds(Math.max(0, now - miss.time)), linkTo(miss.id), miss.reason.replaceAll("_", " "), miss.num_cached_tokens, miss.num_prompt_tokens,
    html`${miss.sentence}${miss.prompt && html`<br /><span class="hint">prompt <q>${miss.prompt}</q>, cached <q>${miss.cached}</q></span>`}`,
  ], { key: `${miss.id} ${miss.time}` }));
  const { prefix_cache_queries: queries, prefix_cache_hits: hits } = state ?? {};
  return html`<h1>Prefix cache</h1>
    <p>Prompts that begin alike share blocks. A hit is a request that found its beginning there.</p>
    ${error && html`<p role="alert">${error.message}</p>`}
    <${Facts} of=${{
      ...(queries === undefined ? {} : { "prompt tokens": queries, "of them cached": hits,
        "hit rate": queries ? percent(hits / queries) : "none yet" }),
      ...(data && !isRecorded ? { "blocks in the cache": data.num_blocks_cached } : {}),
    }} />
    <h2>Prefixes</h2>
    ${isRecorded ? html`<p>A recording does not keep which prefixes its blocks hold.</p>`
      : nodes.length ? html`<${Branch} nodes=${children.get(null) ?? []} children=${children} most=${
        Math.max(1, ...nodes.map((node) => node.hits))} depth=${0} />
        ${data.num_blocks_shown < data.num_blocks_cached && html`<p>The ${count(data.num_blocks_shown)} blocks used last.</p>`}`
        : html`<p>Nothing is cached yet.</p>`}
    <h2>Latest misses</h2>
    ${rows.length ? html`<${Table} caption="Latest misses" rows=${rows}
      columns=${[["ago"], "request", "reason", ["cached"], ["prompt"], "why"]} />` : html`<p>No lookup has missed yet.</p>`}`;
}
