// Listings and formulas of a message. What typesets them is loaded with the first of each, and gets nodes from text: no
// HTML of it is ever parsed.

import { h, html, useEffect, useLayoutEffect, useRef, useState } from "./lib.js";

const NAMES = {
  bash: "sh shell zsh console", c: "", cpp: "c++ cc h hpp", css: "", diff: "patch", go: "golang", java: "", javascript: "js jsx mjs node",
  json: "jsonc jsonl", python: "py python3", rust: "rs", sql: "", typescript: "ts tsx", xml: "html svg xhtml", yaml: "yml",
};
const LANGUAGES = new Map(Object.entries(NAMES).flatMap(([name, others]) => [name, ...others.split(" ")].filter(Boolean).map((each) => [each, name])));
// Longer ones stay plain: some expressions of the languages take time by the square of a hostile text's length.
const [MAX_LISTING, MAX_FORMULA, MAX_EXPANSIONS, MAX_EM, MAX_LEVELS] = [10_000, 4_000, 1_000, 20, 250];
const COPIED_MS = 2_000;

/** Collects nodes in place of the HTML that highlight.js would write. */
class Nodes {
  constructor() {
    [this.levels, this.scopes] = [[[]], []];
  }

  get root() { return this.levels[0]; }
  addText(text) { this.levels.at(-1).push(text); }
  startScope(scope) { this.openNode(scope); }
  endScope() { this.closeNode(); }
  openNode(scope) {
    this.scopes.push(scope);
    this.levels.push([]);
  }
  closeNode() {
    if (!this.scopes.length) return;
    const children = this.levels.pop();
    this.levels.at(-1).push(h("span", { class: `hl-${this.scopes.pop().split(".")[0]}` }, children));
  }
  __addSublanguage(inner) { this.levels.at(-1).push(...inner.root); }
  finalize() { while (this.scopes.length) this.closeNode(); }
  toHTML() { return ""; }
}

let highlighter = null;
const loaded = new Set();

/** Return the nodes of a listing in a language of `NAMES`. */
async function highlighted(name, text) {
  highlighter ??= import("./vendor/highlight/core.js").then(({ default: library }) => {
    library.configure({ __emitter: Nodes });
    return library;
  });
  const library = await highlighter;
  if (!loaded.has(name)) {
    library.registerLanguage(name, (await import(`./vendor/highlight/${name}.js`)).default);
    loaded.add(name);
  }
  // Between two listings the page does other work.
  await new Promise((done) => setTimeout(done));
  return library.highlight(text, { language: name, ignoreIllegals: true })._emitter.root;
}

export function Copy({ text, title = "Copy" }) {
  const [isCopied, setCopied] = useState(false);
  const copy = async () => {
    await navigator.clipboard.writeText(text);
    setCopied(true);
    setTimeout(() => setCopied(false), COPIED_MS);
  };
  return navigator.clipboard && html`<button type="button" class="copy" onClick=${copy}>${isCopied ? "Copied" : title}</button>`;
}

/** A listing. It is coloured when it `isWhole`, so that one that still grows is not read again and again. */
export function Listing({ language, text, isWhole }) {
  const [shown, show] = useState({ text: "", nodes: [] });
  const name = LANGUAGES.get(language.toLowerCase());
  useEffect(() => {
    let isCurrent = true;
    if (isWhole && name && text.length <= MAX_LISTING) {
      highlighted(name, text).then((nodes) => isCurrent && show({ text, nodes }), (error) => console.warn(error));
    }
    return () => (isCurrent = false);
  }, [text, name, isWhole]);
  return html`<div class="listing"><div class="bar-of"><span>${language}</span><${Copy} text=${text} /></div>
    <pre tabindex="0" role="region" aria-label=${`code ${language}`}><code>${shown.text === text ? shown.nodes : text}</code></pre></div>`;
}

let typesetter = null;

/** Let a node that asks for a style get it by the object model, for the page's policy forbids the attribute. Throws for nodes
 * within more nodes than a browser lays out. */
function restyle(node, level) {
  if (level > MAX_LEVELS) throw new Error("the formula is nested too deeply");
  const style = node.attributes?.style;
  if (style) {
    delete node.attributes.style;
    const make = node.toNode.bind(node);
    node.toNode = () => {
      const element = make();
      element.style.cssText = style;
      return element;
    };
  }
  for (const child of node.children ?? []) restyle(child, level + 1);
}

/** Return the element of a formula. Throws what the library says of one that it cannot read. */
async function typeset(tex, isDisplay) {
  typesetter ??= new Promise((done, fail) => {
    const style = Object.assign(document.createElement("link"), { rel: "stylesheet", href: "inspector/vendor/katex/katex.css", onload: done, onerror: fail });
    document.head.append(style);
  }).then(() => import("./vendor/katex/katex.js"));
  await typesetter;
  const limits = { maxExpand: MAX_EXPANSIONS, maxSize: MAX_EM, trust: false, strict: "ignore", throwOnError: true };
  const tree = globalThis.katex.__renderToDomTree(tex, { displayMode: isDisplay, ...limits });
  restyle(tree, 0);
  return tree.toNode();
}

/** A formula; its source until it is typeset, and where it cannot be. */
export function Formula({ tex, source, isDisplay }) {
  const place = useRef(null);
  useLayoutEffect(() => {
    place.current.textContent = source;
  }, [source]);
  useEffect(() => {
    let isCurrent = true;
    const fail = (error) => isCurrent && (place.current.title = error.message ?? "could not be loaded");
    if (tex.length <= MAX_FORMULA) typeset(tex, isDisplay).then((node) => isCurrent && place.current.replaceChildren(node), fail);
    return () => (isCurrent = false);
  }, [tex, isDisplay]);
  return html`<span class=${isDisplay ? "formula display" : "formula"} ref=${place} tabindex=${isDisplay ? 0 : undefined} role=${isDisplay ? "group" : undefined}
    aria-label=${isDisplay ? "formula" : undefined}></span>`;
}
