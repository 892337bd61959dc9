// A form for the planner: the needs of a model, and whether a machine meets them, with the numbers of `headrace plan`.

import { Choice, Legend, percent, Table } from "../canvas.js";
import { count, html, json, seconds, useState } from "../lib.js";
import { useJson } from "../live.js";

const PASTED = "\u0000";
const HARDWARE = [["this", "this server"], ...["h100", "h200", "a100", "l4", "rtx4090"].map((name) => [name, name])];
const named = (names, first) => [["", first], ...names.map((name) => [name, name])];
const DTYPES = named(["float32", "bfloat16", "float16"], "the model's");
const FORMS = named(["int8", "int4", "int8-channel", "int8-g128", "int6", "int4-g32", "int4-g64", "int4-g128", "nf4", "mxfp4", "int3", "int2", "none"], "as stored");
const CACHES = named(["float32", "bfloat16", "float16", "int8", "int4", "fp8_e4m3", "fp8_e5m2"], "as the weights");
const SIZES = [["context", "at most 4096"], ["output_len", "256"], ["concurrency", "as many as fit"]];
const LABELS = { context: "Context", output_len: "Of it the answer", concurrency: "Sequences at once", price: "Dollars an hour" };

export function amount(bytes) {
  const [scale, unit] = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"]].find(([each]) => Math.abs(bytes) >= each) ?? [1, "bytes"];
  return `${scale === 1 ? count(bytes) : (bytes / scale).toFixed(2)} ${unit}`;
}

/** Return the body of the request: empty fields are left out. Throws `SyntaxError` for a config that is no JSON. */
function bodyOf({ model, config, ...fields }) {
  const set = Object.entries(fields).filter(([, value]) => value !== "");
  // 4096 and 4k: the server reads the units.
  const body = Object.fromEntries(set.map(([name, value]) => [name, name in LABELS && !Number.isNaN(Number(value)) ? Number(value) : value]));
  if (model === PASTED) return { ...body, config: JSON.parse(config) };
  return model ? { ...body, model } : body;
}

/** The same plan on the command line. */
const commandOf = ({ model, config, ...fields }) => `headrace plan ${model === PASTED ? "config.json" : model || "MODEL"}${
  Object.entries(fields).filter(([, value]) => value !== "").map(([name, value]) => ` --${name.replaceAll("_", "-")} ${value}`).join("")}`;

function rowsOf(plan, slo) {
  const { machine, speed } = plan;
  const parts = Object.entries(plan.forms).map(([form, bytes]) => `${amount(bytes)} ${form}`).join(", ");
  const rows = [
    ["model", plan.model_type, plan.model],
    ["parameters", count(plan.parameters), `counted by ${plan.source}`],
    ...(plan.active_parameters === plan.parameters ? [] : [["active", count(plan.active_parameters), "parameters that a token meets"]]),
    ["weights", amount(plan.weight_bytes), parts],
    ["served", plan.served, plan.served_how],
    ["a token", `${(plan.flops_per_token / 1e9).toFixed(2)} Gflop`, "beside attention"],
    ["KV cache", `${count(plan.kv_token_bytes)} bytes a token`, plan.kv_cache_dtype],
    ["a sequence", amount(plan.kv_sequence_bytes), `KV cache of ${count(plan.context)} tokens, ${count(plan.output_len)} of them the answer`],
    ...(plan.kv_windowed_bytes < plan.kv_sequence_bytes ? [["as kept", amount(plan.kv_windowed_bytes), "layers free what lies behind their windows"]] : []),
    ["a batch", amount(plan.kv_batch_bytes), `${count(plan.concurrency)} × ${amount(plan.kv_windowed_bytes)}: the KV cache of all sequences at once`],
    ["machine", machine.name, `${amount(machine.memory)}, ${count(machine.bandwidth / 1e9)} GB/s, ${(machine.flops / 1e12).toFixed(2)} Tflop/s`],
    ["for the cache", amount(Math.max(0, plan.free_bytes)), `${percent(machine.utilization, 0)} of the memory, less weights and ${amount(plan.working_bytes)} to work in`],
    ["largest batch", count(plan.largest_batch), `sequences of ${count(plan.context)} tokens`],
    ["largest context", count(plan.largest_context), `tokens of one sequence; the model has ${count(plan.max_context)}`],
  ];
  if (speed) {
    rows.push(
      ["estimated for", `${count(speed.batch)} sequences at once`, plan.step_source],
      ["TTFT", seconds(speed.ttft), `a prompt of ${count(plan.context - plan.output_len)} tokens, alone`],
      ["TPOT", seconds(speed.tpot), `${seconds(speed.tpot_mixed)} beside the prompts of others`],
      ["latency", seconds(speed.latency), `TTFT + TPOT × ${count(plan.output_len - 1)}`],
      ["throughput", `${count(speed.tokens_per_second)} tokens/s`, `${speed.requests_per_second.toFixed(2)} requests/s`],
    );
    if (speed.goodput !== null) rows.push(["goodput", `${speed.goodput.toFixed(2)} requests/s`, `at ${count(speed.goodput_batch)} sequences at once, within ${slo}`]);
    if (speed.dollars_per_million !== null) rows.push(["price", `$${speed.dollars_per_million.toFixed(3)}`, "for a million tokens of answers"]);
  }
  return rows;
}

