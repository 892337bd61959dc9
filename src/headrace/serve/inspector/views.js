// The views of /inspect in the order of the menu: [name, title, component]. The name is the address after the #.

import { html } from "./lib.js";
import { Recording } from "./recording.js";
import { Blocks } from "./views/blocks.js";
import { Cache } from "./views/cache.js";
import { Fleet } from "./views/fleet.js";
import { Limits } from "./views/limits.js";
import { Numbers } from "./views/numbers.js";
import { Plan } from "./views/plan.js";
import { Requests } from "./views/requests.js";
import { Speculation } from "./views/speculation.js";
import { Steps } from "./views/steps.js";

/** A view under the bar that opens recordings. */
const within = (View) => () => html`<${Recording} /><${View} />`;

export const VIEWS = [
  ["blocks", "Blocks", within(Blocks)],
  ["steps", "Steps", within(Steps)],
  ["requests", "Requests", within(Requests)],
  ["cache", "Cache", within(Cache)],
  ["speculation", "Speculation", within(Speculation)],
  ["numbers", "Numbers", within(Numbers)],
  ["limits", "Limits", within(Limits)],
  ["fleet", "Fleet", Fleet],
  ["plan", "Plan", Plan],
];
