// The engine's state as the server streams it: one connection for all views, or a recording in its place.

import { events, json, useEffect, useReducer, useState } from "./lib.js";

export const MAX_STEPS = 2000;
const MAX_NAMES = 4096;
const RETRY_MS = 1000;
const REDUCED_MOTION_MS = 500;
// Kinds of block events, as in headrace/core/blocks.py and core/journal.py.
const [TAKEN, DROPPED, PINNED, CACHED, EVICTED, FORGOTTEN, RESET] = [0, 1, 2, 3, 4, 5, 6];

/** Which blocks are whose. The same as `BlockMap` of headrace/insight/live.py, and each block's holders besides. */
export class BlockMap {
  constructor() {
    this.reset();
  }

  reset() {
    // `tables`: holder -> (block -> references) in the order of its table; `holders`: block -> set of holders. Holder 0
    // is the step in flight. `cached` are the blocks that the prefix cache has, in use or not.
    [this.tables, this.holders, this.cached] = [new Map(), new Map(), new Set()];
  }

  apply(blockEvents) {
    let before = [RESET, [], []];
    for (const event of blockEvents) {
      const [kind, users, blocks] = event;
      if (kind === CACHED) for (const block of blocks) this.cached.add(block);
      else if (kind === EVICTED) for (const block of blocks) this.cached.delete(block);
      else if (kind === FORGOTTEN) this.cached.clear();
      else if (kind === RESET) this.reset();
      else {
        if (kind !== TAKEN && before[0] === TAKEN && [users, blocks, before[1], before[2]].every((each) => each.length === 1)
          && users[0] === before[1][0]) this.replace(users[0], blocks[0], before[2][0]);
        blocks.forEach((block, index) => {
          const user = users[users.length > 1 ? index : 0];
          if (kind !== TAKEN) this.add(block, user, -1);
          if (kind !== DROPPED) this.add(block, kind === PINNED ? 0 : user, 1);
        });
      }
      before = event;
    }
  }

  /** Move `other`, which was just taken in place of `block`, to its place in the table. */
  replace(user, block, other) {
    const table = this.tables.get(user);
    if (!table?.has(block) || block === other) return;
    const pairs = [...table].filter(([each]) => each !== other);
    pairs.splice(pairs.findIndex(([each]) => each === block), 0, [other, table.get(other)]);
    this.tables.set(user, new Map(pairs));
  }

  add(block, user, num) {
    let table = this.tables.get(user);
    if (!table) this.tables.set(user, (table = new Map()));
    const references = (table.get(block) ?? 0) + num;
    if (references) {
      table.set(block, references);
      const holders = this.holders.get(block);
      if (holders) holders.add(user);
      else this.holders.set(block, new Set([user]));
      return;
    }
    table.delete(block);
    if (!table.size) this.tables.delete(user);
    const holders = this.holders.get(block);
    holders?.delete(user);
    if (holders && !holders.size) this.holders.delete(block);
  }
}

/**
 * `state` is the last, `previous` the one before it (headrace/insight/state.py), `overload` the server's with it. `blocks` is a `BlockMap`; `tables`,
 * `holders` and `cached` are its. `steps` are the last `MAX_STEPS` as objects with the fields of core/journal.py.
 * `names` maps a sequence to the id of its request, `prompts` to the length of its prompt, `positions` to how many of
 * its tokens are computed. `recording` is the reply of `POST /inspect/recording` that is shown, `shown` how many of its
 * steps; null without one.
 */
class Live {
  constructor() {
    this.blocks = new BlockMap();
    this.reset();
    this.error = null;
    this.listeners = new Set();
    this.frame = 0;
    this.connection = null;
  }

  reset() {
    [this.state, this.previous, this.overload, this.recording, this.shown] = [null, null, null, null, 0];
    this.forget();
  }

  forget() {
    this.blocks.reset();
    this.steps = [];
    [this.names, this.prompts, this.positions] = [new Map(), new Map(), new Map()];
  }

  get tables() { return this.blocks.tables; }
  get holders() { return this.blocks.holders; }
  get cached() { return this.blocks.cached; }
  get isRecorded() { return this.recording !== null; }

  /** Call `listener` after changes, at most once for each frame of the screen. Returns a function that stops it. */
  subscribe(listener) {
    this.listeners.add(listener);
    if (!this.connection && !this.isRecorded) this.connect();
    return () => {
      this.listeners.delete(listener);
      // A view is left before the next one is there.
      setTimeout(() => this.listeners.size || this.disconnect());
    };
  }

