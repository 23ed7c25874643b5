// Operations on an agent, with undo where it is possible.
import { html, useState } from "./vendor/preact-htm.js";
import { ask, forgetAgent, get, known, leaving, putAgent, refreshAgent, refreshCache, refreshModels, say, sayFault, send, tell } from "./server.js";
import { Dialog, Field, bytes } from "./parts.js";

const GRACE_MS = 7000;

const at = (id, deed = "") => `v1/agents/${encodeURIComponent(id)}${deed}`;

/** Run an operation; on failure, show its error and return null. */
async function attempt(work) {
  try {
    return await work();
  } catch (error) {
    sayFault(error);
    return null;
  }
}

export const serveModel = (id) =>
  attempt(async () => {
    await send("POST", "admin/models/swap", { model: id, wait: false });
    say(`${id} loads when running requests have finished.`);
    refreshModels().catch(() => {});
  });

export const makeAgent = (settings) =>
  attempt(async () => {
    const agent = await send("POST", "v1/agents", settings);
    putAgent(agent);
    return agent;
  });

export const fork = (id, { ids, turn_id = null, n } = {}) =>
  attempt(async () => {
    const made = await send("POST", at(id, "/fork"), { ...(ids ? { ids } : { n: n ?? 1 }), turn_id });
    const names = made.data.map((agent) => agent.id);
    made.data.forEach((agent) => refreshAgent(agent.id));
    const undo = () => attempt(() => Promise.all(names.map((name) => send("DELETE", at(name)))));
    say(names.length > 1 ? `Forked ${id} ${names.length} times.` : `Forked ${id} to ${names[0]}.`, { undo });
    return names;
  });

export const compact = (id, { name, keepTurns }) =>
  attempt(async () => {
    say(`Writing a summary of ${id}…`);
    const made = await send("POST", at(id, "/compact"), { id: name, keep_turns: keepTurns });
    refreshAgent(made.agent.id);
    const undo = () => attempt(() => send("DELETE", at(made.agent.id)));
    say(`${made.agent.id} continues ${id} with ${made.tokens_after} instead of ${made.tokens_before} tokens.`, { undo });
    return made.agent.id;
  });

export const rewind = (id, turnId, { isQuiet = false } = {}) =>
  attempt(async () => {
    const { head: before } = await get(at(id)); // the page's copy may lack the latest turn
    const agent = await send("POST", at(id, "/rewind"), { turn_id: turnId });
    putAgent({ ...known.agents.get(id), ...agent, history: [] });
    refreshAgent(id);
    if (isQuiet) return agent;
    const undo = () => attempt(() => send("POST", at(id, "/rewind"), { turn_id: before })).then(() => refreshAgent(id));
    say(turnId ? `Rewound ${id} to turn ${agent.turns}.` : `Rewound ${id} to the beginning.`, { undo });
    return agent;
  });

export const pin = (id, isPinned) =>
  attempt(async () => {
    putAgent({ ...known.agents.get(id), ...(await send("PATCH", at(id), { pin: isPinned })) });
    refreshAgent(id);
    say(isPinned ? `${id} is pinned: its KV cache stays on disk.` : `${id} is no longer pinned.`, { undo: () => pin(id, !isPinned) });
  });

export const prefetch = (id) =>
  attempt(async () => {
    const { parts } = await send("POST", at(id, "/prefetch"));
    setTimeout(() => refreshAgent(id), 400);
    say(parts ? `Reading ${parts} ${parts > 1 ? "parts" : "part"} of ${id} into memory.` : `All of ${id} that fits is in memory.`, {
      undo: parts ? () => evict(id, "disk") : undefined,
    });
  });

export const evict = (id, to) =>
  attempt(async () => {
    const { state } = await send("POST", at(id, "/evict"), { to });
    refreshAgent(id);
    refreshCache();
    const where = { hot: "in memory, because other agents share it", warm: "on disk", cold: "evicted; its next turn recomputes it" };
    say(`The KV cache of ${id} is ${where[state.tier]}.`, { undo: to === "disk" ? () => prefetch(id) : undefined });
  });

/** Delete an agent after a few seconds, unless the user clicks Undo. */
export function remove(id) {
  const agent = known.agents.get(id);
  const isOver = () => leaving.delete(id) && attempt(() => ask(at(id), { method: "DELETE", keepalive: true }));
  leaving.set(id, isOver);
  forgetAgent(id);
  say(`Deleted ${id}.`, {
    ms: GRACE_MS,
    onGone: isOver,
    undo: () => {
      leaving.delete(id);
      putAgent(agent);
    },
  });
}

export const isLeaving = (id) => leaving.has(id);
addEventListener("pagehide", () => leaving.forEach((end) => end()));

export const exportFile = (id) =>
  attempt(async () => {
    const blob = await (await ask(at(id, "/export"))).blob();
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = `${id}.tar`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
    say(`Exported ${id}: ${bytes(blob.size)}.`);
  });

export const importFile = (file, { id, messagesOnly }) =>
  attempt(async () => {
    const query = new URLSearchParams({ ...(id && { id }), ...(messagesOnly && { messages_only: "true" }) });
    const agent = await (await ask(`v1/agents/import?${query}`, { method: "POST", body: file })).json();
    putAgent(agent);
    say(`Imported ${agent.id}: ${agent.import_state}, ${agent.import_reason}.`, { undo: () => remove(agent.id) });
    return agent;
  });

// -- dialogs -----------------------------------------------------------------------------------

let opened = null;

export function open(dialog) {
  opened = dialog;
  tell("dialog");
}

const close = () => open(null);
const NAME = "[A-Za-z0-9._\\-]{1,128}";

