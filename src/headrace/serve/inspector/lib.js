// What every module of the page shares: Preact, calls to the server with the key, and numbers as text.

import { html as vendorHtml, useEffect, useState } from "./vendor/preact-htm.js";

export {
  h, render, useCallback, useEffect, useLayoutEffect, useMemo, useReducer, useRef, useState,
} from "./vendor/preact-htm.js";

import { useReducer, useRef } from "./vendor/preact-htm.js";

const KEY = "headrace.key";

/** Return a child that is no object but Preact's own, whose constructor is undefined, as in no JSON. Preact takes others for its own
 * too, if they say `__b`, so that a reply with an object where a text should be could make any element. */
const child = (value) => (Array.isArray(value) ? value.map(child) : value !== null && typeof value === "object" && value.constructor !== undefined ? String(value) : value);

/** Return for each value of a template whether it is a child, not in a tag. */
const areChildren = (strings) => strings.map((_, i) => !strings.slice(0, i + 1).join("x").replace(/<("[^"]*"|'[^']*'|[^>"'])*>/g, "").includes("<"));

const known = new WeakMap();
/** Make elements of a template. */
export function html(strings, ...values) {
  if (!known.has(strings)) known.set(strings, areChildren(strings));
  return vendorHtml(strings, ...values.map((value, i) => (known.get(strings)[i] ? child(value) : value)));
}

/** Return what `read` finds in the page's address, also after the address has changed. */
export function useAddress(read) {
  const [found, setFound] = useState(read);
  useEffect(() => {
    const end = new AbortController(), follow = () => setFound(read);
    for (const name of ["hashchange", "popstate"]) addEventListener(name, follow, { signal: end.signal });
    return () => end.abort();
  }, []);
  return found;
}

export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (text) => (text ? sessionStorage.setItem(KEY, text) : sessionStorage.removeItem(KEY)),
};

/** An error reply of the server, in its own words. `status` is HTTP's, `code` OpenAI's, if there is one. */
export class ServerError extends Error {
  constructor(status, message, code = null) {
    super(message);
    Object.assign(this, { status, code });
  }
}

/** Send a request with the key and return the reply. Throws `ServerError` if its status is not of success. */
export async function call(path, { method = "GET", body, signal } = {}) {
  const headers = apiKey.get() ? { authorization: `Bearer ${apiKey.get()}` } : {};
  const isJson = body !== undefined && !(body instanceof Blob);
  if (isJson) headers["content-type"] = "application/json";
  // From the page on: a proxy may have put the server under a path.
  const reply = await fetch(`.${path}`, { method, headers, body: isJson ? JSON.stringify(body) : body, signal });
  if (reply.ok) return reply;
  const text = await reply.text();
  let [message, code] = [text, null];
  try {
    const { error } = JSON.parse(text);
    [message, code] = [error?.message ?? error ?? text, error?.code ?? null];
  } catch {
    // A proxy's error is plain text.
  }
  throw new ServerError(reply.status, message, code);
}

export const json = async (path, options) => (await call(path, options)).json();

/** Yield the JSON of each event of a streamed reply, until it ends or `[DONE]` comes. */
export async function* events(path, options) {
  const reader = (await call(path, options)).body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

export const count = (number) => Math.round(number).toLocaleString("en-US");

export function seconds(number) {
  if (number < 1) return `${(1000 * number).toFixed(number < 0.01 ? 2 : 0)} ms`;
  return number < 60 ? `${number.toFixed(2)} s` : `${Math.floor(number / 60)} min ${Math.round(number % 60)} s`;
}

export function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = number < 1 ? 0 : Math.min(units.length - 1, Math.floor(Math.log2(number) / 10));
  return `${(number / 1024 ** power).toFixed(power ? 1 : 0)} ${units[power]}`;
}

/** Return a function that draws the component again, at most once for each frame of the screen. */
export function useRedraw() {
  const [, redraw] = useReducer((number) => number + 1, 0);
  const frame = useRef(0);
  return () => {
    frame.current ||= requestAnimationFrame(() => {
      frame.current = 0;
      redraw();
    });
  };
}
