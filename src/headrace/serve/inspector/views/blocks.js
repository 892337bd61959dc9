// The KV blocks by sequence or by place, and one request's block table as it fills.

import { Choice, Facts, Figure, fill, fillEmpty, frame, hatch, Legend, NUM_OWNERS, percent } from "../canvas.js";
import { bytes, count, html, useState } from "../lib.js";
import { live, nameOf, useLive } from "../live.js";
import { Hold } from "./hold.js";
import { fillOf, Rows, sequences, wasteOf } from "./rows.js";

const TALL = 480;
const SLOT_ROWS = 40;
const TEXT_MS = 500;
const LEVELS = 16;
// Above so many, a cell of the map stands for several blocks.
const MAX_CELLS = 2400;
// The look of a cell as an int: two owners, whether it is cached, how far it is filled, whether it is dimmed, and of a cell of
// several blocks the share that is only cached.
const [SECOND, CACHED, FILL, DIM, SHARE] = [4, 1 << 8, 9, 1 << 14, 15];

/** 1 ... NUM_OWNERS for a request, one more for the step in flight. */
const ownerOf = (seqId) => (seqId ? 1 + (seqId % NUM_OWNERS) : NUM_OWNERS + 1);
/** The looks of all blocks. */
function looksOf(numBlocks, blockSize, chosen) {
  const looks = new Int32Array(numBlocks);
  for (const block of live.cached) looks[block] = CACHED;
  for (const seqId of live.tables.keys()) {
    const owner = ownerOf(seqId);
    for (const [block, filled] of fillOf(seqId, blockSize)) {
      const look = looks[block];
      const level = Math.max((look >> FILL) & 31, Math.round(LEVELS * filled / blockSize));
      const [first, second] = [look & 15, (look >> SECOND) & 15];
      // Of many holders two are shown, in two colours if they have two.
      const users = first ? first | ((second && second !== first ? second : owner) << SECOND) : owner;
      looks[block] = (look & CACHED) | (level << FILL) | users;
    }
  }
  if (chosen) {
    const table = live.tables.get(chosen);
    for (let block = 0; block < numBlocks; block += 1) if (!table?.has(block)) looks[block] |= DIM;
  }
  return looks;
}

/** The looks of cells of `per` blocks each. */
function cellsOf(looks, { first, num }, per) {
  if (per === 1) return looks.subarray(first, first + num);
  const cells = new Int32Array(Math.ceil(num / per));
  const nums = new Int32Array(NUM_OWNERS + 2);
  for (let cell = 0; cell < cells.length; cell += 1) {
    nums.fill(0);
    let [numHeld, numCached, isBright] = [0, 0, false];
    const end = Math.min(first + num, first + (cell + 1) * per);
    for (let block = first + cell * per; block < end; block += 1) {
      const owner = looks[block] & 15;
      if (owner) [nums[owner], numHeld] = [nums[owner] + 1, numHeld + 1];
      else if (looks[block] & CACHED) numCached += 1;
      if (!(looks[block] & DIM)) isBright = true;
    }
    const order = [...nums.keys()].sort((a, b) => nums[b] - nums[a]);
    const [owner, second] = [nums[order[0]] ? order[0] : 0, nums[order[1]] ? order[1] : 0];
    const level = (share) => (share ? Math.max(1, Math.round((LEVELS * share) / per)) : 0);
    cells[cell] = owner | (second << SECOND) | (level(numHeld) << FILL) | (isBright ? 0 : DIM) | (level(numCached) << SHARE);
  }
  return cells;
}

const sizeOf = (width, numBlocks) => Math.max(4, Math.min(24, Math.floor(Math.sqrt((width * TALL) / Math.max(1, numBlocks)))));

