// Speculation round by round: the guesses of a step, those kept, and the token that the model adds.

import { arrow, Choice, Facts, Figure, fill, frame, hatch, Legend, percent } from "../canvas.js";
import { count, html, useEffect, useState } from "../lib.js";
import { nameOf, useLive } from "../live.js";
import { Hold } from "./hold.js";

const [SQUARE, COLUMN] = [14, 18];
const [TEXT_MS, PLAY_MS] = [400, 700];

/** The rounds of some steps, of one sequence or of all (0). */
export function roundsOf(steps, seqId) {
  const rounds = [];
  for (const step of steps) {
    for (const [column, drafted, kept] of step.guesses) {
      const owner = step.seq_ids[column];
      const [, guesses, tokens] = step.words?.find(([each]) => each === column) ?? [column, [], []];
      if (!seqId || owner === seqId) rounds.push({ stepId: step.step_id, seqId: owner, drafted, kept, guesses, tokens });
    }
  }
  return rounds;
}

const same = (a, b) => a && b && a.stepId === b.stepId && a.seqId === b.seqId;

function sentenceOf({ stepId, seqId, drafted, kept }) {
  const last = kept === drafted ? "the model adds one more as a bonus" : `guess ${kept + 1} is corrected by the model`;
  return `Step ${count(stepId)}, ${nameOf(seqId)}: ${drafted} drafted, ${kept} kept; ${last}: ${kept ? `${kept + 1} tokens` : "1 token"} from one step.`;
}

const word = (text) => html`<code>${text.replaceAll("\n", "⏎").replace(/^ | $/g, "␣") || "∅"}</code>`;

function Round({ round }) {
  const { drafted, kept, guesses, tokens } = round;
  // Of a tree of guesses the ones on the way are not the first.
  const isChain = guesses.length === drafted && tokens.slice(0, kept).every((text, index) => text === guesses[index]);
  const own = tokens.length > kept ? html`, the model: ${word(tokens[kept])}` : "";
  const squares = Array.from({ length: drafted }, (_, index) => {
    const fate = index < kept ? "kept" : index === kept ? "corrected" : "dropped";
    const text = index < kept ? tokens[index] : isChain ? guesses[index] : undefined;
    return html`<li class=${fate}><b>${{ kept: "✓", corrected: "✗", dropped: "–" }[fate]}</b> ${text === undefined ? `guess ${index + 1}` : word(text)} <span>${fate}${fate === "corrected" && own}</span></li>`;
  });
  if (kept === drafted) squares.push(html`<li class="bonus"><b>+</b> ${tokens.length > kept ? word(tokens[kept]) : "bonus"} <span>the model's own</span></li>`);
  return html`<ol class="round">${squares}</ol><p role="status">${sentenceOf(round)}</p>`;
}

