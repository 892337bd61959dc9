// Weights of the model in fewer and fewer bits, and the bits of one of them to change.

import { arrow, Choice, Figure, fill, frame, Legend, Table } from "../canvas.js";
import { count, html, useState } from "../lib.js";
import { useJson } from "../live.js";
import { FLOATS, codeOf, floatOf, formula, widthOf } from "./floats.js";

const TALL = 180;
const short = (number) => (Number.isFinite(number) ? String(Number(number.toPrecision(6))) : String(number));

/** What codes of a rounding stand for: the i-th of its group. */
const valueOf = (rounding, index, code) => {
  const group = rounding.group_size ? Math.floor(index / rounding.group_size) : 0;
  return (code - (rounding.zeros[group] ?? 0)) * (rounding.scales[group] ?? 1) + (rounding.minima[group] ?? 0);
};

/** The bits of one number as buttons. `parts` are [name, number of bits] from the left. */
function Bits({ code, parts, setCode, value, words, was }) {
  const width = parts.reduce((sum, [, num]) => sum + num, 0);
  let left = width;
  return html`<div class="bits">
    ${parts.map(([name, num]) => html`<div role="group" aria-label=${name} class=${name} key=${name}>
      <span class="name">${name}</span>
      <span class="row">${Array.from({ length: num }, () => {
        left -= 1;
        const weight = 2 ** left;
        const bit = Math.floor(code / weight) % 2;
        return html`<button type="button" key=${left} aria-pressed=${bit === 1} aria-label="${name} bit ${left}: ${bit}"
          onClick=${() => setCode(code + (bit ? -weight : weight))}>${bit}</button>`;
      })}</span></div>`)}
  </div>
  <p role="status">= <output class="value">${short(value)}</output> <span class="hint">${words}${
    Object.is(value, was) ? "" : `; it was ${short(was)}`}</span></p>`;
}

function Editor({ sample, rounding, index }) {
  const forms = [...Object.keys(FLOATS), ...sample.roundings.filter((each) => each.scales.length).map((each) => each.format)];
  const [form, setForm] = useState(rounding.scales.length ? rounding.format : "bfloat16");
  const [changed, setChanged] = useState(null);
  const start = (name) => {
    if (name in FLOATS) return codeOf(sample.values[index], FLOATS[name]);
    const each = sample.roundings.find((other) => other.format === name);
    return (each.codes[index] + 2 ** each.bits) % 2 ** each.bits;
  };
  const code = changed ?? start(form);
  const pick = (name) => {
    setForm(name);
    setChanged(null);
  };
  let bits;
  if (form in FLOATS) {
    const format = FLOATS[form];
    const parts = [["sign", 1], ["exponent", format.exponent], ["mantissa", format.mantissa]];
    bits = html`<${Bits} code=${code} parts=${parts} setCode=${setChanged} value=${floatOf(code, format)}
      was=${floatOf(start(form), format)} words=${`${formula(code, format)}, ${widthOf(format)} bits`} />`;
  } else {
    const each = sample.roundings.find((other) => other.format === form);
    const isSigned = each.codes.some((other) => other < 0);
    const number = (raw) => (isSigned && raw >= 2 ** (each.bits - 1) ? raw - 2 ** each.bits : raw);
    const group = each.group_size ? Math.floor(index / each.group_size) : 0;
    const words = `code ${number(code)}${each.zeros.length ? ` − ${each.zeros[group]}` : ""}, × scale ${short(each.scales[group])}${
      each.minima.length ? ` + ${short(each.minima[group])}` : ""}`;
    bits = html`<${Bits} code=${code} parts=${isSigned ? [["sign", 1], ["number", each.bits - 1]] : [["number", each.bits]]}
      setCode=${setChanged} value=${valueOf(each, index, number(code))} was=${valueOf(each, index, number(start(form)))} words=${words} />`;
  }
  return html`<section aria-label="Bits of a weight"><h2>Weight ${index}: ${short(sample.values[index])}</h2>
    <div class="controls"><${Choice} label="Format" value=${form} choose=${pick} options=${forms.map((name) => [name, name])} />
      <button type="button" disabled=${changed === null} onClick=${() => setChanged(null)}>As it was</button></div>${bits}</section>`;
}

