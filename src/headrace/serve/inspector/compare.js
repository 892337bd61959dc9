// Two settings side by side: one prompt and one seed, so that what differs is the settings' doing.

import { differsAt, isRunning, newAnswer, receive } from "./answers.js";
import { count, html, useRedraw, useRef, useState } from "./lib.js";
import { markdown } from "./markdown.js";
import { Stats } from "./messages.js";
import { Fields, ModelPicker, knobsOf, systemOf, useServer } from "./settings.js";
import { likelihoods } from "./tokens.js";

const SIDES = ["left", "right"];
const START = { left: { temperature: "0.2" }, right: { temperature: "1.2" } };
const MAX_SEED = 2 ** 31;

/** The share of pairs of neighbouring words that occur once: 1 without repetition. */
export function distinct2(text) {
  const words = text.toLowerCase().match(/[\p{L}\p{N}']+/gu) ?? [];
  const pairs = words.slice(1).map((word, i) => `${words[i]} ${word}`);
  return pairs.length ? new Set(pairs).size / pairs.length : 1;
}

/** The perplexity of an answer under the model alone. */
async function perplexity(model, answer) {
  const logprobs = (await likelihoods(model, answer)).map(({ logprob }) => logprob);
  return Math.exp(-logprobs.reduce((sum, each) => sum + each, 0) / logprobs.length);
}

function Side({ name, title, settings, models, model, defaults, answer, limit, onChange }) {
  return html`<section aria-label=${title}><h2>${title}</h2>
    <${ModelPicker} models=${models} model=${model} onChoose=${(id) => onChange(Object.assign(settings, { model: id }))} />
    <div class="settings fields"><${Fields} conversation=${settings} defaults=${defaults} onChange=${onChange} without=${["seed"]} /></div>
    ${answer && html`<article class="answer" aria-label=${`${title} answer`} aria-busy=${isRunning(answer)}>
      <div class="text">${markdown(answer.content)}</div>
      ${answer.error && html`<p role="alert">${answer.error}</p>`}
      <${Stats} answer=${answer} limit=${limit} />
      ${!isRunning(answer) && answer.ids.length > 0 && html`<p class="stats" data-side=${name}><span title="share of the pairs of neighbouring words that occur once">distinct-2 ${distinct2(answer.content).toFixed(2)}</span>
        ${answer.perplexity && html`<span title="of its tokens under the model alone, without the knobs">perplexity ${answer.perplexity.toFixed(1)}</span>`}</p>`}
    </article>`}</section>`;
}

export function Compare() {
  const redraw = useRedraw();
  const { models, defaults, error } = useServer();
  const [both] = useState(() => Object.fromEntries(SIDES.map((side) => [side, { model: "", system: "", knobs: { ...START[side], max_tokens: "120" } }])));
  const [answers, setAnswers] = useState(null);
  const controller = useRef(null), prompt = useRef(null), seed = useRef(null);
  const modelOf = ({ model }) => (models.some(({ id }) => id === model) ? model : models[0]?.id);
  const run = async (event) => {
    event.preventDefault();
    const { signal } = (controller.current = new AbortController());
    const number = Number(seed.current.value || (seed.current.value = Math.floor(Math.random() * MAX_SEED)));
    const fresh = Object.fromEntries(SIDES.map((side) => [side, newAnswer()]));
    setAnswers(fresh);
    await Promise.all(SIDES.map(async (side) => {
      const [settings, answer] = [both[side], fresh[side]];
      const messages = [...systemOf(settings), { role: "user", content: prompt.current.value }];
      await receive("/v1/chat/completions", { model: modelOf(settings), messages, ...defaults, ...knobsOf(settings), seed: number }, answer, signal, redraw);
      if (answer.ids.length && !answer.error) {
        // Without a key for it, or with a model that was unloaded, the figure is missing.
        answer.perplexity = await perplexity(modelOf(settings), answer).catch(() => null);
      }
      redraw();
    }));
  };
  const isBusy = answers && SIDES.some((side) => isRunning(answers[side]));
  const differs = answers && !isBusy && SIDES.every((side) => answers[side].ids.length) ? differsAt(answers.left, answers.right) : null;
  const verdict = differs === null ? "" : differs < 0 ? `The same ${count(answers.left.ids.length)} tokens on both sides.` : `The answers differ from token ${count(differs + 1)} on.`;
  return html`<h1>Two settings, one seed</h1>
    <p class="muted">Both sides get the same prompt and seed. Noise belongs to a seed and a position, so the same settings give the same text, and a difference is the settings' doing.</p>
    ${error && html`<p role="alert">${error.message}</p>`}
    <form class="composer" onSubmit=${run}>
      <label><span class="hidden">Prompt</span><textarea ref=${prompt} rows="2" required placeholder="Prompt of both sides" onKeyDown=${(event) => {
        if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
          event.preventDefault();
          event.target.form.requestSubmit();
        }
      }} /></label>
      <label>seed <input ref=${seed} type="number" min="0" max=${Number.MAX_SAFE_INTEGER} step="1" placeholder="random" /></label>
      ${isBusy ? html`<button type="button" onClick=${() => controller.current.abort()}>Stop</button>` : html`<button disabled=${!models.length}>Compare</button>`}
    </form>
    <p role="status">${isBusy ? "The answers are coming." : verdict}</p>
    <div class="sides">${SIDES.map((side) => html`<${Side} key=${side} name=${side} title=${side === "left" ? "Left" : "Right"} settings=${both[side]} models=${models} model=${modelOf(both[side])}
      defaults=${defaults} answer=${answers?.[side]} limit=${models.find(({ id }) => id === modelOf(both[side]))?.max_model_len} onChange=${redraw} />`)}</div>`;
}
