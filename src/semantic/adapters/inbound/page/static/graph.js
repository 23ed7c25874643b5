// Agents as a git graph: each agent is a line of turns, and a fork branches off its parent's line.
//
// A turn is on the line of the oldest agent that has it. An agent's forks are below it, the latest
// branch first, so that lines do not cross.
import { html } from "./vendor/preact-htm.js";

export const WIDTH = 190;
export const HEIGHT = 38;
const EDGE = 12;
const STEP = 15;

/** The lines of all agents, from top to bottom. */
export function layOut(agents) {
  const owners = new Map();
  const lines = new Map();
  const byAge = [...agents].sort((a, b) => a.created_at - b.created_at || (a.id < b.id ? -1 : 1));
  for (const agent of byAge) {
    const turns = [...agent.history].reverse();
    const oldest = agent.turns - turns.length + 1;
    let start = 0;
    while (start < turns.length && owners.has(turns[start])) start++;
    const own = turns.slice(start).map((id, index) => ({ id, depth: oldest + start + index }));
    const left = start ? owners.get(turns[start - 1]) : null;
    const line = { agent, own, forks: [], from: left, leftAt: oldest + start - 1, oldest };
    for (const turn of own) owners.set(turn.id, line);
    if (left) left.forks.push(line);
    lines.set(agent.id, line);
  }
  const roots = [...lines.values()].filter((line) => !line.from);
  for (const root of roots) measure(root);
  roots.sort((a, b) => b.lastUsed - a.lastUsed);
  const rows = [];
  for (const root of roots) place(root, rows, root);
  return rows;
}

/** Set a tree's first and last turn, last use and step width; iterative, because trees may be deep. */
function measure(root) {
  const all = [root];
  for (let index = 0; index < all.length; index++) all.push(...all[index].forks);
  root.first = Math.min(...all.map((line) => (line.from ? line.leftAt : line.oldest)));
  root.last = Math.max(...all.map((line) => line.agent.turns + (line.own.length ? 0 : 1)));
  root.lastUsed = Math.max(...all.map((line) => line.agent.last_used));
  root.step = Math.min(STEP, (WIDTH - 2 * EDGE) / Math.max(1, root.last - root.first));
}

function place(root, rows) {
  const stack = [root];
  while (stack.length) {
    const line = stack.pop();
    line.root = root;
    line.row = rows.length;
    line.through = []; // depths of vertical lines that pass through this row
    rows.push(line);
    line.forks.sort((a, b) => a.leftAt - b.leftAt || b.agent.created_at - a.agent.created_at);
    stack.push(...line.forks);
  }
  for (const line of rows.slice(root.row)) {
    const ends = new Map();
    for (const fork of line.forks) ends.set(fork.leftAt, Math.max(fork.row, ends.get(fork.leftAt) ?? 0));
    for (const [depth, end] of ends) {
      for (let row = line.row + 1; row < end; row++) rows[row].through.push(depth);
      line.drops = [...ends.keys()];
    }
  }
}

export const placeOf = (line, depth) => EDGE + (depth - line.root.first) * line.root.step;

/** One row of the graph. */
export function Line({ line, isChosen }) {
  const { agent, own, from, leftAt, root } = line;
  const x = (depth) => placeOf(line, depth);
  const middle = HEIGHT / 2;
  const end = own.length ? x(own.at(-1).depth) : from ? x(leftAt) + root.step : x(1);
  const begin = own.length ? x(own[0].depth) : end;
  const radius = root.step < 6 ? 2 : 3.5;
  const tier = agent.state.tier;
  return html`<svg class=${`line ${tier} ${isChosen ? "chosen" : ""}`} width=${WIDTH} height=${HEIGHT} aria-hidden="true">
    ${line.through.map((depth) => html`<path class="faint" d=${`M${x(depth)} 0V${HEIGHT}`} />`)}
    ${(line.drops ?? []).map((depth) => html`<path class="faint" d=${`M${x(depth)} ${middle}V${HEIGHT}`} />`)}
    ${from && html`<path d=${`M${x(leftAt)} 0C${x(leftAt)} ${middle} ${x(leftAt)} ${middle} ${begin} ${middle}`} />`}
    ${!from && line.oldest > 1 && html`<path class="faint" stroke-dasharray="2 3" d=${`M0 ${middle}H${begin}`} />`}
    ${own.length > 1 && html`<path d=${`M${begin} ${middle}H${end}`} />`}
    ${own.slice(0, -1).map((turn) => html`<circle cx=${x(turn.depth)} cy=${middle} r=${radius - 0.5} />`)}
    <circle class=${own.length ? "head" : "head empty"} cx=${end} cy=${middle} r=${radius + 1.5} />
    ${agent.busy && html`<circle class="busy" cx=${end} cy=${middle} r=${radius + 3} />`}
  </svg>`;
}

/** The agents whose line leaves that of an agent at one of its turns. */
export function branchesAt(agents, agent, turnId) {
  const next = ({ history }) => history[history.indexOf(turnId) - 1];
  return agents.filter((other) => other.id !== agent.id && other.history.includes(turnId) && next(other) !== next(agent));
}
