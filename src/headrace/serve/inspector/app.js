// The page: its header and menu, and the view that the address names. / is the chat, /#compare two settings, /inspect#NAME a view.

import { Chat } from "./chat.js";
import { Compare } from "./compare.js";
import { apiKey, html, render, useAddress, useEffect, useState } from "./lib.js";
import { live, useLive } from "./live.js";
import { VIEWS } from "./views.js";

const THEMES = { auto: "◐", light: "☀", dark: "☾" };

function Theme() {
  const [theme, setTheme] = useState(Object.keys(THEMES).find((name) => name === localStorage.getItem("headrace.theme")) ?? "auto");
  useEffect(() => {
    document.documentElement.dataset.theme = theme;
    localStorage.setItem("headrace.theme", theme);
  }, [theme]);
  const names = Object.keys(THEMES);
  const next = names[(names.indexOf(theme) + 1) % names.length];
  return html`<button type="button" title="colours: ${theme}" aria-label="Colours: ${theme}; change to ${next}"
    onClick=${() => setTheme(next)}>${THEMES[theme]}</button>`;
}

/** A form for a key, where the server refuses the one that there is. */
function Key({ error }) {
  const submit = (event) => {
    event.preventDefault();
    apiKey.set(event.target.elements.key.value.trim());
    location.reload();
  };
  return html`<form class="key" onSubmit=${submit}>
    <label>API key <input name="key" type="password" autocomplete="off" required /></label>
    <button>Use</button><span role="alert">${error.message}</span>
  </form>`;
}

function Header({ current }) {
  const { state, overload, error, isRecorded } = useLive();
  const isRefused = [401, 403].includes(error?.status);
  useEffect(() => {
    if (isRefused) live.disconnect();
  }, [isRefused]);
  // The chat needs no more than a key that infers.
  const asksForKey = isRefused && !(OWN[current] && error.status === 403);
  const status = isRecorded ? "a recording" : isRefused ? "this key may not watch the engine" : error ? "no connection" : !state ? "connecting" : state.is_ready ? "ready" : "not ready";
  const link = (href, name, title) =>
    html`<a href=${href} aria-current=${current === name ? "page" : undefined}>${title}</a>`;
  return html`<header>
    <span class="brand">headrace</span>
    <span class="status" role="status">${state && `${state.model} · `}${status}</span>
    ${overload?.refused && !error && html`<span class="overload" role="alert">overloaded: ${overload.why}; ${overload.refused} are refused</span>`}
    <nav aria-label="Views">
      ${link("./", "chat", "Chat")}
      ${link("./#compare", "compare", "Compare")}
      ${VIEWS.map(([name, title]) => link(`inspect#${name}`, name, title))}
    </nav>
    <${Theme} />
    ${asksForKey && html`<${Key} error=${error} />`}
  </header>`;
}

// The views of the chat's page, which need no more than a key that infers.
const OWN = { chat: ["Chat", Chat], compare: ["Compare", Compare] };
const own = () => (location.hash === "#compare" ? "compare" : "chat");
const address = () => (location.pathname.endsWith("/inspect") ? location.hash.slice(1).split("/")[0] || VIEWS[0][0] : own());

function Page() {
  const name = useAddress(address);
  const [title, View] = OWN[name] ?? (VIEWS.find((each) => each[0] === name) ?? VIEWS[0]).slice(1);
  useEffect(() => {
    document.title = `${title} · headrace`;
  }, [name]);
  return html`<${Header} current=${name} /><main class=${OWN[name] ? name : `view ${name}`}>
    <${View} key=${name} />
  </main>`;
}

render(html`<${Page} />`, document.getElementById("page"));
