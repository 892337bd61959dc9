// The engine's state as the server streams it: one connection for all views, or a recording in its place.

import { events, useEffect, useReducer } from "./lib.js";

const MAX_STEPS = 2000;
const RETRY_MS = 1000;
// Kinds of block events, as in headrace/core/blocks.py and insight/journal.py.
const [TAKEN, DROPPED, PINNED, CACHED, EVICTED, FORGOTTEN, RESET] = [0, 1, 2, 3, 4, 5, 6];

/**
 * `state` is the last, `previous` the one before it (headrace/insight/state.py). `holders` maps each block in use to a
 * Map of its holders' references, 0 being the step in flight; `cached` are the blocks that the prefix cache has.
 * `steps` are the last `MAX_STEPS` as objects with the fields of insight/journal.py; `names` maps a sequence to the id
 * of its request.
 */
class Live {
  constructor() {
    this.reset();
    this.error = null;
    this.listeners = new Set();
    this.frame = 0;
    this.connection = null;
  }

  reset() {
    [this.state, this.previous, this.isRecorded] = [null, null, false];
    [this.holders, this.cached, this.steps, this.names] = [new Map(), new Set(), [], new Map()];
  }

  /** Call `listener` after changes, at most once for each frame of the screen. Returns what ends that. */
  subscribe(listener) {
    this.listeners.add(listener);
    if (!this.connection && !this.isRecorded) this.connect();
    return () => {
      this.listeners.delete(listener);
      if (!this.listeners.size) this.disconnect();
    };
  }

  /** Follow the server until `disconnect`, also after it was away. */
  async connect() {
    this.disconnect();
    const connection = (this.connection = new AbortController());
    while (!connection.signal.aborted) {
      try {
        for await (const message of events("/inspect/live?follow=true", { signal: connection.signal })) {
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
  replay({ snapshot, steps }) {
    this.disconnect();
    this.reset();
    this.isRecorded = true;
    if (snapshot) this.apply({ snapshot });
    for (const step of steps) this.apply({ step });
  }

  apply({ state, snapshot, step }) {
    if (state) [this.previous, this.state] = [this.state, state];
    if (snapshot) {
      const users = (each) => new Map(Object.entries(each).map(([user, num]) => [Number(user), num]));
      this.holders = new Map(Object.entries(snapshot.blocks).map(([block, each]) => [Number(block), users(each)]));
      this.cached = new Set(snapshot.cached);
    }
    if (step) {
      for (const [seqId, requestId] of step.arrivals) this.names.set(seqId, requestId);
      for (const event of step.blocks ?? []) this.applyBlocks(...event);
      this.steps.push(step);
      if (this.steps.length > MAX_STEPS) this.steps.splice(0, this.steps.length - MAX_STEPS);
    }
    this.changed();
  }

  applyBlocks(kind, users, blocks) {
    if (kind === CACHED) for (const block of blocks) this.cached.add(block);
    else if (kind === EVICTED) for (const block of blocks) this.cached.delete(block);
    else if (kind === FORGOTTEN) this.cached.clear();
    else if (kind === RESET) [this.holders, this.cached] = [new Map(), new Set()];
    else {
      blocks.forEach((block, index) => {
        const user = users[users.length > 1 ? index : 0];
        if (kind !== TAKEN) this.hold(block, user, -1);
        if (kind !== DROPPED) this.hold(block, kind === PINNED ? 0 : user, 1);
      });
    }
  }

  hold(block, user, num) {
    const holders = this.holders.get(block) ?? new Map();
    const references = (holders.get(user) ?? 0) + num;
    if (references) holders.set(user, references);
    else holders.delete(user);
    if (holders.size) this.holders.set(block, holders);
    else this.holders.delete(block);
  }

  changed() {
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      for (const listener of this.listeners) listener();
    });
  }
}

export const live = new Live();

/** Return the live state; the component is drawn again when it changes. */
export function useLive() {
  const [, redraw] = useReducer((number) => number + 1, 0);
  useEffect(() => live.subscribe(redraw), []);
  return live;
}
