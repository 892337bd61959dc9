// The chat at /.

import { html } from "./lib.js";

export function Chat() {
  return html`<h1>Chat</h1>`;
}
