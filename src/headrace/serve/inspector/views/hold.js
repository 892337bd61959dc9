// The engine step by step: it waits between two steps while this view is looked at, for all who use it.

import { html, json, useEffect, useRef, useState } from "../lib.js";
import { live } from "../live.js";

// A hold ends by itself after ten seconds (headrace/engine/holding.py).
const RENEW_MS = 3_000;

const order = (numSteps) => json("/inspect/hold", { method: "POST", body: { num_steps: numSteps } });

export function Hold() {
  const [isHeld, setHeld] = useState(false);
  const [problem, setProblem] = useState("");
  // One order after the other: a renewal that came late would hold an engine that was let go.
  const last = useRef(Promise.resolve());
  const isWanted = useRef(false);
  const give = (numSteps) => {
    isWanted.current = numSteps !== null;
    last.current = last.current.then(() => order(numSteps)).then(
      (held) => {
        setHeld(held.is_held);
        setProblem("");
      },
      (error) => {
        isWanted.current = false;
        setHeld(false);
        setProblem(error.message);
      },
    );
  };
  useEffect(() => {
    if (!isHeld) return undefined;
    const timer = setInterval(() => isWanted.current && give(0), RENEW_MS);
    return () => clearInterval(timer);
  }, [isHeld]);
  useEffect(() => {
    // Nobody is held up for a page that nobody sees.
    const hide = () => document.hidden && isWanted.current && give(null);
    document.addEventListener("visibilitychange", hide);
    return () => {
      document.removeEventListener("visibilitychange", hide);
      if (isWanted.current) give(null);
    };
  }, []);
  if (live.isRecorded) return null;
  return html`<div class="controls hold">
    <button type="button" aria-pressed=${isHeld} onClick=${() => give(isHeld ? null : 0)}>${isHeld ? "Let the engine go on" : "Hold the engine"}</button>
    <button type="button" disabled=${!isHeld} onClick=${() => give(1)}>One step</button>
    <button type="button" disabled=${!isHeld} onClick=${() => give(16)}>16 steps</button>
    <span role="status">${isHeld ? "The engine waits between two steps: no request gets a token until it goes on." : ""}</span>
    ${problem && html`<span role="alert">${problem}</span>`}
  </div>`;
}