function Values({ sample, rounding, index, setIndex }) {
  const num = sample.values.length;
  const draw = ({ context, width, height, colours }) => {
    const most = Math.max(1e-12, ...sample.values.map(Math.abs), ...rounding.values.map(Math.abs));
    const [wide, middle] = [width / num, height / 2];
    const y = (value) => middle - (value / most) * (middle - 4);
    context.clearRect(0, 0, width, height);
    fill(context, colours.line, 0, middle, width, 1);
    sample.values.forEach((value, each) => {
      const [top, inner] = [y(rounding.values[each]), Math.max(1, wide - 1)];
      fill(context, colours.owners[1], each * wide, Math.min(middle, top), inner, Math.max(1, Math.abs(top - middle)));
      fill(context, colours.text, each * wide, y(value) - 1, inner, 2);
      if (each === index) frame(context, colours.accent, each * wide, 1, wide, height - 2);
    });
  };
  const move = (key) => {
    const to = arrow(key, index, num);
    if (to !== undefined) setIndex(to);
    return to !== undefined;
  };
  const point = (x, y, isClick, { width }) => {
    if (isClick) setIndex(Math.max(0, Math.min(num - 1, Math.floor((x * num) / width))));
  };
  const summary = `${num} weights of row ${count(sample.row)} from column ${count(sample.column)} on, in ${rounding.bits} bits: an error of ${
    (100 * rounding.relative_error).toPrecision(3)} % of their size.`;
  return html`<${Figure} label="Weights" height=${TALL} draw=${draw} version=${`${sample.name} ${sample.group} ${rounding.bits} ${index}`}
    summary=${summary} onKey=${move} onPoint=${point}
    selection=${`Weight ${index}: ${short(sample.values[index])}, in ${rounding.bits} bits ${short(rounding.values[index])}`}
    columns=${[["weight"], ["as stored"], ...sample.roundings.map((each) => [`${each.bits} bits`])]}
    rows=${() => sample.values.map((value, each) => [each, short(value), ...sample.roundings.map((other) => short(other.values[each]))])} />
    <${Legend} of=${[["line", "the weight"], ["guess", `in ${rounding.bits} bits`]]} />`;
}

export function Numbers() {
  const { data: list, error: failure } = useJson("/inspect/numbers");
  const [chosen, setName] = useState("");
  const [group, setGroup] = useState(0);
  const [bits, setBits] = useState(4);
  const [index, setIndex] = useState(0);
  const names = list?.names ?? [];
  const name = chosen || (names.find((each) => each.includes("proj")) ?? names[0] ?? "");
  const { data: sample, error } = useJson(name && `/inspect/numbers?name=${encodeURIComponent(name)}&group=${group}`);
  const rounding = sample?.roundings.find((each) => each.bits === bits);
  const choose = (to) => setGroup(Math.max(0, Math.min((sample?.num_groups ?? 1) - 1, to)));
  const problem = failure ?? error;
  return html`<h1>Numbers</h1>
    <p>Weights of the served model. Fewer bits mean fewer bytes to read for each token, and a greater error; small groups with a
      scale of their own keep it small.</p>
    ${problem && html`<p role="alert">${problem.message}</p>`}
    <div class="controls">
      <${Choice} label="Matrix" value=${name} options=${names.map((each) => [each, each])}
        choose=${(to) => { setName(to); setGroup(0); }} />
      <label>Group <input type="number" min="0" max=${(sample?.num_groups ?? 1) - 1} value=${group}
        onChange=${(event) => choose(Math.trunc(Number(event.target.value)) || 0)} /></label>
      <fieldset class="choice"><legend>Bits</legend>${(sample?.roundings ?? []).map((each) => html`<label key=${each.bits}>
        <input type="radio" name="bits" checked=${each.bits === bits} onChange=${() => setBits(each.bits)} /> ${each.bits}</label>`)}</fieldset>
    </div>
    ${rounding && html`<div class="numbers">
      <p>Group ${count(sample.group)} of ${count(sample.num_groups)}; the file has ${sample.stored}${
        sample.is_plain ? "" : ", so these weights are what its codes stand for"}.</p>
      <${Values} sample=${sample} rounding=${rounding} index=${Math.min(index, sample.values.length - 1)} setIndex=${setIndex} />
      <${Table} caption="Errors" columns=${[["bits"], "format", ["error (root mean square)"], ["of the weights' size"]]}
        rows=${sample.roundings.map((each) => [each.bits, each.format, short(each.rms_error), `${(100 * each.relative_error).toPrecision(3)} %`])} />
      <${Editor} sample=${sample} rounding=${rounding} index=${Math.min(index, sample.values.length - 1)}
        key=${`${sample.name} ${sample.group} ${index} ${bits}`} />
    </div>`}`;
}