/** The blocks by place. `view` {first, num} are those that are shown, `zoom(view)` shows others. */
function Bitmap({ state, chosen, choose, summary, view, zoom }) {
  const [at, setAt] = useState(-1);
  const per = Math.ceil(view.num / MAX_CELLS);
  const numBlocks = Math.ceil(view.num / per);
  const grid = (width) => {
    const cell = sizeOf(width, numBlocks);
    return { cell, columns: Math.max(1, Math.floor(width / cell)) };
  };
  const tall = (width) => Math.ceil(numBlocks / grid(width).columns) * grid(width).cell + 1;
  const draw = ({ context, width, colours, store }, isWhole) => {
    const { cell, columns } = grid(width);
    const looks = cellsOf(looksOf(state.num_blocks, state.block_size, chosen), view, per);
    if (isWhole) {
      context.clearRect(0, 0, width, tall(width));
      Object.assign(store, {
        onOwner: hatch(context, colours.background, { gap: 4 }),
        alone: hatch(context, colours.muted, { gap: 4 }),
        owners: ["", ...colours.owners, colours.flight],
      });
    }
    const inner = cell - (cell > 5 ? 1 : 0.5);
    for (let block = 0; block < numBlocks; block += 1) {
      const look = looks[block];
      if (store.looks && store.looks[block] === look && (block !== at) === (block !== store.at)) continue;
      const [x, y] = [(block % columns) * cell, Math.floor(block / columns) * cell];
      const [first, second, level] = [look & 15, (look >> SECOND) & 15, (look >> FILL) & 31];
      context.clearRect(x, y, cell, cell);
      const opaque = look & DIM ? 0.3 : 1;
      if (!first) fillEmpty(context, colours, x, y, inner, inner);
      context.globalAlpha = opaque;
      if (per > 1) {
        // From below: held, in the colours of the two that have the most; only cached; free.
        const [held, cached] = [(inner * level) / LEVELS, (inner * (look >> SHARE)) / LEVELS];
        fill(context, store.owners[first] || colours.line, x, y + inner - held, inner, first ? held : 0);
        if (second) fill(context, store.owners[second], x + inner / 2, y + inner - held, inner / 2, held);
        fill(context, store.alone, x, y + inner - held - cached, inner, cached);
        context.globalAlpha = 1;
        if (block === at) frame(context, colours.text, x + 1, y + 1, inner - 2, inner - 2);
        continue;
      }
      if (first) {
        const height = (inner * level) / LEVELS;
        context.globalAlpha = 0.3 * opaque;
        fill(context, store.owners[first], x, y, inner, inner - height);
        context.globalAlpha = opaque;
        context.fillRect(x, y + inner - height, inner, height);
      }
      if (second) {
        context.fillStyle = store.owners[second];
        context.beginPath();
        context.moveTo(x, y + inner);
        context.lineTo(x + inner, y + inner);
        context.lineTo(x + inner, y);
        context.fill();
        [context.strokeStyle, context.lineWidth] = [colours.background, 1];
        context.stroke();
      }
      if (look & CACHED) fill(context, first ? store.onOwner : store.alone, x, y, inner, inner);
      context.globalAlpha = 1;
      if (block === at) frame(context, colours.text, x + 1, y + 1, inner - 2, inner - 2);
    }
    [store.looks, store.at] = [looks, at];
  };
  const ownerAt = (cell) => [...(live.holders.get(view.first + cell) ?? [])].find((seqId) => seqId) ?? 0;
  /** Show the blocks around a cell of several, or follow the request of a block. */
  const enter = (cell) => {
    if (per === 1) return choose(ownerAt(cell));
    const middle = view.first + Math.floor((cell + 0.5) * per);
    setAt(-1);
    return zoom({ first: Math.max(0, Math.min(state.num_blocks - MAX_CELLS, middle - MAX_CELLS / 2)), num: MAX_CELLS });
  };
  const move = (key, { width }) => {
    const { columns } = grid(width);
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, ArrowUp: at - columns, ArrowDown: at + columns, Home: 0, End: numBlocks - 1 }[key];
    if (to !== undefined) setAt(at < 0 ? 0 : Math.max(0, Math.min(numBlocks - 1, to)));
    else if (key === "Enter") enter(Math.max(0, at));
    else if (key === "Escape") {
      if (view.num < state.num_blocks && !chosen) zoom(null);
      choose(0);
    }
    else return false;
    return true;
  };
  const point = (x, y, isClick, { width }) => {
    const { cell, columns } = grid(width);
    const block = Math.floor(y / cell) * columns + Math.min(columns - 1, Math.floor(x / cell));
    if (block >= numBlocks) return;
    setAt(block);
    if (isClick) enter(block);
  };
  const block = view.first + at * per;
  const users = live.holders.get(block);
  const selection = at < 0 ? "" : per > 1 ? `Blocks ${count(block)} to ${count(Math.min(state.num_blocks, block + per) - 1)}: Enter shows each of them` : `Block ${count(block)}: ${users ? `held by ${[...users].slice(0, 3).map(nameOf).join(", ")}${
    users.size > 3 ? ` and ${users.size - 3} more` : ""}` : live.cached.has(block) ? "held by nobody" : "free"}${
    live.cached.has(block) ? ", cached" : ""}`;
  const range = per > 1 ? ` A cell is ${count(per)} blocks, filled from below by the share that is held.` : view.num < state.num_blocks
    ? ` Shown are the blocks ${count(view.first)} to ${count(view.first + view.num - 1)}.` : "";
  const rows = () => sequences().map((seqId) => {
    const table = [...live.tables.get(seqId).keys()];
    return [nameOf(seqId), table.length, live.positions.get(seqId) ?? 0, table.filter((each) => live.holders.get(each).size > 1).length,
      table.filter((each) => live.cached.has(each)).length];
  });
  return html`<div class="bitmap">
    <${Figure} label="KV blocks" height=${tall} draw=${draw} version=${`${view.first} ${view.num} ${chosen}`} summary=${`${summary}${range}`}
      columns=${["request", ["blocks"], ["tokens computed"], ["blocks shared"], ["blocks cached"]]} rows=${rows}
      onKey=${move} onPoint=${point} selection=${selection} />
    <${Legend} of=${per > 1 ? [["owner", "colour: the requests with the most of its blocks"], ["cached", "hatched: only cached"], ["free", "empty: free"]]
      : [["owner", "colour: its request"], ["split", "two colours: shared"], ["cached", "hatched: cached"], ["unfilled", "pale: not filled yet"], ["free", "empty: free"]]} />
  </div>`;
}

