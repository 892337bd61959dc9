// Tokens a second over time, with the limits of the memory's bandwidth and of the processor's arithmetic.

import uPlot from "../vendor/uplot.js";
import { coloursOf, Facts, Folded, onLook, percent } from "../canvas.js";
import { bytes, count, html, useEffect, useRef } from "../lib.js";
import { live, useJson, useLive } from "../live.js";
import { partsOf } from "./schedule.js";

const [POLL_MS, TEXT_MS, MAX_POINTS, TALL] = [1000, 1000, 600, 280];
// [time, tokens a second, limit of the bandwidth, limit of the arithmetic]; kept while the page is open.
const points = [[], [], [], []];
const SERIES = ["decoding", "the memory's limit", "the arithmetic's limit"];

function add(limits, time) {
  if (time <= (points[0].at(-1) ?? 0)) return;
  const values = [time, limits.tokens_per_second || null, limits.bandwidth_tokens_per_second, limits.peak_tokens_per_second];
  points.forEach((series, index) => {
    series.push(values[index]);
    if (series.length > MAX_POINTS) series.shift();
  });
}

/** The tokens of a recording's steps, by second. */
function recordedPoints(steps) {
  const seconds = new Map();
  for (const step of steps) {
    const { decode, kept } = partsOf(step, live.prompts);
    const time = Math.floor(step.times[3]);
    seconds.set(time, (seconds.get(time) ?? 0) + decode + kept);
  }
  const nothing = [...seconds].map(() => null);
  return [[...seconds.keys()], [...seconds.values()], nothing, nothing];
}

function Chart({ data, num }) {
  const place = useRef(null);
  const chart = useRef(null);
  useEffect(() => {
    const make = () => {
      chart.current?.destroy();
      const colours = coloursOf(place.current);
      const axis = { stroke: colours.muted, grid: { stroke: colours.line, width: 1 }, ticks: { stroke: colours.line } };
      const line = (label, stroke, dash) => ({ label, stroke, dash, width: 2, spanGaps: false, points: { show: !dash, size: 4 } });
      chart.current = new uPlot({
        width: place.current.clientWidth, height: TALL, legend: { show: false }, cursor: { show: false },
        scales: { x: { time: false }, y: { distr: 3 } },
        axes: [{ ...axis, incrs: [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600], values: (_, ticks) => ticks.map((tick) => `${count(tick)} s`) }, { ...axis, size: 70, values: (_, ticks) =>
          ticks.map((tick) => (tick !== null && Number.isInteger(Math.log10(tick)) ? count(tick) : "")) }],
        series: [{}, line(SERIES[0], colours.accent), line(SERIES[1], colours.owners[5], [8, 4]), line(SERIES[2], colours.muted, [2, 4])],
      }, latest.current, place.current);
    };
    const end = onLook(place.current, make);
    return () => {
      end();
      chart.current?.destroy();
    };
  }, []);
  const latest = useRef(data);
  latest.current = data;
  useEffect(() => chart.current?.setData(data), [num, data]);
  return html`<div class="chart" ref=${place} aria-hidden="true"></div>`;
}

export function Limits() {
  const { state, steps, isRecorded } = useLive(TEXT_MS);
  const { data: limits, error } = useJson(isRecorded ? "" : "/inspect/limits", POLL_MS);
  if (limits && state && !isRecorded) add(limits, Math.round(state.time));
  const data = isRecorded ? recordedPoints(steps) : points.map((series) => series.slice());
  const shift = data[0][0] ?? 0;
  data[0] = data[0].map((time) => time - shift);
  const speed = (number) => (number ? `${count(number)} tok/s` : "unknown");
  const now = isRecorded ? data[1].at(-1) ?? 0 : limits?.tokens_per_second ?? 0;
  const share = limits?.memory && !isRecorded ? `, ${percent(limits.memory.share, 0)} of what the memory allows` : "";
  const facts = !limits || isRecorded ? { decoding: `${count(now)} tok/s` } : {
    decoding: `${count(now)} tok/s`, "share of the memory's limit": limits.memory ? percent(limits.memory.share, 0) : "no decoding now",
    "the memory allows": speed(limits.bandwidth_tokens_per_second),
    "the arithmetic allows": speed(limits.peak_tokens_per_second),
    "tokens a step": limits.tokens_per_step.toFixed(1), "bytes a step": bytes(limits.bytes_per_step),
    "memory bandwidth": limits.bandwidth ? `${bytes(limits.bandwidth)}/s` : "unknown",
    weights: bytes(limits.weight_bytes), "a token's keys and values": bytes(limits.kv_token_bytes),
    parameters: limits.num_parameters,
  };
  return html`<h1>Limits</h1>
    <p>A step that decodes reads every weight once, and the keys and values of all tokens before its rows: so the memory's bandwidth
      bounds it. The more requests share a step, the more tokens come of the same reading, until the arithmetic is the bound.</p>
    ${error && html`<p role="alert">${error.message}</p>`}
    <${Facts} of=${facts} />
    ${limits && !isRecorded && !limits.is_measured && html`<p>In place of a measured bandwidth stands that of the fastest step so far.</p>`}
    <figure><${Chart} data=${data} num=${data[0].length} />
      <figcaption>Decoding at ${count(now)} tokens a second${share}, over ${count(data[0].at(-1) ?? 0)} seconds. The scale is logarithmic.</figcaption>
      <ul class="legend"><li><span class="stroke decoding"></span>${SERIES[0]}</li><li><span class="stroke memory"></span>${SERIES[1]} (dashed)</li>
        <li><span class="stroke peak"></span>${SERIES[2]} (dotted)</li></ul>
      <${Folded} title="Tokens a second as a table" columns=${[["second"], ...SERIES.map((name) => [name])]}
        rows=${() => data[0].map((time, index) => [time, ...data.slice(1).map((series) => series[index] ?? "")]).reverse()} />
    </figure>`;
}
