// The views of /inspect in the order of the menu: [name, title, component]. The name is the address after the #.

import { html } from "./lib.js";
import { useLive } from "./live.js";

function Overview() {
  const { state } = useLive();
  return html`<h1>Engine</h1><p>${state ? `${state.num_running} running, ${state.num_waiting} waiting` : "connecting"}</p>`;
}

export const VIEWS = [["engine", "Engine", Overview]];
