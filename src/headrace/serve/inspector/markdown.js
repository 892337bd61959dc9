// Markdown as Preact nodes. Text stays text: there is no HTML in it, and links lead to http, https and mail alone. Small
// Markdown libraries make HTML, which would need a sanitizer as large as this file several times over.

import { h } from "./lib.js";
import { Formula, Listing } from "./rich.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
// With s, for a line may hold separators that . passes over, and each blank before one would be tried as the last.
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/s;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^( *)(?:([-*+])|(\d{1,9})[.)])\s+(.*)$/s;
const QUOTE = /^ {0,3}> ?/;
const TASK = /^\[([ xX])\]\s+/;
const FORMULA = /^ {0,3}(\$\$|\\\[)/;
const CLOSES = { "$$": "$$", "\\[": "\\]", "\\(": "\\)" };
const [MAX_DEPTH, MAX_FORMULA_LINES] = [8, 100];

/** Return the nodes of a text. An answer that is still coming may end within a block. */
export const markdown = (text) => blocks(text.replaceAll("\r\n", "\n").split("\n"), 0);

function blocks(lines, depth) {
  const nodes = [];
  for (let i = 0; i < lines.length; ) {
    const [node, next] = block(lines, i, depth);
    if (node) nodes.push(node);
    i = next;
  }
  return nodes;
}

/** Return the block that begins at line `i` and the line after it. */
function block(lines, i, depth) {
  const line = lines[i];
  if (!line.trim()) return [null, i + 1];
  const fence = FENCE.exec(line);
  if (fence) {
    const closes = (each) => each.trim().startsWith(fence[1]) && !each.trim().slice(fence[1].length).replaceAll(fence[1][0], "");
    const end = ending(lines, i + 1, closes);
    const text = lines.slice(i + 1, end).join("\n");
    if (fence[2] === "math") return [formula(text, text, true), end + 1];
    return [h(Listing, { language: fence[2], text, isWhole: end < lines.length }), end + 1];
  }
  const opened = FORMULA.exec(line);
  const display = opened && displayed(lines, i, opened[1]);
  if (display) return display;
  const heading = HEADING.exec(line);
  // The page has the levels above.
  if (heading) return [h(`h${Math.min(6, heading[1].length + 2)}`, null, inline(heading[2].replace(/\s#+\s*$/, ""))), i + 1];
  if (RULE.test(line)) return [h("hr"), i + 1];
  if (depth < MAX_DEPTH && QUOTE.test(line)) {
    const end = ending(lines, i, (each) => !QUOTE.test(each));
    return [h("blockquote", null, blocks(lines.slice(i, end).map((each) => each.replace(QUOTE, "")), depth + 1)), end];
  }
  if (depth < MAX_DEPTH && ITEM.test(line)) return list(lines, i, depth);
  if (line.includes("|") && cellsOf(lines[i + 1] ?? "").every((cell) => /^:?-+:?$/.test(cell))) return table(lines, i);
  const end = ending(lines, i + 1, (each) => !each.trim() || FENCE.test(each) || HEADING.test(each) || QUOTE.test(each) || ITEM.test(each) || FORMULA.test(each));
  return [h("p", null, inline(lines.slice(i, end).join("\n"))), end];
}

function ending(lines, start, ends) {
  let i = start;
  while (i < lines.length && !ends(lines[i])) i += 1;
  return i;
}

const formula = (tex, source, isDisplay) => h(Formula, { tex, source, isDisplay });

/** Return the formula that begins a line and ends one, and the line after it; null if none does. */
function displayed(lines, start, opens) {
  const closes = CLOSES[opens];
  for (let i = start; i < Math.min(lines.length, start + MAX_FORMULA_LINES); i += 1) {
    const line = lines[i].trimEnd();
    if (!line.endsWith(closes) || (i === start && line.trim().length < opens.length + closes.length)) continue;
    const source = lines.slice(start, i + 1).join("\n").trim();
    const tex = source.slice(opens.length, -closes.length);
    return tex.includes(closes) ? null : [formula(tex, source, true), i + 1];
  }
  return null;
}

/** A list, whose items have the lines that are indented more than it, and one blank line between them at most. */
function list(lines, start, depth) {
  const [, indent, bullet, first] = ITEM.exec(lines[start]);
  const items = [];
  let i = start;
  for (let match; i < lines.length && (match = ITEM.exec(lines[i])) && match[1].length === indent.length && !match[2] === !bullet; ) {
    const inner = ending(lines, i + 1, (each) => each.trim() && each.search(/\S/) <= indent.length);
    const rest = lines.slice(i + 1, inner);
    const strip = rest.reduce((least, each) => (each.trim() ? Math.min(least, each.search(/\S/)) : least), 8);
    const task = TASK.exec(match[4]);
    const body = blocks([match[4].slice(task?.[0].length ?? 0), ...rest.map((each) => each.slice(strip))], depth + 1);
    const box = task && h("input", { type: "checkbox", disabled: true, checked: task[1] !== " ", "aria-label": task[1] === " " ? "to do" : "done" });
    items.push(h("li", task && { class: "task" }, box, body.length && body[0].type === "p" ? [body[0].props.children, ...body.slice(1)] : body));
    i = inner;
  }
  return [bullet ? h("ul", null, items) : h("ol", { start: Number(first) }, items), i];
}

/** Return the texts of a row's cells. No expression reads the whole row, for blanks between two marks could be of either. */
const cellsOf = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));

function table(lines, start) {
  const end = ending(lines, start + 2, (each) => !each.includes("|"));
  const sides = cellsOf(lines[start + 1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : undefined));
  const head = h("tr", null, cellsOf(lines[start]).map((cell, i) => h("th", { scope: "col", class: sides[i] }, inline(cell))));
  const rows = lines.slice(start + 2, end).map((line) => h("tr", null, cellsOf(line).map((cell, i) => h("td", { class: sides[i] }, inline(cell)))));
  return [h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "table" }, h("table", null, h("thead", null, head), h("tbody", null, rows))), end];
}

const MARKS = ["***", "___", "**", "__", "~~", "*", "_"];
const SPECIAL = /[\\`*_~[\n$<]|!(?=\[)|https?:\/\//g;
const LINK = /^\[([^[\]]{0,500})\]\(\s*(?:((?:[^\s()]|\([^\s()]{0,200}\)){1,2000})(?:\s+"[^"]{0,500}")?\s*)?\)/;

/** Return the nodes of a line's text. Each search looks ahead in bounded text, so that time grows with the length. */
function inline(text, depth = 0) {
  const nodes = [];
  let plain = "";
  const add = (node) => {
    if (plain) nodes.push(plain);
    plain = "";
    nodes.push(node);
  };
  for (let i = 0; i < text.length; ) {
    SPECIAL.lastIndex = i;
    const next = SPECIAL.exec(text)?.index ?? text.length;
    plain += text.slice(i, next);
    if (next === text.length) break;
    if (text[next] === "\n" && plain.endsWith("  ")) {
      plain = plain.trimEnd();
      add(h("br"));
      i = next + 1;
      continue;
    }
    const [node, length] = span(text.slice(next, next + 4000), text[next - 1] ?? " ", depth);
    if (typeof node === "string") plain += node;
    else add(node);
    i = next + length;
  }
  if (plain) nodes.push(plain);
  return nodes;
}

/** Return the first node of the text (or letters without a meaning), and its length. */
function span(text, before, depth) {
  if (text.startsWith("\\\n")) return [h("br"), 2];
  if (text[0] === "$" || text[0] === "\\") {
    const found = within(text, before);
    if (found) return found;
  }
  if (text[0] === "\\" && /^\\[!-/:-@[-`{-~]/.test(text)) return [text[1], 2];
  if (text[0] === "\n") return [" ", 1];
  if (text[0] === "`") {
    const ticks = /^`+/.exec(text)[0];
    const end = text.indexOf(ticks, ticks.length);
    return end < 0 ? [ticks, ticks.length] : [h("code", null, text.slice(ticks.length, end).trim()), end + ticks.length];
  }
  if (depth >= MAX_DEPTH) return [text[0], 1];
  if (text[0] === "<") {
    const line = /^<br\s?\/?>/i.exec(text);
    return line ? [h("br"), line[0].length] : ["<", 1];
  }
  if (text[0] === "[" || text[0] === "!") {
    const isImage = text[0] === "!";
    const link = LINK.exec(text.slice(Number(isImage)));
    const to = link?.[2] && address(link[2]);
    // An image would tell its server who reads.
    const children = to && (isImage ? `image: ${link[1] || new URL(to).host}` : inline(link[1], depth + 1));
    return to ? [anchor(to, children), link[0].length + Number(isImage)] : [text[0], 1];
  }
  if (text[0] === "h") {
    let url = /^https?:\/\/[^\s<>"'`)\]]{1,2000}/.exec(text)?.[0] ?? "";
    while (".,;:!?*_~".includes(url.at(-1) ?? " ")) url = url.slice(0, -1);
    const to = url && address(url);
    return to ? [anchor(to, url), url.length] : [text[0], 1];
  }
  for (const mark of MARKS) {
    if (!text.startsWith(mark) || /\s|^$/.test(text[mark.length] ?? "") || (mark[0] === "_" && /\w/.test(before))) continue;
    const end = closing(text, mark);
    if (end < 0) continue;
    const children = inline(text.slice(mark.length, end), depth + 1);
    const node = mark.length === 3 ? h("strong", null, h("em", null, children)) : h(mark === "~~" ? "del" : mark.length === 2 ? "strong" : "em", null, children);
    return [node, end + mark.length];
  }
  return [text[0], 1];
}

