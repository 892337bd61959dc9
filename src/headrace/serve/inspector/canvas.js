// Figures drawn by hand: a canvas with its name, a summary in words, and the same as a table.

import { count, html, useLayoutEffect, useRef, useState } from "./lib.js";
import { follow } from "./live.js";

export const NUM_OWNERS = 7;
const NAMES = ["background", "surface", "line", "text", "muted", "accent", "alert"];
const MAX_ROWS = 200;

/** The colours of the present theme by the names of style.css; `owners` are colours of requests, `flight` belongs to no
 * request. */
export function coloursOf(element) {
  const probe = document.createElement("span");
  element.after(probe);
  const resolve = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  };
  const colours = Object.fromEntries(NAMES.map((name) => [name, resolve(name)]));
  colours.owners = Array.from({ length: NUM_OWNERS }, (_, index) => resolve(`owner-${index}`));
  colours.flight = resolve("owner-7");
  probe.remove();
  return colours;
}

/** Call `draw` when the size of an element, or the theme, changes, and at once. Returns a function that stops it. */
export function onLook(element, draw) {
  const size = new ResizeObserver(draw);
  const theme = new MutationObserver(draw);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  size.observe(element);
  theme.observe(document.documentElement, { attributeFilter: ["data-theme"] });
  dark.addEventListener("change", draw);
  return () => {
    for (const observer of [size, theme]) observer.disconnect();
    dark.removeEventListener("change", draw);
  };
}

/** Fill a rectangle with a colour or a pattern. */
export function fill(context, style, ...rectangle) {
  context.fillStyle = style;
  context.fillRect(...rectangle);
}

/** Fill a rectangle with the colour of empty room. */
export function fillEmpty(context, colours, ...rectangle) {
  context.globalAlpha = 0.35;
  fill(context, colours.line, ...rectangle);
  context.globalAlpha = 1;
}

/** Draw the frame of the selection. */
export function frame(context, style, ...rectangle) {
  [context.strokeStyle, context.lineWidth] = [style, 2];
  context.strokeRect(...rectangle);
}

/** A pattern of diagonal lines. Lines in `up` rise to the right. */
export function hatch(context, colour, { gap = 5, up = true } = {}) {
  const tile = document.createElement("canvas");
  [tile.width, tile.height] = [2 * gap, 2 * gap];
  const pen = tile.getContext("2d");
  pen.scale(2, 2);
  [pen.strokeStyle, pen.lineWidth] = [colour, 1];
  for (const offset of [-gap, 0, gap]) {
    pen.moveTo(offset - 1, up ? gap + 1 : -1);
    pen.lineTo(offset + gap + 1, up ? -1 : gap + 1);
  }
  pen.stroke();
  const pattern = context.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(0.5));
  return pattern;
}

/**
 * A canvas as wide as its place. `draw(pen, isWhole)` draws it: `pen` has the 2D `context` in CSS pixels, `width`,
 * `height`, `colours`, and `store`, an object that is new when all has to be drawn, as `isWhole` says: after a change
 * of size, theme or `version`. `height` is a number or a function of the width. `summary` is the figure in words,
 * `columns` and `rows()` the same as a table. `onKey(key, pen)` returns whether it used a key, `onPoint(x, y, isClick,
 * pen)` follows the pointer; `selection` describes their choice.
 */
