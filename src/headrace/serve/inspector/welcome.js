// The first screen of a conversation: the model, what it is good for, and examples to begin with.

import { count, html, json, useEffect, useState } from "./lib.js";

// What a model says of itself is its name; the first that fits is taken.
const KINDS = [
  [/^builtin$/, "It writes short stories for children, to show what the engine does. It cannot answer questions.", [
    "Tell me a story about a dog who finds a red ball.", "Write a story about a rainy day in the park.", "Once upon a time there was a small boat named Tim.",
  ]],
  [/cod(e|er|ing)|starcoder|devstral/i, "By its name it is good at code: writing, explaining and mending it.", [
    "Write a Python function that merges two sorted lists, and explain each line.", "Write a SQL query that finds the three largest orders of each customer.",
    "What does `git rebase -i HEAD~3` do?",
  ]],
  [/r1|qwq|think|reason|math/i, "By its name it reasons before it answers: good for mathematics, puzzles and plans.", [
    "Show that the square root of 2 is irrational.", "A bat and a ball cost 1.10 together; the bat costs 1 more than the ball. What does the ball cost?",
    "Plan three days in a city that I have never seen.",
  ]],
  [/./, "Good for questions, drafts, summaries and tables, as far as a model of its size is.", [
    "Explain to a beginner how a language model writes text, token by token.", "Make a table of three ways to save energy at home, with the cost of each.",
    "Solve $x^2 - 5x + 6 = 0$ step by step.",
  ]],
];

export function Welcome({ model, limit, isBusy, onSend }) {
  const [details, setDetails] = useState(null);
  useEffect(() => {
    let isCurrent = true;
    setDetails(null);
    // The facts are extra: a server that does not tell them has a first screen without.
    if (model) json("/api/show", { method: "POST", body: { model } }).then((reply) => isCurrent && setDetails(reply.details), (error) => console.info(error.message));
    return () => (isCurrent = false);
  }, [model]);
  if (!model) return html`<section class="welcome"><h2>headrace</h2></section>`;
  const [, words, examples] = KINDS.find(([name]) => name.test(model));
  const facts = [details?.family, details?.parameter_size && `${details.parameter_size} parameters`, details?.quantization_level, limit && `a context of ${count(limit)} tokens`];
  return html`<section class="welcome" aria-label="A new conversation">
    <h2>${model}</h2>
    <p class="muted">${facts.filter(Boolean).join(" · ")}</p>
    <p>${words}</p>
    <div class="examples">${examples.map((example) => html`<button type="button" disabled=${isBusy} onClick=${() => onSend(example)}>${example}</button>`)}</div>
  </section>`;
}