/** The machine's memory as a bar. */
function Memory({ plan }) {
  const { memory } = plan.machine;
  const whole = Math.max(memory, plan.needed_bytes);
  const rest = memory - plan.needed_bytes;
  const parts = [["prompt", "weights", plan.weight_bytes], ["guess", "to work in", plan.working_bytes],
    ["answer", `KV cache of ${count(plan.concurrency)} sequences`, plan.kv_batch_bytes],
    ["unfilled", `left to others (${percent(1 - plan.machine.utilization, 0)})`, plan.needed_bytes * (1 - plan.machine.utilization)],
    ["empty", rest < 0 ? "missing" : "free", Math.abs(rest)]];
  const summary = parts.map(([, words, bytes]) => `${words} ${amount(bytes)}`).join(", ");
  return html`<figure><div class="memory" role="img" aria-label="Memory of ${plan.machine.name}: ${summary}">
      ${parts.slice(0, rest < 0 ? 4 : 5).map(([name, , bytes]) => html`<span class="swatch ${name}" style=${{ width: `${(100 * bytes) / whole}%` }}></span>`)}
      ${rest < 0 && html`<span class="end" style=${{ left: `${(100 * memory) / whole}%` }}></span>`}</div>
    <${Legend} of=${parts.map(([name, words, bytes]) => [name, `${words}: ${amount(bytes)}`])} />
    ${rest < 0 && html`<figcaption>The line is where the machine's memory ends.</figcaption>`}</figure>`;
}

function Result({ plan, slo, apply }) {
  const what = plan.free_bytes > 0 ? `${count(plan.concurrency)} sequences of ${count(plan.context)} tokens` : "the weights";
  const change = (flags) => Object.fromEntries([...flags.matchAll(/--(\S+) (\S+)/g)].map(([, name, value]) => [name.replaceAll("-", "_"), value]));
  return html`<section aria-label="The plan">
    <h2 role="status">${plan.fits ? `It fits: ${count(plan.concurrency)} sequences of ${count(plan.context)} tokens on ${plan.machine.name}`
      : `It does not fit: ${plan.machine.name} has no room for ${what}`}</h2>
    ${plan.changes.length > 0 && html`<p>What would fit:</p><ul class="changes">${plan.changes.map(({ flags, outcome }) => html`<li key=${flags}>
      <button type="button" onClick=${() => apply(change(flags))}>${flags}</button> ${outcome}</li>`)}</ul>`}
    <${Memory} plan=${plan} />
    <${Table} caption="Plan" columns=${["", "", ""]} rows=${rowsOf(plan, slo)} /></section>`;
}

const EMPTY = { model: "", config: "", hardware: "this", context: "", output_len: "", concurrency: "", price: "", dtype: "", quantization: "", kv_cache_dtype: "", slo: "" };

export function Plan() {
  const { data } = useJson("/v1/models");
  const [form, setForm] = useState(EMPTY);
  const [result, setResult] = useState({});
  const set = (name) => (value) => setForm({ ...form, [name]: value });
  const plan = async (fields) => {
    setResult({ ...result, isOpen: true });
    try {
      setResult({ plan: await json("/inspect/plan", { method: "POST", body: bodyOf(fields) }), form: fields });
    } catch (error) {
      setResult({ error: error instanceof SyntaxError ? `config: ${error.message}` : error.message });
    }
  };
  const apply = (changes) => {
    const fields = { ...form, ...changes };
    setForm(fields);
    plan(fields);
  };
  const models = [...(data?.data ?? []).map(({ id }) => [id, id]), [PASTED, "a config.json"]];
  return html`<h1>Plan</h1>
    <p>What a model needs and whether a machine has it, from its config.json alone. What is left empty has the value shown.</p>
    <form class="plan" onSubmit=${(event) => { event.preventDefault(); plan(form); }}>
      <${Choice} label="Model" value=${form.model || models[0][0]} options=${models} choose=${set("model")} />
      <${Choice} label="Machine" value=${form.hardware} options=${HARDWARE} choose=${set("hardware")} />
      <${Choice} label="Quantisation" value=${form.quantization} options=${FORMS} choose=${set("quantization")} />
      <${Choice} label="KV cache" value=${form.kv_cache_dtype} options=${CACHES} choose=${set("kv_cache_dtype")} />
      <${Choice} label="Floats" value=${form.dtype} options=${DTYPES} choose=${set("dtype")} />
      ${SIZES.map(([name, words]) => html`<label key=${name}>${LABELS[name]} <input inputmode="numeric" pattern="[0-9.]+[kKmMgGtT]?"
        title="a number such as 4096, 4k (4,000) or 4K (4,096)" value=${form[name]} placeholder=${words} onInput=${(event) => set(name)(event.target.value)} /></label>`)}
      <label>${LABELS.price} <input type="number" min="0" step="any" value=${form.price} placeholder="none" onInput=${(event) => set("price")(event.target.value)} /></label>
      <label>Goals in ms <input value=${form.slo} placeholder="ttft:500,tpot:50" onInput=${(event) => set("slo")(event.target.value)} /></label>
      ${form.model === PASTED && html`<label class="wide">config.json <textarea rows="6" required value=${form.config}
        onInput=${(event) => set("config")(event.target.value)} /></label>`}
      <button>Plan</button>
    </form>
    ${result.error && html`<p role="alert">${result.error}</p>`}
    <div aria-busy=${Boolean(result.isOpen)}>
      ${result.plan && html`<${Result} plan=${result.plan} slo=${result.form.slo} apply=${apply} />
        <p class="hint">The same on the command line: <code>${commandOf(result.form)}</code></p>`}</div>`;
}