export function Speculation() {
  const { steps, state, isRecorded } = useLive(TEXT_MS);
  const [seqId, setSeqId] = useState(0);
  const [chosen, choose] = useState(null);
  const [isPlaying, play] = useState(false);
  const rounds = roundsOf(steps, seqId);
  const index = chosen ? rounds.findIndex((round) => same(round, chosen)) : rounds.length - 1;
  const round = chosen ?? rounds.at(-1);
  const go = (to) => rounds[to] && choose(rounds[to]);
  useEffect(() => {
    if (!isPlaying) return undefined;
    const timer = setTimeout(() => (rounds[index + 1] ? choose(rounds[index + 1]) : play(false)), PLAY_MS);
    return () => clearTimeout(timer);
  }, [isPlaying, chosen]);
  const sum = (name) => rounds.reduce((total, each) => total + each[name], 0);
  const [drafted, kept] = [sum("drafted"), sum("kept")];
  const most = Math.max(4, ...rounds.map((each) => each.drafted)) + 1;
  const shown = (width) => {
    const num = Math.max(1, Math.floor(width / COLUMN));
    const end = Math.min(rounds.length, Math.max(num, index + 1 + Math.floor(num / 4)));
    return rounds.slice(Math.max(0, end - num), end);
  };
  const draw = ({ context, width, height, colours, store }) => {
    store.corrected ??= hatch(context, colours.background, { gap: 4, up: false });
    context.clearRect(0, 0, width, height);
    shown(width).forEach((each, column) => {
      for (let row = 0; row <= each.drafted; row += 1) {
        const [x, y] = [column * COLUMN + 2, height - (row + 1) * (SQUARE + 2) - 2];
        const isBonus = row === each.drafted;
        if (isBonus && each.kept < each.drafted) break;
        const colour = isBonus ? colours.owners[2] : row < each.kept ? colours.owners[1] : row === each.kept ? colours.owners[6] : colours.line;
        fill(context, colour, x, y, SQUARE, SQUARE);
        if (row === each.kept && !isBonus) fill(context, store.corrected, x, y, SQUARE, SQUARE);
      }
      if (same(each, round)) frame(context, colours.text, column * COLUMN + 1, 1, COLUMN - 2, height - 2);
    });
  };
  const move = (key) => {
    const to = arrow(key, index, rounds.length);
    if (to !== undefined) go(to);
    return to !== undefined;
  };
  const seqIds = [...new Set(roundsOf(steps, 0).map((each) => each.seqId))].reverse();
  const summary = `${count(rounds.length)} rounds: ${count(drafted)} tokens drafted, ${count(kept)} kept.`;
  const nothing = isRecorded ? "There are no guesses in this recording so far."
    : !state ? "Connecting …"
    : !state.drafter ? html`No drafter is on. <code>headrace serve --speculative-config</code> turns one on.`
    : steps.length ? `The drafter (${state.drafter}) is on, and saw nothing worth guessing in the last ${count(steps.length)} steps.`
    : `The drafter (${state.drafter}) is on. There were no steps yet: they come with the next request.`;
  return html`<h1>Speculation</h1>
    <p>A drafter guesses tokens, and one step of the model checks them all. Guesses are kept up to the first wrong one; the model's
      own token takes its place, or follows the last as a bonus. The text is the same as without.</p>
    ${rounds.length || seqId ? null : html`<p class="no-guesses">${nothing}</p>`}
    <${Hold} />
    <${Facts} of=${{
      rounds: rounds.length, drafted, kept, "kept of drafted": drafted ? percent(kept / drafted) : "none yet",
      corrected: rounds.filter((each) => each.kept < each.drafted).length,
      bonus: rounds.filter((each) => each.kept === each.drafted).length,
      "tokens a round": rounds.length ? (1 + kept / rounds.length).toFixed(2) : "none yet",
    }} />
    <div class="controls">
      <button type="button" onClick=${() => go(index - 1)} disabled=${index <= 0}>Step back</button>
      <button type="button" aria-pressed=${isPlaying} disabled=${!rounds.length} onClick=${() => {
        if (!isPlaying) choose(index < rounds.length - 1 && chosen ? chosen : rounds[0]);
        play(!isPlaying);
      }}>${isPlaying ? "Pause" : "Play"}</button>
      <button type="button" onClick=${() => go(index + 1)} disabled=${index >= rounds.length - 1}>Step</button>
      <button type="button" disabled=${!chosen} onClick=${() => { choose(null); play(false); }}>Latest</button>
      <${Choice} label="Request" value=${seqId} choose=${(to) => { choose(null); setSeqId(to); }}
        options=${[[0, "all"], ...seqIds.map((each) => [each, nameOf(each)])]} />
    </div>
    ${round && html`<${Round} round=${round} />`}
    <${Figure} label="Rounds" height=${most * (SQUARE + 2) + 4} draw=${draw} version=${`${seqId} ${most}`} summary=${summary}
      columns=${[["step"], "request", ["drafted"], ["kept"], "then"]} onKey=${move}
      rows=${() => rounds.slice().reverse().map((each) => [each.stepId, nameOf(each.seqId), each.drafted, each.kept,
        each.kept === each.drafted ? "bonus" : "corrected"])} />
    <${Legend} of=${[["guess", "kept"], ["rejected", "corrected"], ["bonus", "bonus"], ["free", "dropped"]]} />`;
}
