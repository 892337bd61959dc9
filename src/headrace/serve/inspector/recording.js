// A recording of the schedule in place of the live engine: opened or dropped on a view, shown up to any of its steps.

import { count, html, json, useEffect, useState } from "./lib.js";
import { live, useLive } from "./live.js";

const [TEXT_MS, PLAY_MS] = [100, 50];

export function Recording() {
  const { recording, shown } = useLive(TEXT_MS);
  const [problem, setProblem] = useState("");
  const [isReading, setReading] = useState(false);
  const [isPlaying, play] = useState(false);
  const open = async (file) => {
    if (!file) return;
    setProblem("");
    setReading(true);
    try {
      const body = new Blob([file], { type: "application/octet-stream" });
      live.replay(await json("/inspect/recording", { method: "POST", body }));
    } catch (error) {
      setProblem(error.message);
    }
    setReading(false);
  };
  useEffect(() => {
    const root = document.documentElement.classList;
    const over = (event) => {
      if (![...event.dataTransfer.types].includes("Files")) return;
      event.preventDefault();
      root.add("dropping");
    };
    const leave = (event) => event.relatedTarget || root.remove("dropping");
    const drop = (event) => {
      event.preventDefault();
      root.remove("dropping");
      open(event.dataTransfer.files[0]);
    };
    const listeners = { dragover: over, dragleave: leave, drop };
    for (const [name, listener] of Object.entries(listeners)) addEventListener(name, listener);
    return () => {
      for (const [name, listener] of Object.entries(listeners)) removeEventListener(name, listener);
    };
  }, []);
  useEffect(() => {
    if (!isPlaying || !recording) return undefined;
    const timer = setInterval(() => (live.shown < live.recording.steps.length ? live.seek(live.shown + 1) : play(false)), PLAY_MS);
    return () => clearInterval(timer);
  }, [isPlaying, recording]);
  const note = html`${isReading && html`<span role="status">Reading the recording …</span>`}
    ${problem && html`<span role="alert">${problem}</span>`}`;
  if (!recording) {
    return html`<div class="recording"><label>Show a recording (<code>--record-schedule</code>), or drop one here:${" "}
      <input type="file" onChange=${(event) => open(event.target.files[0])} /></label>${note}</div>`;
  }
  const num = recording.steps.length;
  const left = recording.num_steps - num;
  const toggle = () => {
    if (!isPlaying && live.shown === num) live.seek(0);
    play(!isPlaying);
  };
  return html`<div class="recording shown">
    <span role="status">A recording of ${recording.model}: ${count(recording.num_requests)} requests, ${count(recording.num_steps)} steps${
      left > 0 ? `, of which the last ${count(num)} are shown` : ""}.</span>
    <button type="button" aria-pressed=${isPlaying} onClick=${toggle}>${isPlaying ? "Pause" : "Play"}</button>
    <label>Step <input type="range" min="0" max=${num} value=${shown} onInput=${(event) => { play(false); live.seek(Number(event.target.value)); }}
      aria-valuetext="${shown} of ${num}" /></label>
    <span>${count(shown)} of ${count(num)}</span>
    <button type="button" onClick=${() => { play(false); live.connect(); }}>Back to live</button>${note}
  </div>`;
}
