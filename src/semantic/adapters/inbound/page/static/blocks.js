// All blocks of the server, kept up to date, and the slot of each block in the map.
//
// A block keeps its slot while it exists. A new block takes the slot of a deleted one, or a new slot
// at the end, so blocks do not move on the screen.
import { get, known, refreshAgent } from "./server.js";

export const map = {
  byName: new Map(),
  slots: [],
  flashes: new Map(), // slot -> the latest change of its block, and when it happened
  version: 0,
  isLoading: false,
};

const free = [];
let mark = null;

function blockOf([name, parent, start, tokens, memory, disk, used, pinned]) {
  return { name, parent, start, tokens, memory, disk, used, pinned, slot: -1, share: 0 };
}

/** How a block changed since the last refresh; null if the map does not show the change. */
function happened(before, now) {
  if (!before) return "created";
  if (!before.memory && now.memory) return "read";
  if (before.memory && !now.memory) return "evicted";
  return !before.disk && now.disk ? "written" : null;
}

function put(row, at) {
  const block = blockOf(row);
  const before = map.byName.get(block.name);
  block.slot = before ? before.slot : (free.pop() ?? map.slots.length);
  block.share = before?.share ?? 0;
  map.slots[block.slot] = block;
  map.byName.set(block.name, block);
  const what = happened(before, block);
  if (what) map.flashes.set(block.slot, { what, at });
}

function drop(name, at) {
  const block = map.byName.get(name);
  if (!block) return;
  map.byName.delete(name);
  map.slots[block.slot] = null;
  free.push(block.slot);
  map.flashes.set(block.slot, { what: "gone", at });
}

/** Load all blocks, page by page. */
async function loadAll() {
  map.isLoading = true;
  const rows = [];
  let after = "";
  let first = null;
  do {
    const page = await get(`v1/cache/blocks?limit=10000&after=${after ?? ""}`);
    first ??= page.mark; // the next refresh fetches what changes during loading
    for (const row of page.blocks) rows.push(row);
    after = page.next;
  } while (after);
  arrange(rows.map(blockOf));
  mark = first;
  map.isLoading = false;
}

/** Assign slots to all blocks; blocks of one chain are adjacent. */
function arrange(blocks) {
  map.byName = new Map(blocks.map((block) => [block.name, block]));
  const followers = new Map();
  const firsts = [];
  for (const block of blocks) {
    if (!map.byName.has(block.parent)) firsts.push(block);
    else if (followers.has(block.parent)) followers.get(block.parent).push(block);
    else followers.set(block.parent, [block]);
  }
  firsts.sort((a, b) => b.used - a.used);
  map.slots = [];
  free.length = 0;
  map.flashes.clear();
  const stack = firsts.reverse();
  while (stack.length) {
    const block = stack.pop();
    block.slot = map.slots.length;
    map.slots.push(block);
    const next = followers.get(block.name);
    if (next) stack.push(...next.sort((a, b) => a.used - b.used));
  }
  map.version++;
  countShares();
}

export function rearrange() {
  arrange([...map.byName.values()]);
}

/** Fetch changed blocks; returns true if there are any. */
export async function refreshBlocks() {
  if (map.isLoading) return false;
  if (mark === null) {
    await loadAll();
    return true;
  }
  const page = await get(`v1/cache/blocks?since=${mark}`);
  if (page.stale) {
    mark = null;
    return refreshBlocks();
  }
  const now = performance.now();
  mark = page.mark;
  page.gone.forEach((name) => drop(name, now));
  page.blocks.forEach((row) => put(row, now));
  if (page.blocks.length || page.gone.length) {
    map.version++;
    countSoon();
  }
  return page.blocks.length + page.gone.length > 0;
}

export function forgetBlocks() {
  mark = null;
}

// -- sharing -----------------------------------------------------------------------------------

const missing = new Map(); // agent -> its last block, if the map lacks it and the agent was requested again

/** Count the agents that reach each block. */
export function countShares(at) {
  const shares = new Map();
  for (const agent of known.agents.values()) {
    const end = agent.state.block;
    if (!end) continue;
    if (!map.byName.has(end)) {
      if (mark !== null && missing.get(agent.id) !== end) refreshAgent(agent.id); // a longer block replaced it
      missing.set(agent.id, end);
      continue;
    }
    for (let block = map.byName.get(end); block; block = map.byName.get(block.parent)) {
      shares.set(block, (shares.get(block) ?? 0) + 1);
    }
  }
  let isChanged = false;
  for (const block of map.byName.values()) {
    const share = shares.get(block) ?? 0;
    if (share === block.share) continue;
    if (at && share > block.share && block.share > 0) map.flashes.set(block.slot, { what: "shared", at });
    block.share = share;
    isChanged = true;
  }
  if (isChanged) map.version++;
}

let counting = 0;

/** Schedule one count for all changes within 400 ms. */
export function countSoon() {
  counting ||= setTimeout(() => {
    counting = 0;
    countShares(performance.now());
  }, 400);
}

/** The agents that reach a block. */
export function ownersOf(block) {
  const owners = [];
  for (const agent of known.agents.values()) {
    for (let other = map.byName.get(agent.state.block); other && other.start >= block.start; other = map.byName.get(other.parent)) {
      if (other === block) {
        owners.push(agent.id);
        break;
      }
    }
  }
  return owners.sort();
}

/** The blocks of one agent. */
export function chainOf(id) {
  const chain = new Set();
  const end = known.agents.get(id)?.state.block;
  for (let block = map.byName.get(end); block; block = map.byName.get(block.parent)) chain.add(block);
  return chain;
}
