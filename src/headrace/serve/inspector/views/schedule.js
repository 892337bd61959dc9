// The work of an engine's steps, and the steps that static batches of the same requests would take.

export const WAITS = ["nothing", "tokens of the step", "a place", "blocks", "room beside protected requests", "a sibling's prompt"];

/** The parts of a step in tokens: `prefill` is a list of [sequence, tokens]. `prompts` are the lengths of prompts. */
export function partsOf(step, prompts) {
  const prefill = [];
  let decode = 0;
  step.seq_ids.forEach((seqId, column) => {
    const [start, length] = [step.starts[column], step.lens[column]];
    if (length > 1 || start < (prompts.get(seqId) ?? 0)) prefill.push([seqId, length]);
    else decode += 1;
  });
  let [guessed, kept] = [0, 0];
  for (const [, num, numKept] of step.guesses) [guessed, kept] = [guessed + num, kept + numKept];
  const read = prefill.reduce((sum, [, length]) => sum + length, 0);
  return { prefill, read, decode, guessed, kept, tokens: read + decode + guessed };
}

/**
 * The rows of steps as runs {seqId, place, arrived, begin, end, reads}: a sequence keeps its place in the batch as long as
 * it has rows; its first `reads` steps read its prompt. `places` is the size of the batch.
 */
export function scheduled(steps, prompts) {
  const [runs, open, taken, arrivals] = [[], new Map(), [], new Map()];
  let rows = 0;
  steps.forEach((step, index) => {
    const present = new Set(step.seq_ids);
    rows += present.size;
    for (const [seqId] of step.arrivals) arrivals.set(seqId, index);
    for (const [seqId, run] of open) {
      if (present.has(seqId)) continue;
      open.delete(seqId);
      taken[run.place] = false;
    }
    for (const seqId of present) {
      let run = open.get(seqId);
      if (!run) {
        const place = taken.includes(false) ? taken.indexOf(false) : taken.length;
        run = { seqId, place, arrived: arrivals.get(seqId) ?? index, begin: index, reads: 0 };
        taken[place] = true;
        open.set(seqId, run);
        runs.push(run);
      }
      run.end = index + 1;
    }
    for (const [seqId] of partsOf(step, prompts).prefill) open.get(seqId).reads += 1;
  });
  return { runs, places: taken.length, num: steps.length, rows };
}

/**
 * The same requests in static batches of `places`: a batch begins when the one before it has ended, with those that have
 * come by then, and ends with its longest. Takes and returns what `scheduled` returns.
 */
export function batched({ runs: given, places }) {
  const requests = new Map();
  for (const { seqId, arrived, begin, end, reads } of given) {
    const request = requests.get(seqId) ?? { seqId, arrived, num: 0, reads: 0 };
    requests.set(seqId, { ...request, num: request.num + end - begin, reads: request.reads + reads });
  }
  const queue = [...requests.values()].sort((a, b) => a.arrived - b.arrived);
  const runs = [];
  let [now, rows] = [0, 0];
  while (queue.length) {
    now = Math.max(now, queue[0].arrived);
    const late = queue.findIndex((request) => request.arrived > now);
    const batch = queue.splice(0, Math.min(places, late < 0 ? queue.length : late));
    batch.forEach(({ num, ...request }, place) => runs.push({ ...request, place, begin: now, end: now + num }));
    rows += batch.reduce((sum, request) => sum + request.num, 0);
    now += Math.max(...batch.map((request) => request.num));
  }
  return { runs, places, num: now, rows };
}

export const utilisation = ({ rows, places, num }) => (places && num ? rows / (places * num) : 0);

/** The steps from a request's arrival to its first row, on average over the requests. */
export function meanWait({ runs }) {
  const waits = new Map();
  for (const { seqId, arrived, begin } of runs) if (!waits.has(seqId)) waits.set(seqId, begin - arrived);
  return waits.size ? [...waits.values()].reduce((sum, each) => sum + each, 0) / waits.size : 0;
}
