// The KV blocks by sequence: a row for each block table, as long as it has blocks, whatever the cache's size.

import { arrow, fill, Figure, hatch, Legend, NUM_OWNERS } from "../canvas.js";
import { count, html, useState } from "../lib.js";
import { live, nameOf } from "../live.js";

const [MAX_ROWS, TALL, LABEL, MAX_WIDE] = [32, 18, 150, 10];

/** How many slots of each block of a table are computed. Blocks are cached when they are full. */
export function fillOf(seqId, blockSize) {
  const position = live.positions.get(seqId) ?? Infinity;
  return [...live.tables.get(seqId)?.keys() ?? []].map((block, index) => [
    block, live.cached.has(block) ? blockSize : Math.max(0, Math.min(blockSize, position - index * blockSize)),
  ]);
}

export const sequences = () => [...live.tables.keys()].filter((seqId) => seqId);

/** The share of the held blocks' slots that have no token; a block of several sequences counts once. 0 if none is held. */
export function wasteOf(blockSize) {
  const filled = new Map();
  for (const seqId of live.tables.keys()) {
    for (const [block, num] of fillOf(seqId, blockSize)) filled.set(block, Math.max(num, filled.get(block) ?? 0));
  }
  const num = [...filled.values()].reduce((sum, each) => sum + each, 0);
  return filled.size ? 1 - num / (filled.size * blockSize) : 0;
}

/** The sequences with the most blocks first. */
const longest = () => sequences().sort((a, b) => live.tables.get(b).size - live.tables.get(a).size || a - b);

export function Rows({ state, chosen, choose, summary }) {
  const [at, setAt] = useState(-1);
  const all = longest();
  const shown = all.slice(0, MAX_ROWS);
  const size = state.block_size;
  const draw = ({ context, width, height, colours, store }) => {
    Object.assign(store, store.cached ? {} : { cached: hatch(context, colours.background, { gap: 4 }), shared: hatch(context, colours.text, { gap: 6, up: false }) });
    context.clearRect(0, 0, width, height);
    const now = longest().slice(0, MAX_ROWS);
    const most = Math.max(1, ...now.map((seqId) => live.tables.get(seqId).size));
    const label = Math.min(LABEL, width / 3);
    const wide = Math.min(MAX_WIDE, (width - label) / most);
    const gap = wide > 4 ? 1 : 0;
    context.font = "12px system-ui";
    now.forEach((seqId, row) => {
      const [y, high] = [row * TALL + 1, TALL - 3];
      const colour = colours.owners[seqId % NUM_OWNERS];
      if (seqId === chosen || row === at) fill(context, colours.surface, 0, y - 1, width, TALL);
      context.fillStyle = colours.text;
      context.save();
      context.beginPath();
      context.rect(0, y, label - 6, TALL);
      context.clip();
      context.fillText(`${count(live.tables.get(seqId).size)} ${nameOf(seqId)}`, 0, y + 12);
      context.restore();
      fillOf(seqId, size).forEach(([block, filled], index) => {
        const [x, inner] = [label + index * wide, Math.max(0.5, wide - gap)];
        context.globalAlpha = 0.3;
        fill(context, colour, x, y, inner, high);
        context.globalAlpha = 1;
        context.fillRect(x, y + high * (1 - filled / size), inner, (high * filled) / size);
        if (live.cached.has(block)) fill(context, store.cached, x, y, inner, high);
        if (live.holders.get(block)?.size > 1) fill(context, store.shared, x, y, inner, high);
      });
    });
  };
  const move = (key) => {
    const to = arrow({ ArrowUp: "ArrowLeft", ArrowDown: "ArrowRight" }[key] ?? key, at, shown.length);
    if (to !== undefined) setAt(to);
    else if (key === "Enter") choose(shown[at] ?? 0);
    else if (key === "Escape") choose(0);
    else return false;
    return true;
  };
  const point = (x, y, isClick) => {
    const row = Math.floor(y / TALL);
    if (row >= shown.length) return;
    setAt(row);
    if (isClick) choose(shown[row]);
  };
  const selection = shown[at] ? `${nameOf(shown[at])}: ${count(live.tables.get(shown[at]).size)} blocks` : "";
  const more = all.length > shown.length ? ` The ${count(all.length - shown.length)} requests with the fewest blocks are left out.` : "";
  const rows = () => all.map((seqId) => {
    const table = [...live.tables.get(seqId).keys()];
    return [nameOf(seqId), table.length, live.positions.get(seqId) ?? 0, table.filter((each) => live.holders.get(each).size > 1).length,
      table.filter((each) => live.cached.has(each)).length];
  });
  return html`<div class="bitmap">
    <${Figure} label="KV blocks by sequence" height=${() => Math.max(1, shown.length) * TALL + 2} draw=${draw} version=${`${shown.length} ${chosen} ${at}`}
      summary=${`${summary}${more}`} columns=${["request", ["blocks"], ["tokens computed"], ["blocks shared"], ["blocks cached"]]} rows=${rows}
      onKey=${move} onPoint=${point} selection=${selection} />
    <${Legend} of=${[["owner", "a block of a request"], ["rejected", "falling lines: shared with others"], ["cached", "rising lines: cached"], ["unfilled", "pale: not filled yet"]]} />
  </div>`;
}
