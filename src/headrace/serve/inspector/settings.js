// The model, the system prompt, the tools and the sampling knobs of a conversation. An empty knob has the default of /props, which each request names.

import { html, json, useEffect, useState } from "./lib.js";

/** Name in a request, label, range, step. `stage` is the knob's place in the order of the samplers. */
export const KNOBS = [
  { name: "temperature", label: "temperature", min: 0, max: 100, step: 0.1, stage: 1 },
  { name: "top_p", label: "top-p", min: 0, max: 1, step: 0.05, stage: 4 },
  { name: "top_k", label: "top-k", min: -1, max: 2147483647, step: 1, stage: 3 },
  { name: "min_p", label: "min-p", min: 0, max: 1, step: 0.01, stage: 2 },
  { name: "repetition_penalty", label: "repetition penalty", min: 0.01, max: 100, step: 0.05, stage: 0 },
  { name: "max_tokens", label: "max tokens", min: 1, max: 2147483647, step: 1 },
  { name: "seed", label: "seed", min: 0, max: Number.MAX_SAFE_INTEGER, step: 1 },
];

/** Return the knobs that are set, as numbers. */
export const knobsOf = ({ knobs }) =>
  Object.fromEntries(KNOBS.filter(({ name }) => knobs[name]?.trim()).map(({ name }) => [name, Number(knobs[name])]));

/** Return the tools of a conversation for a request: {} if it has none. Throws if they are no list in JSON. */
export function toolsOf({ tools }) {
  if (!tools.trim()) return {};
  let list = null;
  try {
    list = JSON.parse(tools);
  } catch (error) {
    throw new Error(`Tools: ${error.message}`);
  }
  if (!Array.isArray(list)) throw new Error("Tools: a list in JSON is needed, as in OpenAI's API");
  // A function by itself is taken as OpenAI's form has it.
  return { tools: list.map((each) => (each?.type ? each : { type: "function", function: each })) };
}

/** Return the messages before a conversation's own: its system prompt, if it has one. */
export const systemOf = ({ system }) => (system.trim() ? [{ role: "system", content: system }] : []);

/** The served models, and the server's defaults of the knobs; none of a folder of which no model, or no one model, is loaded. */
export function useServer() {
  const [server, setServer] = useState({ models: [], defaults: {}, error: null });
  useEffect(() => {
    const props = json("/props").catch((error) => (error.status === 400 ? { default_generation_settings: { params: {} } } : Promise.reject(error)));
    Promise.all([json("/v1/models"), props]).then(
      ([{ data }, { default_generation_settings: { params } }]) => {
        const { temperature, top_p, top_k, min_p, repeat_penalty } = params;
        setServer({ models: data, defaults: { temperature, top_p, top_k, min_p, repetition_penalty: repeat_penalty }, error: null });
      },
      (error) => setServer({ models: [], defaults: {}, error }),
    );
  }, []);
  return server;
}

/** The choice of a model, with which of them are loaded. `isAwaited`: an answer is coming that has not begun. */
export function ModelPicker({ models, model, isAwaited, onChoose }) {
  const [loaded, setLoaded] = useState(null);
  const look = () => json("/api/ps").then(({ models: list }) => setLoaded(list.map(({ name }) => name.replace(/:latest$/, ""))), () => setLoaded(null));
  useEffect(() => {
    if (models.length > 1) look();
  }, [models, model, isAwaited]);
  if (models.length < 2) return null;
  const stateOf = (id) => (!loaded ? "" : loaded.includes(id) ? " · loaded" : id === model && isAwaited ? " · loading …" : " · not loaded");
  return html`<label class="picker">Model <select onFocus=${look} onChange=${(event) => onChoose(event.target.value)}>
    ${models.map(({ id }) => html`<option key=${id} value=${id} selected=${id === model}>${id}${stateOf(id)}</option>`)}
  </select></label>`;
}

/** The fields of a conversation's settings. `without`: names of knobs that are left out. */
export function Fields({ conversation, defaults, onChange, without = [] }) {
  const set = (change) => onChange(Object.assign(conversation, change));
  return html`<label class="wide">System prompt
      <textarea rows="2" value=${conversation.system} onInput=${(event) => set({ system: event.target.value })} />
    </label>
    ${KNOBS.filter(({ name }) => !without.includes(name)).map(({ name, label, min, max, step }) => html`<label key=${name}>${label}
      <input type="number" min=${min} max=${max} step=${Number.isInteger(step) ? step : "any"} value=${conversation.knobs[name] ?? ""}
        placeholder=${defaults[name] ?? "default"}
        onInput=${(event) => set({ knobs: { ...conversation.knobs, [name]: event.target.value } })} />
    </label>`)}`;
}

export function Settings({ conversation, defaults, onChange }) {
  return html`<details class="settings"><summary>Settings</summary>
    <${Fields} conversation=${conversation} defaults=${defaults} onChange=${onChange} />
    <label class="wide">Tools, a list in JSON
      <textarea rows="2" value=${conversation.tools} placeholder='[{"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}]'
        onInput=${(event) => onChange(Object.assign(conversation, { tools: event.target.value }))} />
    </label>
  </details>`;
}