const isTaken = (id) => known.agents.has(id) || leaving.has(id);

/** The name, with a number if it is taken. */
export function freeName(id) {
  if (!isTaken(id)) return id;
  for (let count = 2; ; count++) if (!isTaken(`${id}-${count}`)) return `${id}-${count}`;
}

function ForkDialog({ id, turnId, onMade }) {
  const done = async ({ name, count }) => {
    close();
    const names = await fork(id, count > 1 ? { n: Number(count), turn_id: turnId } : { ids: [name], turn_id: turnId });
    if (names) onMade?.(names[0]);
  };
  const [count, setCount] = useState(1);
  return html`<${Dialog} title=${`Fork ${id}`} action="Fork" onDone=${done} onClose=${close}>
    <p class="note">The fork shares ${turnId ? "the turns up to this one" : "all turns so far"} with ${id}. Forking copies and recomputes nothing.</p>
    <${Field} label="Name"><input name="name" required=${count < 2} disabled=${count > 1} pattern=${NAME} value=${freeName(id)} /><//>
    <${Field} label="Number of forks" hint="with more than one, each gets a random name">
      <input name="count" type="number" min="1" max="256" value=${count} onInput=${(event) => setCount(Number(event.target.value))} />
    <//>
  <//>`;
}

function CompactDialog({ id, onMade }) {
  const done = async ({ name, keep }) => {
    close();
    const made = await compact(id, { name, keepTurns: Number(keep) });
    if (made) onMade?.(made);
  };
  return html`<${Dialog} title=${`Compact ${id}`} action="Compact" onDone=${done} onClose=${close}>
    <p class="note">A new agent continues from a summary that the model writes. ${id} does not change.</p>
    <${Field} label="Name"><input name="name" required pattern=${NAME} value=${freeName(id)} /><//>
    <${Field} label="Turns to keep" hint="the latest turns stay as they are"><input name="keep" type="number" min="0" max="1000" value="2" /><//>
  <//>`;
}

function NewDialog({ onMade }) {
  const done = async ({ id, system }) => {
    close();
    const agent = await makeAgent({ ...(id && { id }), ...(system && { system }) });
    if (agent) onMade?.(agent.id);
  };
  return html`<${Dialog} title="New agent" action="Create" onDone=${done} onClose=${close}>
    <${Field} label="Name" hint="letters, digits, dot, dash; leave empty for a random name"><input name="id" pattern=${NAME} placeholder="coder" /><//>
    <${Field} label="System prompt"><textarea name="system" rows="5" placeholder="You write Python." /><//>
  <//>`;
}

/** Edit a system prompt: that of agent `id`, or of a chat that has none yet, which keeps it by `onKeep`. */
function SystemDialog({ id, system, hasTurns, onKeep }) {
  const done = ({ text }) => {
    close();
    if (onKeep) onKeep(text.trim());
    else attempt(async () => putAgent({ ...known.agents.get(id), ...(await send("PATCH", at(id), { system: text.trim() || null })) }));
  };
  return html`<${Dialog} title="System prompt" action="Save" onDone=${done} onClose=${close}>
    <p class="note">It stands before the conversation and holds in every turn.${hasTurns ? " With another one, the next turn computes the whole prompt again." : ""}</p>
    <${Field} label="System prompt"><textarea name="text" rows="8" placeholder="You are a patient teacher. Answer in short paragraphs." defaultValue=${system} /><//>
  <//>`;
}

function ImportDialog({ onMade }) {
  const done = async ({ file, id, messages }) => {
    close();
    const agent = await importFile(file, { id, messagesOnly: messages === "on" });
    if (agent) onMade?.(agent.id);
  };
  return html`<${Dialog} title="Import an agent" action="Import" onDone=${done} onClose=${close}>
    <${Field} label="File" hint="a file created by Export"><input name="file" type="file" accept=".tar,application/x-tar" required /><//>
    <${Field} label="Name" hint="leave empty for the name in the file"><input name="id" pattern=${NAME} /><//>
    <label class="check"><input type="checkbox" name="messages" /> messages only, without the KV cache</label>
  <//>`;
}

function RemoveDialog({ id }) {
  const done = () => {
    close();
    remove(id);
  };
  return html`<${Dialog} title=${`Delete ${id}?`} action="Delete" onDone=${done} onClose=${close}>
    <p class="note">Its forks keep the turns that they share with it. You have a few seconds to undo this.</p>
  <//>`;
}

function RemoveModelDialog({ id, onDone }) {
  const done = () => {
    close();
    onDone();
  };
  return html`<${Dialog} title=${`Delete the model ${id}?`} action="Delete" onDone=${done} onClose=${close}>
    <p class="note">Its files are deleted from this machine. Agents and their KV cache stay, and need the model again for their next turn.</p>
  <//>`;
}

export const askFork = (id, turnId = null, onMade) => open(html`<${ForkDialog} id=${id} turnId=${turnId} onMade=${onMade} />`);
export const askCompact = (id, onMade) => open(html`<${CompactDialog} id=${id} onMade=${onMade} />`);
export const askNew = (onMade) => open(html`<${NewDialog} onMade=${onMade} />`);
export const askSystem = (id, system, hasTurns, onKeep) => open(html`<${SystemDialog} id=${id} system=${system} hasTurns=${hasTurns} onKeep=${onKeep} />`);
export const askImport = (onMade) => open(html`<${ImportDialog} onMade=${onMade} />`);
export const askRemove = (id) => open(html`<${RemoveDialog} id=${id} />`);
export const askRemoveModel = (id, onDone) => open(html`<${RemoveModelDialog} id=${id} onDone=${onDone} />`);
export const openDialog = () => opened;
