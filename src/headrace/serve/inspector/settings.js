// The model, the system prompt and the sampling knobs of a conversation. An empty knob has the default of /props, which each request names.

import { html } from "./lib.js";

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

export function Settings({ conversation, models, defaults, onChange }) {
  const set = (change) => onChange(Object.assign(conversation, change));
  return html`<details class="settings"><summary>Settings</summary>
    ${models.length > 1 && html`<label>Model <select onChange=${(event) => set({ model: event.target.value })}>
      ${models.map(({ id }) => html`<option value=${id} selected=${id === conversation.model}>${id}</option>`)}
    </select></label>`}
    <label class="wide">System prompt
      <textarea rows="2" value=${conversation.system} onInput=${(event) => set({ system: event.target.value })} />
    </label>
    ${KNOBS.map(({ name, label, min, max, step }) => html`<label key=${name}>${label}
      <input type="number" min=${min} max=${max} step=${Number.isInteger(step) ? step : "any"} value=${conversation.knobs[name] ?? ""}
        placeholder=${defaults[name] ?? "default"}
        onInput=${(event) => set({ knobs: { ...conversation.knobs, [name]: event.target.value } })} />
    </label>`)}
  </details>`;
}
