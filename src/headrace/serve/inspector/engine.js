// The engine beside the answer: blocks of the KV cache, the tokens of the step, and the share of the machine's limit.

import { count, html } from "./lib.js";
import { live, useLive } from "./live.js";

const NUM_CELLS = 40;

export function Sparkline({ rates, label }) {
  const most = Math.max(...rates, 1);
  const points = rates.map((rate, i) => `${(100 * i) / Math.max(1, rates.length - 1)},${22 - (20 * rate) / most}`).join(" ");
  return html`<svg class="sparkline" viewBox="0 0 100 24" preserveAspectRatio="none" role="img" aria-label=${label}>
    <polyline points=${points} /></svg>`;
}

/** Cells in the proportion of the blocks: solid is held, hatched is cached, the others are free. */
function Blocks({ numHeld, numCached, num }) {
  const cells = Array.from({ length: NUM_CELLS }, (_, i) => {
    const place = ((i + 0.5) * num) / NUM_CELLS;
    const isShown = (numBlocks, start) => numBlocks > 0 && (place < start + numBlocks || (i * num) / NUM_CELLS <= start && start + numBlocks <= ((i + 1) * num) / NUM_CELLS);
    return isShown(numHeld, 0) ? "held" : isShown(numCached, numHeld) ? "cached" : "free";
  });
  return html`<svg class="blocks" viewBox="0 0 160 18" role="img" aria-label=${`${count(numHeld)} blocks held, ${count(numCached)} cached, of ${count(num)}`}>
    <defs><pattern id="hatch" width="2" height="2" patternUnits="userSpaceOnUse"><path d="M0 2L2 0" /></pattern></defs>
    ${cells.map((kind, i) => html`<rect key=${i} class=${kind} x=${(i % 20) * 8 + 0.5} y=${Math.floor(i / 20) * 9 + 0.5} width="7" height="7" />`)}
  </svg>`;
}

/** Return the sequence of the caller's request: the last that arrived with so many tokens of prompt. */
function sequenceOf(answer) {
  if (!answer?.promptIds.length) return null;
  const num = answer.promptIds.length + answer.numKept;
  for (let i = live.steps.length - 1; i >= 0; i -= 1) {
    const arrival = live.steps[i].arrivals.find(([, id, numPrompt]) => (answer.explain ? id === answer.explain.id : numPrompt === num));
    if (arrival) return arrival[0];
  }
  return null;
}

function Step({ step, mine }) {
  const num = step.seq_ids.length;
  const isMine = step.seq_ids.includes(mine);
  const numTokens = step.lens.reduce((sum, length) => sum + length, 0);
  const who = isMine ? `you + ${num - 1}` : `${num} ${num === 1 ? "request" : "requests"}`;
  return html`<p>step ${count(step.step_id)}: ${who}; ${count(numTokens)} ${numTokens === 1 ? "token" : "tokens"}</p>`;
}

/** The box. It is left out where the key may not read the engine's state. */
export function Engine({ answer }) {
  const { state, error, steps, holders, tables } = useLive();
  const isClosed = [401, 403, 404].includes(error?.status);
  const mine = sequenceOf(answer);
  if (isClosed || !state) return null;
  const numMine = mine === null ? 0 : [...holders.values()].filter((each) => each.has(mine)).length;
  return html`<aside class="engine" aria-label="Engine">
    <h2>Engine</h2>
    ${state.memory && html`<p>${Math.round(100 * state.memory.share)} % of ${state.memory.is_measured ? "the memory’s limit" : "the fastest step"}</p>`}
    <p>KV cache: ${count(holders.size)} of ${count(state.num_blocks)} blocks held${numMine > 0 && `, ${count(numMine)} by you`}; ${count(state.num_blocks_cached)} cached</p>
    <${Blocks} numHeld=${holders.size} numCached=${state.num_blocks_cached} num=${state.num_blocks} />
    ${steps.length > 0 && html`<${Step} step=${steps.at(-1)} mine=${mine} />`}
    <p>${count(holders.size ? [...tables.keys()].filter((seqId) => seqId).length : state.num_running)} running, ${count(state.num_waiting)} waiting</p>
    <p><a href="inspect">All of the engine</a></p>
  </aside>`;
}
