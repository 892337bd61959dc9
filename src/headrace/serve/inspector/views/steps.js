// The steps as columns: the work of each, and the room that it left. Below, the same requests in static batches.

import { arrow, Facts, Figure, fill, fillEmpty, frame, hatch, Legend, NUM_OWNERS, onLook, percent } from "../canvas.js";
import { count, html, seconds, useEffect, useRef, useState } from "../lib.js";
import { live, MAX_STEPS, nameOf, useLive } from "../live.js";
import { Hold } from "./hold.js";
import { batched, meanWait, partsOf, scheduled, utilisation, WAITS } from "./schedule.js";

const [TALL, LANES_TALL, COLUMN, ARRIVALS_TALL] = [200, 120, 5, 9];
const [TEXT_MS, LANES_MS] = [500, 250];

function describe(step) {
  const { prefill, decode, guessed, kept } = partsOf(step, live.prompts);
  const chunks = prefill.slice(0, 3).map(([seqId, length]) => `${count(length)} tokens of the prompt of ${nameOf(seqId)}`);
  if (prefill.length > 3) chunks.push(`${prefill.length - 3} more prompts`);
  const words = [`${decode} decode rows`, ...chunks];
  if (guessed) words.push(`${guessed} guesses, ${kept} kept`);
  const [head, lack] = step.head;
  return `Step ${count(step.step_id)}: ${words.join("; ")}; ${seconds(step.times[3] - step.times[0])}${
    head ? `; ${nameOf(head)} waits for ${WAITS[lack]}` : ""}.`;
}

/** `source()` returns the steps that are shown, the newest last, at most `num` of them. */
function Columns({ source, bound, isBound, chosen, choose, summary, onSpace }) {
  const draw = ({ context, width, height, colours, store }) => {
    store.wrong ??= hatch(context, colours.background, { gap: 3, up: false });
    store.read ??= hatch(context, colours.text, { gap: 4 });
    const steps = source(Math.floor(width / COLUMN));
    const parts = steps.map((step) => partsOf(step, live.prompts));
    const most = isBound && bound ? bound : Math.max(8, ...parts.map((each) => each.tokens));
    const scale = (height - 14) / most;
    context.clearRect(0, 0, width, height);
    parts.forEach(({ read, decode, guessed, kept }, index) => {
      const x = index * COLUMN;
      let y = height;
      const bar = (num, colour, pattern) => {
        if (!num) return;
        const tall = Math.max(1, num * scale);
        y -= tall;
        for (const style of pattern ? [colour, pattern] : [colour]) fill(context, style, x, y, COLUMN - 1, tall);
      };
      bar(decode, colours.owners[0]);
      bar(kept, colours.owners[1]);
      bar(guessed - kept, colours.owners[6], store.wrong);
      bar(read, colours.owners[4], store.read);
      fillEmpty(context, colours, x, 14, COLUMN - 1, Math.max(0, y - 14));
      if (steps[index].step_id === chosen) frame(context, colours.text, x - 1, 13, COLUMN + 1, height - 13);
    });
    [context.fillStyle, context.font] = [colours.muted, "12px system-ui"];
    context.fillText(`${count(most)} tokens${most === bound ? ", a step's bound" : ""}`, 0, 10);
  };
  const move = (key, { width }) => {
    if (key === " ") onSpace();
    const shown = source(Math.floor(width / COLUMN));
    const index = shown.findIndex((step) => step.step_id === chosen);
    const to = arrow(key, index < 0 ? shown.length : index, shown.length);
    if (to !== undefined && shown[to]) choose(shown[to].step_id);
    return to !== undefined || key === " ";
  };
  const point = (x, y, isClick, { width }) => {
    const step = source(Math.floor(width / COLUMN))[Math.floor(x / COLUMN)];
    if (step && isClick) choose(step.step_id);
  };
  const step = chosen && source(MAX_STEPS).find((each) => each.step_id === chosen);
  const rows = () => source(MAX_STEPS).reverse().map((each) => {
    const { read, decode, guessed, kept, tokens } = partsOf(each, live.prompts);
    return [each.step_id, read, decode, guessed, kept, Math.max(0, bound - tokens), seconds(each.times[3] - each.times[0]),
      each.head[0] ? `${nameOf(each.head[0])}: ${WAITS[each.head[1]]}` : ""];
  });
  return html`<${Figure} label="Steps" height=${TALL} draw=${draw} version=${`${isBound} ${chosen}`} summary=${summary}
    columns=${[["step"], ["prompt tokens"], ["decode rows"], ["guesses"], ["kept"], ["idle room"], ["time"], "the queue's head waits for"]}
    rows=${rows} onKey=${move} onPoint=${point} selection=${step ? describe(step) : ""} />`;
}