  /** Follow the server until `disconnect`, also after it was away. Ends a recording. */
  async connect() {
    this.disconnect();
    if (this.isRecorded) this.reset();
    const connection = (this.connection = new AbortController());
    while (!connection.signal.aborted) {
      try {
        for await (const message of events("/inspect/live?follow=true", { signal: connection.signal })) {
          if (connection.signal.aborted) return;
          this.error = null;
          this.apply(message);
        }
        this.error = new Error("the server has ended the stream");
      } catch (error) {
        if (connection.signal.aborted) return;
        this.error = error;
      }
      this.changed();
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }

  disconnect() {
    this.connection?.abort();
    this.connection = null;
  }

  /** Show a recording, as `POST /inspect/recording` returns it, in place of the server. */
  replay(recording) {
    this.disconnect();
    this.reset();
    this.error = null;
    this.recording = recording;
    this.seek(recording.steps.length);
  }

  /** Show the first `num` steps of the recording. */
  seek(num) {
    const { snapshot, steps, requests } = this.recording;
    if (num < this.shown || !this.shown) {
      this.forget();
      for (const { seq_id: seqId, id, num_prompt_tokens: numPrompt } of requests) {
        this.names.set(seqId, id);
        this.prompts.set(seqId, numPrompt);
      }
      this.apply({ snapshot });
      this.shown = 0;
    }
    for (; this.shown < num; this.shown += 1) this.apply({ step: steps[this.shown] });
    this.state = recordedState(this);
    this.changed();
  }

  apply({ state, overload, snapshot, step }) {
    if (state) {
      this.overload = overload;
      // The steps come from one replica.
      if (this.state && this.state.replica !== state.replica) this.forget();
      [this.previous, this.state] = [this.state, state];
      for (const each of state.requests) {
        if (each.replica !== state.replica) continue;
        this.names.set(each.seq_id, each.id);
        this.prompts.set(each.seq_id, each.num_prompt_tokens);
      }
    }
    if (snapshot) {
      this.blocks.reset();
      this.blocks.apply(snapshot.blocks);
    }
    if (step) this.applyStep(step);
    this.changed();
  }

  applyStep(step) {
    // An engine that was replaced counts from the beginning.
    if (step.step_id <= (this.steps.at(-1)?.step_id ?? 0)) this.forget();
    for (const [seqId, requestId, numPrompt] of step.arrivals) {
      this.names.set(seqId, requestId);
      this.prompts.set(seqId, numPrompt);
    }
    for (const map of [this.names, this.prompts]) {
      for (const seqId of map.keys()) if (map.size > MAX_NAMES) map.delete(seqId); else break;
    }
    step.seq_ids.forEach((seqId, column) => this.positions.set(seqId, step.starts[column] + step.lens[column]));
    for (const [column, , kept] of step.guesses) {
      this.positions.set(step.seq_ids[column], step.starts[column] + step.lens[column] + kept);
    }
    for (const [seqId] of step.preemptions) this.positions.delete(seqId);
    for (const [seqId] of step.ends) this.positions.delete(seqId);
    this.blocks.apply(step.blocks ?? []);
    this.steps.push(step);
    if (this.steps.length > MAX_STEPS) this.steps.splice(0, this.steps.length - MAX_STEPS);
  }

  changed() {
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      for (const listener of this.listeners) listener();
    });
  }
}

/** What `state` is of a server, as far as the shown steps of a recording tell. */
function recordedState({ recording, steps, holders, cached, tables }) {
  const last = steps.at(-1);
  return {
    ...recording,
    time: last?.times[3] ?? 0,
    is_ready: true,
    num_running: [...tables.keys()].filter((seqId) => seqId).length,
    num_waiting: last?.head[0] ? 1 : 0,
    num_blocks_held: holders.size,
    num_blocks_cached: [...cached].filter((block) => !holders.has(block)).length,
    num_steps: recording.num_steps - recording.steps.length + steps.length,
    requests: [],
  };
}

export const live = new Live();

/** What a sequence is called: the id of its request. Sequence 0 is no request's. */
export const nameOf = (seqId) => live.names.get(seqId) ?? (seqId ? `sequence ${seqId}` : "the step in flight");

/** Call `draw` when the live state has changed, at most every `ms` milliseconds. For use in an effect. */
export function follow(draw, ms = 0) {
  const pause = Math.max(ms, matchMedia("(prefers-reduced-motion: reduce)").matches ? REDUCED_MOTION_MS : 0);
  let [last, timer] = [0, 0];
  const due = () => {
    clearTimeout(timer);
    const wait = last + pause - performance.now();
    if (wait > 0) timer = setTimeout(due, wait);
    else {
      last = performance.now();
      draw();
    }
  };
  const end = live.subscribe(due);
  return () => {
    clearTimeout(timer);
    end();
  };
}

/** Return the live state; the component is drawn again when it changes, at most every `ms` milliseconds. */
export function useLive(ms = 0) {
  const [, redraw] = useReducer((number) => number + 1, 0);
  useEffect(() => follow(redraw, ms), []);
  return live;
}

/** Read `path` (none if empty) as JSON now, and every `ms` milliseconds if that is not 0. Returns {data, error}. */
export function useJson(path, ms = 0) {
  const [reply, setReply] = useState({ data: null, error: null });
  useEffect(() => {
    let [timer, isOver] = [0, false];
    const read = async () => {
      const change = document.hidden && ms ? {} : await json(path).then((data) => ({ data, error: null }), (error) => ({ error }));
      if (isOver) return;
      setReply((old) => ({ ...old, ...change }));
      if (ms) timer = setTimeout(read, ms);
    };
    if (path) read();
    return () => {
      isOver = true;
      clearTimeout(timer);
    };
  }, [path, ms]);
  return reply;
}