/** Return where the mark that begins the text ends: after a letter, in a run of as many, or of three that end another one too. */
function closing(text, mark) {
  const num = mark.length;
  for (let at = num + 1, run = 0; (at = text.indexOf(mark, at)) >= 0; at += run) {
    for (run = num; text[at + run] === mark[0]; ) run += 1;
    const fits = run === num || (run === 3 && num < 3);
    if (fits && !/\s/.test(text[at - 1]) && !(mark[0] === "_" && /\w/.test(text[at + run] ?? ""))) return at + run - num;
  }
  return -1;
}

/** Return the formula within a line that begins the text, and its length; null if none does. A price is no formula. */
function within(text, before) {
  const opens = text[0] === "$" && text[1] !== "$" ? "$" : text.slice(0, 2);
  if (opens === "$") {
    const found = /^\$((?:[^\s$\\]|\\.)(?:[^$\\]|\\.){0,1000}?)\$(?![\d$])/s.exec(text);
    return found && !/[\w$]/.test(before) && !/\s$/.test(found[1]) ? [formula(found[1], found[0], false), found[0].length] : null;
  }
  const end = CLOSES[opens] ? text.indexOf(CLOSES[opens], 2) : -1;
  return end > 2 ? [formula(text.slice(2, end), text.slice(0, end + 2), opens !== "\\("), end + 2] : null;
}

const anchor = (to, children) => h("a", { href: to, target: "_blank", rel: "noopener noreferrer" }, children);

/** Return an address of a scheme that runs no script, or null. */
function address(text) {
  if (!URL.canParse(text)) return null;
  const { protocol, href } = new URL(text);
  return ["http:", "https:", "mailto:"].includes(protocol) ? href : null;
}
