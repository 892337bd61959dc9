// The engines behind the server, a row for each.

import { Facts, percent, Table } from "../canvas.js";
import { count, html, seconds } from "../lib.js";
import { useJson, useLive } from "../live.js";

const POLL_MS = 1000;

/** A time in its two largest units. */
export function age(number) {
  if (number < 3600) return number < 60 ? `${Math.round(number)} s` : seconds(number);
  const hours = Math.floor(number / 3600);
  return hours < 24 ? `${hours} h ${Math.floor((number % 3600) / 60)} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** A share as a bar and a number. */
const Meter = ({ share, label }) => html`<meter min="0" max="1" value=${share} aria-label=${label}></meter> ${percent(share, 0)}`;

function Update({ update }) {
  const { state, num_replaced: num, num_replicas: total, settings, error } = update;
  const flags = Object.entries(settings).map(([name, value]) => `${name} ${JSON.stringify(value)}`).join(", ");
  return html`<p role=${state === "failed" ? "alert" : "status"}>Rolling update: ${state}, ${count(num)} of ${count(total)} engines replaced${
    flags && `, with ${flags}`}${error && `: ${error}`}.</p>`;
}

export function Fleet() {
  const { isRecorded } = useLive(POLL_MS);
  const { data, error } = useJson(isRecorded ? "" : "/fleet", POLL_MS);
  if (isRecorded) return html`<h1>Fleet</h1><p>A recording is of one engine.</p>`;
  const replicas = data?.replicas ?? [];
  const sum = (name) => replicas.reduce((total, replica) => total + replica[name], 0);
  const rows = replicas.map((each) => Object.assign([
    each.replica, each.phase, each.phase === "ready" || each.phase === "leaving" ? age(each.age) : "", each.num_open,
    html`<${Meter} share=${each.kv_cache_usage} label="KV cache of replica ${each.replica}" />`,
    each.prefix_cache_queries ? html`<${Meter} share=${each.prefix_cache_hits / each.prefix_cache_queries} label="hits of replica ${each.replica}" />` : "none yet",
    each.num_generated_tokens, each.num_moved_here, each.num_moved_away, each.num_restarts,
    html`<code title=${each.fingerprint}>${each.fingerprint.slice(0, 12)}</code>`,
  ], { key: each.replica }));
  const prints = new Set(replicas.map((each) => each.fingerprint).filter(Boolean));
  return html`<h1>Fleet</h1>
    <p>The engines behind this server. A stream whose engine is lost or replaced goes on in another one of the same fingerprint, with the same bits.</p>
    ${error && html`<p role="alert">${error.message}</p>`}
    ${data && html`
      <${Facts} of=${{
        engines: `${count(replicas.filter((each) => each.phase === "ready").length)} of ${count(replicas.length)} ready`,
        ...(data.router ? { router: data.router, queued: data.num_queued, "streams moved": data.num_moved } : {}),
        open: sum("num_open"),
        "hit rate": sum("prefix_cache_queries") ? percent(sum("prefix_cache_hits") / sum("prefix_cache_queries")) : "none yet",
      }} />
      ${data.update && html`<${Update} update=${data.update} />`}
      ${prints.size > 1 && html`<p>The engines differ in weights, formats or kernels: answers end where they began.</p>`}
      <${Table} caption="Engines" rows=${rows} columns=${[["replica"], "state", ["age"], ["open"], "KV cache", "hit rate", ["generated"],
        ["moved here"], ["moved away"], ["restarts"], "fingerprint"]} />`}`;
}