/** Places of the batch over the steps, as `scheduled` or `batched` return them. */
function Lanes({ label, of, num }) {
  const summary = `${count(of.rows)} rows in ${count(of.num)} steps of ${of.places} places: ${percent(utilisation(of))} used. A request waits ${
    meanWait(of).toFixed(1)} steps on average.`;
  const tall = Math.max(24, Math.min(LANES_TALL, of.places * 10)) + ARRIVALS_TALL;
  const draw = ({ context, width, height, colours, store }) => {
    store.read ??= hatch(context, colours.text, { gap: 4 });
    const [wide, high] = [width / Math.max(1, num), (height - ARRIVALS_TALL) / Math.max(1, of.places)];
    context.clearRect(0, 0, width, height);
    fillEmpty(context, colours, 0, ARRIVALS_TALL, width, height - ARRIVALS_TALL);
    context.fillStyle = colours.text;
    for (const { arrived } of of.runs) {
      context.beginPath();
      context.moveTo(arrived * wide - 3, 0);
      context.lineTo(arrived * wide + 3, 0);
      context.lineTo(arrived * wide, ARRIVALS_TALL - 2);
      context.fill();
    }
    for (const { seqId, place, begin, end, reads } of of.runs) {
      const [x, y] = [begin * wide, ARRIVALS_TALL + place * high];
      const inner = Math.max(0.5, high - (high > 3 ? 1 : 0));
      fill(context, colours.owners[seqId % NUM_OWNERS], x, y, Math.max(0.5, (end - begin) * wide - 1), inner);
      fill(context, store.read, x, y, Math.min(end - begin, reads) * wide, inner);
    }
  };
  const rows = () => of.runs.map(({ seqId, place, arrived, begin, end, reads }) => [nameOf(seqId), arrived, place, begin, end - begin, reads]);
  return html`<h3>${label}</h3><${Figure} label=${label} height=${tall} draw=${draw} version=${`${num} ${of.places}`} summary=${summary}
    columns=${["request", ["arrived"], ["place"], ["first step"], ["steps"], ["of them prompt"]]} rows=${rows} ms=${LANES_MS} />`;
}

export function Steps() {
  const { state } = useLive(TEXT_MS);
  const [held, setHeld] = useState(null);
  const [end, setEnd] = useState(0);
  const [chosen, choose] = useState(0);
  const [isBound, setBound] = useState(false);
  const [num, setNum] = useState(200);
  const place = useRef(null);
  useEffect(() => onLook(place.current, () => setNum(Math.floor(place.current.clientWidth / COLUMN))), []);
  const pause = () => {
    setHeld(held ? null : live.steps.slice());
    setEnd(live.steps.length);
  };
  const scrub = (event) => {
    if (!held) setHeld(live.steps.slice());
    setEnd(Number(event.target.value));
  };
  const pick = (stepId) => {
    if (!held) pause();
    choose(stepId);
  };
  const steps = held ?? live.steps;
  const last = held ? end : steps.length;
  const source = (most) => (held ? held.slice(Math.max(0, end - most), end) : live.steps.slice(-most));
  const shown = source(num);
  const bound = state?.max_num_batched_tokens ?? 0;
  const parts = shown.map((step) => partsOf(step, live.prompts));
  const total = (name) => parts.reduce((sum, each) => sum + each[name], 0);
  const ours = scheduled(shown, live.prompts);
  const theirs = batched(ours);
  const time = shown.reduce((sum, step) => sum + step.times[3] - step.times[0], 0);
  const width = Math.max(ours.num, Math.min(theirs.num, 2 * ours.num));
  const summary = shown.length
    ? `Steps ${count(shown[0].step_id)} to ${count(shown.at(-1).step_id)}: ${count(total("read"))} tokens of prompts, ${
      count(total("decode"))} decode rows, ${count(total("guessed"))} guesses of which ${count(total("kept"))} were kept; ${
      seconds(time / shown.length)} a step.`
    : "No steps yet: they come with the next request.";
  return html`<h1>Steps</h1>
    <p>Each column is a step of the engine: it computes one token of each request that writes, and chunks of prompts, up to
      its bound. A request joins or leaves at any step.</p>
    <${Hold} />
    <div class="controls" ref=${place}>
      <button type="button" aria-pressed=${Boolean(held)} onClick=${pause}>${held ? "Go on" : "Pause"}</button>
      <label>Last step <input type="range" min="1" max=${Math.max(1, steps.length)} value=${last} onInput=${scrub}
        aria-valuetext=${steps[last - 1] ? `step ${steps[last - 1].step_id}` : "none"} /></label>
      <label><input type="checkbox" checked=${isBound} onChange=${() => setBound(!isBound)} /> up to the bound</label>
    </div>
    <${Columns} source=${source} bound=${bound} isBound=${isBound} chosen=${chosen} choose=${pick} summary=${summary} onSpace=${pause} />
    <${Legend} of=${[["decode", "decode rows"], ["guess", "guesses kept"], ["rejected", "guesses rejected"],
      ["prefill", "prompts, hatched"], ["free", "idle room"]]} />
    <${Facts} of=${{
      steps: shown.length, "tokens a step": shown.length ? (total("tokens") / shown.length).toFixed(1) : "0", bound,
      "of the bound": percent(bound && shown.length ? total("tokens") / (bound * shown.length) : 0),
    }} />
    ${shown.length > 0 && html`<h2>The same requests in static batches</h2>
    <p>A static batch of ${ours.places} begins when the one before it has ended, and ends with its longest request; the places
      of the others stay empty until then. Triangles are arrivals, colours are requests; hatched steps read prompts.</p>
    <${Facts} of=${{
      "continuous: places used": percent(utilisation(ours)), "continuous: steps": ours.num, "continuous: mean wait": `${meanWait(ours).toFixed(1)} steps`,
      "static: places used": percent(utilisation(theirs)), "static: steps": theirs.num, "static: mean wait": `${meanWait(theirs).toFixed(1)} steps`,
    }} />
    <${Lanes} label="As scheduled" of=${ours} num=${width} />
    <${Lanes} label="In static batches" of=${theirs} num=${width} />`}`;
}
