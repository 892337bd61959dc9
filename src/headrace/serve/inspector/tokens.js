// The tokens of an answer: the likelihood of each, the alternatives in its place, and a way to go on from there.

import { html, json, useEffect, useRef, useState } from "./lib.js";
import { KNOBS } from "./settings.js";

const NUM_SHOWN = 10;
// The values with which a knob does nothing, and the names of llama-server's route, which takes and gives token ids.
const NEUTRAL = { temperature: 1, top_p: 1, top_k: 0, min_p: 0, repetition_penalty: 1 };
const NAMES = { repetition_penalty: "repeat_penalty" };
const STAGES = KNOBS.filter(({ stage }) => stage !== undefined).sort((a, b) => a.stage - b.stage);

const percent = (share) => (share === undefined ? "–" : `${(100 * share).toFixed(share > 0 && share < 0.001 ? 3 : 1)} %`);
const shown = (text) => (text === "" ? "∅" : text.replaceAll("\n", "⏎").replace(/^ | $/g, "␣"));

/** Return the text and the log-probability of each token of the answer, under the model alone. */
export async function likelihoods(model, { promptIds, ids }) {
  const body = { model, prompt: [...promptIds, ...ids], max_tokens: 1, temperature: 0, echo: true, logprobs: 0 };
  const { tokens, token_logprobs: logprobs } = (await json("/v1/completions", { method: "POST", body })).choices[0].logprobs;
  return ids.map((id, i) => ({ id, text: tokens[promptIds.length + i], logprob: logprobs[promptIds.length + i] }));
}

/**
 * Return the tokens that could stand at place `index`: the columns, which are the model's shares and those after each
 * knob that does something, and the rows {id, text, shares}. The engine's sampler computes them.
 */
async function alternatives(model, { promptIds, ids, knobs, seed }, index) {
  const active = STAGES.filter(({ name }) => knobs[name] !== undefined && knobs[name] !== NEUTRAL[name]);
  const settings = Object.fromEntries(STAGES.map(({ name }) => [NAMES[name] ?? name, NEUTRAL[name]]));
  const bodies = [{ ...settings, post_sampling_probs: false }];
  for (const { name } of active) {
    settings[NAMES[name] ?? name] = knobs[name];
    bodies.push({ ...settings, post_sampling_probs: true });
  }
  const fixed = { model, prompt: [...promptIds, ...ids.slice(0, index)], n_predict: 1, n_probs: NUM_SHOWN, seed, ignore_eos: false };
  const replies = await Promise.all(bodies.map((body) => json("/completion", { method: "POST", body: { ...fixed, ...body } })));
  const rows = new Map();
  replies.forEach(({ completion_probabilities: [entry] }, column) => {
    for (const { id, token, logprob, prob } of entry.top_logprobs ?? entry.top_probs) {
      if (prob === 0 && !rows.has(id)) continue;
      if (!rows.has(id)) rows.set(id, { id, text: token, shares: [] });
      rows.get(id).shares[column] = prob ?? Math.exp(logprob);
    }
  });
  // After a cut that leaves fewer tokens than are shown, all others have nothing.
  replies.forEach(({ completion_probabilities: [entry] }, column) => {
    const isWhole = entry.top_probs?.some(({ prob }) => prob === 0);
    if (isWhole) for (const row of rows.values()) row.shares[column] ??= 0;
  });
  const labels = ["the model", ...active.map(({ name, label }) => `${label} ${knobs[name]}`)];
  return { labels, rows: [...rows.values()] };
}

/** Return the text of token ids. */
export const textOf = async (model, tokens) => (await json("/detokenize", { method: "POST", body: { model, tokens } })).prompt;

/** Return whether the token `id` after `prompt` ends an answer: the engine is made to choose it. */
export async function ends(model, prompt, id) {
  const body = { model, prompt, max_tokens: 1, allowed_token_ids: [id], temperature: 0 };
  return (await json("/v1/completions", { method: "POST", body })).choices[0].finish_reason === "stop";
}

export const Bar = ({ share }) => html`<svg class="bar" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true"><rect width=${100 * (share ?? 0)} height="8" /></svg>`;

function Alternatives({ model, answer, index, token, onTake }) {
  const [table, setTable] = useState(null);
  const [error, setError] = useState(null);
  useEffect(() => {
    let isCurrent = true;
    setTable(null);
    setError(null);
    alternatives(model, answer, index).then((each) => isCurrent && setTable(each), (each) => isCurrent && setError(each));
    return () => (isCurrent = false);
  }, [answer, index]);
  if (error) return html`<p role="alert">${error.message}</p>`;
  if (!table) return html`<p>computing …</p>`;
  const rows = table.rows.some(({ id }) => id === token.id)
    ? table.rows : [...table.rows, { id: token.id, text: token.text, shares: [Math.exp(token.logprob)] }];
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Alternatives"><table>
    <caption>Token ${index + 1}, and what could stand there: shares before and after each knob</caption>
    <thead><tr><th scope="col">token</th>${table.labels.map((label) => html`<th scope="col" class="number">${label}</th>`)}<th scope="col">go on</th></tr></thead>
    <tbody>${rows.map(({ id, text, shares }) => html`<tr key=${id} aria-current=${id === token.id ? "true" : undefined}>
      <th scope="row"><code>${shown(text)}</code></th>
      ${table.labels.map((_, column) => html`<td class="number">${percent(shares[column])}<${Bar} share=${shares[column]} /></td>`)}
      <td>${answer.reasoning ? "" : html`<button type="button" aria-label=${`Go on with ${shown(text)}`} onClick=${() => onTake(index, id)}>
        ${id === token.id ? "again" : "take"}</button>`}</td>
    </tr>`)}</tbody>
  </table></div>`;
}

const likeliness = (logprob) => ["unlikely", "unsure", "likely", "sure"][[0.01, 0.1, 0.5].filter((share) => logprob >= Math.log(share)).length];

/** The tokens as buttons; the arrow keys go from one to the next. `onTake(index, id)` goes on with another token. */
export function Tokens({ model, answer, onTake }) {
  const [tokens, setTokens] = useState([]);
  const [error, setError] = useState(null);
  const [index, setIndex] = useState(null);
  const group = useRef(null);
  useEffect(() => {
    likelihoods(model, answer).then(setTokens, setError);
  }, [answer]);
  const move = (event) => {
    const to = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const buttons = [...group.current.children].filter((each) => each.tagName === "BUTTON");
    const next = buttons[buttons.indexOf(document.activeElement) + to];
    if (!to || !next) return;
    event.preventDefault();
    next.focus();
  };
  if (error) return html`<p role="alert">${error.message}</p>`;
  return html`<div class="tokens">
    <div ref=${group} role="group" aria-label="Tokens; the arrow keys go from one to the next" onKeyDown=${move}>
      ${tokens.map(({ text, logprob }, i) => html`<button type="button" key=${i} class=${likeliness(logprob)} tabindex=${i === (index ?? 0) ? 0 : -1}
        aria-pressed=${i === index} title=${percent(Math.exp(logprob))} onClick=${() => setIndex(i)}>${shown(text)}</button>${text.includes("\n") && html`<br />`}`)}
    </div>
    <p class="muted">Underlined: <span class="likely">below 50 %</span>, <span class="unsure">below 10 %</span>, <span class="unlikely">below 1 %</span>.
      ${answer.reasoning && " An answer with reasoning can not go on from here."}</p>
    ${index !== null && tokens[index] && html`<${Alternatives} model=${model} answer=${answer} index=${index} token=${tokens[index]} onTake=${onTake} />`}
  </div>`;
}