/** Blocks in use, only cached, free, and held by several. The server's counts where the blocks are not known yet. */
export function countsOf(state) {
  const isKnown = live.holders.size || live.cached.size;
  let held = live.holders.size;
  let [cached, shared] = [0, 0];
  for (const block of live.cached) if (!live.holders.has(block)) cached += 1;
  for (const users of live.holders.values()) if (users.size > 1) shared += 1;
  if (!isKnown) [held, cached] = [state.num_blocks_held, state.num_blocks_cached];
  return { held, cached, shared, free: state.num_blocks - held - cached, isKnown };
}

/** Rows that the engine computed for a request, and those that it had computed without a KV cache: in each step all
 * tokens before the new one again. */
export function rowsOf(position, numPrompt) {
  const numDecoded = Math.max(0, position - numPrompt);
  return { rows: position, rowsWithout: position + (numDecoded * (2 * numPrompt + numDecoded - 1)) / 2 };
}

function BlockTable({ state, seqId }) {
  const size = state.block_size;
  const table = fillOf(seqId, size);
  if (!table.length) return html`<p>${nameOf(seqId)} holds no blocks: it has ended, or waits.</p>`;
  const [position, numPrompt] = [live.positions.get(seqId) ?? 0, live.prompts.get(seqId) ?? 0];
  const shared = table.filter(([block]) => live.holders.get(block).size > 1).length;
  const { rows, rowsWithout } = rowsOf(position, numPrompt);
  const layout = (width) => {
    const wide = Math.max(2, Math.min(8, Math.floor((width / size - 4) / 4)));
    return { wide, columns: Math.max(1, Math.floor(width / (wide * size + 6))) };
  };
  const tall = (width) => Math.min(SLOT_ROWS, Math.ceil(table.length / layout(width).columns)) * 22 + 2;
  const draw = ({ context, width, height, colours, store }) => {
    const { wide, columns } = layout(width);
    const [end, high] = [live.positions.get(seqId) ?? 0, 16];
    store.cached ??= hatch(context, colours.background, { gap: 4 });
    context.clearRect(0, 0, width, height);
    fillOf(seqId, size).forEach(([block, filled], index) => {
      const [x, y] = [(index % columns) * (wide * size + 6), Math.floor(index / columns) * 22];
      for (let slot = 0; slot < size; slot += 1) {
        const token = index * size + slot;
        const colour = token < numPrompt ? colours.owners[4] : colours.owners[0];
        fill(context, slot < filled ? colour : colours.surface, x + slot * wide, y, wide - 1, high);
        if (token === end) fill(context, colours.accent, x + slot * wide, y + high, wide - 1, 3);
      }
      if (live.cached.has(block)) fill(context, store.cached, x, y, wide * size, high);
    });
  };
  const summary = `${count(table.length)} blocks of ${size} tokens; ${count(position)} tokens are computed, of them ${
    count(Math.min(position, numPrompt))} of the prompt; ${count(shared)} blocks are shared.`;
  return html`<section aria-label="Block table">
    <${Facts} of=${{
      blocks: table.length, tokens: position,
      ...(state.kv_token_bytes ? { "bytes held": bytes(table.length * size * state.kv_token_bytes) } : {}),
      "rows computed with the cache": rows, "and without it": rowsWithout, "saved": `${count(rowsWithout - rows)} rows`,
    }} />
    <${Figure} label="Block table of ${nameOf(seqId)}" height=${tall} draw=${draw} version=${`${seqId} ${table.length}`}
      summary=${summary} columns=${[["place"], ["block"], "tokens", ["filled"], "cached", "held by"]}
      rows=${() => fillOf(seqId, size).map(([block, filled], index) => [index, block, `${index * size} … ${(index + 1) * size - 1}`,
        filled, live.cached.has(block) ? "yes" : "", [...live.holders.get(block)].map(nameOf).join(", ")])} />
    <${Legend} of=${[["prompt", "token of the prompt"], ["answer", "token of the answer"], ["cached", "hatched: cached"]]} />
  </section>`;
}

