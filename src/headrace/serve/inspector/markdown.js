// Markdown as Preact nodes. Text stays text: there is no HTML in it, and links lead to http, https and mail alone. Small
// Markdown libraries make HTML, which would need a sanitizer as large as this file several times over.

import { h } from "./lib.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
// With s, for a line may hold separators that . passes over, and each blank before one would be tried as the last.
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/s;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^( *)(?:([-*+])|(\d{1,9})[.)])\s+(.*)$/s;
const QUOTE = /^ {0,3}> ?/;
const MAX_DEPTH = 8;

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
    return [h("pre", { tabindex: 0, "aria-label": `code ${fence[2]}` }, h("code", null, lines.slice(i + 1, end).join("\n"))), end + 1];
  }
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
  const end = ending(lines, i + 1, (each) => !each.trim() || FENCE.test(each) || HEADING.test(each) || QUOTE.test(each) || ITEM.test(each));
  return [h("p", null, inline(lines.slice(i, end).join("\n"))), end];
}

function ending(lines, start, ends) {
  let i = start;
  while (i < lines.length && !ends(lines[i])) i += 1;
  return i;
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
    const body = blocks([match[4], ...rest.map((each) => each.slice(strip))], depth + 1);
    items.push(h("li", null, body.length && body[0].type === "p" ? [body[0].props.children, ...body.slice(1)] : body));
    i = inner;
  }
  return [bullet ? h("ul", null, items) : h("ol", { start: Number(first) }, items), i];
}

/** Return the texts of a row's cells. No expression reads the whole row, for blanks between two marks could be of either. */
const cellsOf = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());

function table(lines, start) {
  const end = ending(lines, start + 2, (each) => !each.includes("|"));
  const head = h("tr", null, cellsOf(lines[start]).map((cell) => h("th", { scope: "col" }, inline(cell))));
  const rows = lines.slice(start + 2, end).map((line) => h("tr", null, cellsOf(line).map((cell) => h("td", null, inline(cell)))));
  return [h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "table" }, h("table", null, h("thead", null, head), h("tbody", null, rows))), end];
}

const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];
const SPECIAL = /[\\`*_~[\n]|https?:\/\//g;
const LINK = /^\[([^[\]]{0,500})\]\(\s*(?:([^\s()]{1,2000})\s*)?\)/;

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
  if (text[0] === "\\" && /^\\[!-/:-@[-`{-~]/.test(text)) return [text[1], 2];
  if (text[0] === "\n") return [" ", 1];
  if (text[0] === "`") {
    const ticks = /^`+/.exec(text)[0];
    const end = text.indexOf(ticks, ticks.length);
    return end < 0 ? [ticks, ticks.length] : [h("code", null, text.slice(ticks.length, end).trim()), end + ticks.length];
  }
  if (depth >= MAX_DEPTH) return [text[0], 1];
  if (text[0] === "[") {
    const link = LINK.exec(text);
    const to = link?.[2] && address(link[2]);
    return to ? [anchor(to, inline(link[1], depth + 1)), link[0].length] : ["[", 1];
  }
  if (text[0] === "h") {
    let url = /^https?:\/\/[^\s<>"'`)\]]{1,2000}/.exec(text)?.[0] ?? "";
    while (".,;:!?*_~".includes(url.at(-1) ?? " ")) url = url.slice(0, -1);
    const to = url && address(url);
    return to ? [anchor(to, url), url.length] : [text[0], 1];
  }
  for (const [mark, name] of MARKS) {
    if (!text.startsWith(mark) || /\s|^$/.test(text[mark.length] ?? "") || (mark[0] === "_" && /\w/.test(before))) continue;
    const end = text.indexOf(mark, mark.length + 1);
    if (end < 0 || /\s/.test(text[end - 1]) || (mark[0] === "_" && /\w/.test(text[end + mark.length] ?? ""))) continue;
    return [h(name, null, inline(text.slice(mark.length, end), depth + 1)), end + mark.length];
  }
  return [text[0], 1];
}

const anchor = (to, children) => h("a", { href: to, target: "_blank", rel: "noopener noreferrer" }, children);

/** Return an address of a scheme that runs no script, or null. */
function address(text) {
  if (!URL.canParse(text)) return null;
  const { protocol, href } = new URL(text);
  return ["http:", "https:", "mailto:"].includes(protocol) ? href : null;
}