export function Figure({ label, height, draw, version, summary, columns, rows, onKey, onPoint, selection, ms }) {
  const canvas = useRef(null);
  const latest = useRef({});
  Object.assign(latest.current, { draw, height });
  useLayoutEffect(() => {
    const element = canvas.current;
    const context = element.getContext("2d");
    const whole = () => {
      const { draw, height } = latest.current;
      const width = element.clientWidth;
      if (!width) return;
      const tall = typeof height === "function" ? height(width) : height;
      element.style.height = `${tall}px`;
      [element.width, element.height] = [width * devicePixelRatio, tall * devicePixelRatio];
      context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
      const pen = { context, width, height: tall, colours: coloursOf(element), store: {} };
      latest.current.pen = pen;
      draw(pen, true);
    };
    const part = () => latest.current.pen && latest.current.draw(latest.current.pen, false);
    Object.assign(latest.current, { whole, part });
    const ends = [onLook(element.parentElement, whole), follow(part, ms)];
    return () => ends.forEach((end) => end());
  }, []);
  useLayoutEffect(() => latest.current.whole(), [version]);
  useLayoutEffect(() => latest.current.part());
  const press = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (onKey(event.key, latest.current.pen)) event.preventDefault();
  };
  const point = (isClick) => (event) => {
    const box = canvas.current.getBoundingClientRect();
    onPoint(event.clientX - box.left, event.clientY - box.top, isClick, latest.current.pen);
  };
  return html`<figure>
    <canvas ref=${canvas} role=${onKey ? "application" : "img"} aria-label="${label}. ${summary}"
      aria-roledescription=${onKey ? "figure; the arrow keys choose" : undefined}
      tabindex=${onKey ? 0 : undefined} onKeyDown=${onKey && press}
      onPointerMove=${onPoint && point(false)} onPointerDown=${onPoint && point(true)}></canvas>
    <figcaption>${summary}</figcaption>
    ${onKey && html`<p class="selection" role="status">${selection || "\u00a0"}</p>`}
    ${columns && html`<${Folded} title="${label} as a table" columns=${columns} rows=${rows} />`}
  </figure>`;
}

/** A table that is made when it is opened. */
export function Folded({ title, columns, rows }) {
  const [isOpen, setOpen] = useState(false);
  return html`<details onToggle=${(event) => setOpen(event.target.open)}>
    <summary>${title}</summary>
    ${isOpen && html`<${Table} caption=${title} columns=${columns} rows=${rows()} />`}
  </details>`;
}

/** A table; a column is a title, or [title] for numbers. At most `MAX_ROWS` rows. */
export function Table({ caption, columns, rows, maxRows = MAX_ROWS }) {
  const kind = (column) => (Array.isArray(column) ? "number" : undefined);
  const num = rows.length - maxRows;
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${caption}>
    <table>
      <thead><tr>${columns.map((column) => html`<th scope="col" class=${kind(column)}>${column}</th>`)}</tr></thead>
      <tbody>${rows.slice(0, maxRows).map((row) => html`<tr key=${row.key}>
        ${row.map((cell, index) => html`<td class=${kind(columns[index])}>${typeof cell === "number" ? count(cell) : cell}</td>`)}
      </tr>`)}</tbody>
    </table>
    ${num > 0 && html`<p>${count(num)} more</p>`}
  </div>`;
}

/** Numbers with their names: {name: text}. */
export function Facts({ of }) {
  return html`<dl class="facts">${Object.entries(of).map(([name, text]) => html`<div key=${name}>
    <dt>${name}</dt><dd data-fact=${name}>${typeof text === "number" ? count(text) : text}</dd>
  </div>`)}</dl>`;
}

/** A legend: [class of the swatch, words]. */
export const Legend = ({ of }) => html`<ul class="legend">${of.map(([name, words]) => html`<li><span class="swatch ${name}"></span>${words}</li>`)}</ul>`;

/** The place to which a key moves in a row of `num`; undefined for other keys. At the ends it stays. */
export function arrow(key, index, num) {
  const to = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: num - 1 }[key];
  return to === undefined ? undefined : Math.max(0, Math.min(num - 1, to));
}

/** A choice among `options`, which are [value, words]. */
export function Choice({ label, value, options, choose }) {
  return html`<label>${label} <select onChange=${(event) => choose(options[event.target.selectedIndex][0])}>
    ${options.map(([each, words]) => html`<option key=${each} value=${each} selected=${each === value}>${words}</option>`)}
  </select></label>`;
}

export const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)} %`;