export function Blocks() {
  const { state } = useLive(TEXT_MS);
  const [chosen, choose] = useState(0);
  const [order, setOrder] = useState(null);
  const [view, zoom] = useState(null);
  if (!state) return html`<h1>KV blocks</h1><p>Connecting …</p>`;
  const { held, cached, free, shared, isKnown } = countsOf(state);
  const running = sequences();
  const shown = order ?? (state.num_blocks > MAX_CELLS ? "sequence" : "place");
  const summary = `${count(held)} of ${count(state.num_blocks)} blocks are held by ${count(running.length)} requests, ${
    count(shared)} of them shared; ${count(cached)} are only cached, ${count(free)} free.`;
  const choice = chosen && !running.includes(chosen) ? [...running, chosen] : running;
  return html`<h1>KV blocks</h1>
    <p>A block holds the keys and values of ${state.block_size} tokens. A request's blocks need not lie together: its block
      table says where they are.</p>
    <${Facts} of=${{
      // Of one moment: the server's counts are up to a second older than the blocks.
      blocks: state.num_blocks, held, cached, free, running: isKnown ? running.length : state.num_running, waiting: state.num_waiting,
      waste: isKnown ? percent(wasteOf(state.block_size)) : "not known yet",
    }} />
    <p class="hint">Waste: the share of the slots in held blocks that have no token. On average half of a sequence's last block is empty.</p>
    <${Hold} />
    ${!isKnown && held + cached > 0 && html`<p>Which blocks these are is known from the next step on.</p>`}
    <div class="controls"><${Choice} label="Follow a request:" value=${chosen} choose=${choose}
      options=${[[0, "none"], ...choice.map((seqId) => [seqId, nameOf(seqId)])]} />
      <${Choice} label="Order the blocks" value=${shown} choose=${setOrder} options=${[["sequence", "by sequence"], ["place", "by place"]]} />
      ${shown === "place" && view && html`<button type="button" onClick=${() => zoom(null)}>All blocks</button>`}</div>
    ${shown === "place" ? html`<${Bitmap} state=${state} chosen=${chosen} choose=${choose} summary=${summary} view=${view ?? { first: 0, num: state.num_blocks }} zoom=${zoom} />`
      : html`<${Rows} state=${state} chosen=${chosen} choose=${choose} summary=${summary} />`}
    ${chosen ? html`<${BlockTable} state=${state} seqId=${chosen} key=${chosen} />` : null}`;
}
