// The page's copy of the server's state, and the code that keeps it up to date.
//
// The page follows one stream of events and then requests what changed. When the connection is
// lost, the page keeps its state, shows a warning, and reconnects.
import { useEffect, useReducer } from "./vendor/preact-htm.js";

const HISTORY = 60; // turns of each agent that the graph shows
const PAGE = 100;
const KEY = "semantic.key";
const QUIET_MS = 10_000; // longest time between two requests for the cache figures
const HIDDEN_MS = 30_000; // a hidden page closes its connection after this time

export const known = {
  link: "connecting", // or "live", "down"
  needsKey: false,
  keyFault: "",
  health: null,
  models: [],
  agents: new Map(),
  isWhole: false, // all agents are loaded
  cache: null,
  cacheFault: "",
  running: [],
  events: [], // the latest first, for the activity list
  toasts: [],
};

// -- listeners -------------------------------------------------------------------------------

const listeners = new Map();
const pending = new Set();

export function tell(...topics) {
  if (!pending.size) requestAnimationFrame(flush);
  for (const topic of topics) pending.add(topic);
}

function flush() {
  const topics = [...pending];
  pending.clear();
  const called = new Set(topics.flatMap((topic) => [...(listeners.get(topic) ?? [])]));
  for (const listener of called) listener(topics);
}

export function listen(topics, listener) {
  for (const topic of topics) {
    if (!listeners.has(topic)) listeners.set(topic, new Set());
    listeners.get(topic).add(listener);
  }
  return () => topics.forEach((topic) => listeners.get(topic).delete(listener));
}

/** Render a component again when one of these topics changes. */
export function useTopics(...topics) {
  const [, redraw] = useReducer((count) => count + 1, 0);
  useEffect(() => listen(topics, () => redraw()), topics);
  return known;
}

/** Call `work` now and every `ms`, while the component is mounted and the page is visible. */
export function usePolling(work, ms, inputs = []) {
  useEffect(() => {
    let isOver = false;
    let timer = 0;
    const round = async () => {
      if (!document.hidden && !known.needsKey) await work().catch(() => {});
      if (!isOver) timer = setTimeout(round, ms);
    };
    round();
    return () => {
      isOver = true;
      clearTimeout(timer);
    };
  }, inputs);
}

// -- requests ------------------------------------------------------------------------------------

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function headersOf(more) {
  const key = sessionStorage.getItem(KEY);
  return { ...(key ? { authorization: `Bearer ${key}` } : {}), ...more };
}

/** Send a request; throws an `ApiError` unless it succeeds. */
export async function ask(path, { method = "GET", json, body, signal, keepalive } = {}) {
  const headers = headersOf(json === undefined ? {} : { "content-type": "application/json" });
  const sent = json === undefined ? body : JSON.stringify(json);
  let answer;
  try {
    answer = await fetch(path, { method, headers, body: sent, signal, keepalive });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server does not answer.");
  }
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => null);
  const message = told?.error?.message ?? `${answer.status} ${answer.statusText}`;
  if (answer.status === 401) wantKey(message);
  throw new ApiError(answer.status, message);
}

export async function get(path, options) {
  return (await ask(path, options)).json();
}

export async function send(method, path, json = {}) {
  const answer = await ask(path, { method, json });
  return answer.status === 204 ? null : answer.json();
}

/** The events of a stream, one by one. */
export async function* framesOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const frames = (rest + value).split("\n\n");
      rest = frames.pop();
      for (const frame of frames) {
        for (const line of frame.split("\n")) {
          if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function wantKey(message) {
  const hadKey = sessionStorage.getItem(KEY) !== null;
  known.needsKey = true;
  known.keyFault = hadKey ? message : "";
  tell("link");
}

/** Store a key until the tab is closed, and reconnect with it. */
export function giveKey(key) {
  sessionStorage.setItem(KEY, key);
  known.needsKey = false;
  tell("link");
  wake();
}

export const hasKey = () => sessionStorage.getItem(KEY) !== null;

export function dropKey() {
  sessionStorage.removeItem(KEY);
  location.reload();
}

// -- agents ------------------------------------------------------------------------------------

const stale = new Set();
let refreshing = 0;

export const leaving = new Map(); // agent -> the function that deletes it, unless the user clicks Undo

const isListed = (agent) =>
  !leaving.has(agent.id) &&
  (known.agents.has(agent.id) || agent.settings.pin || agent.turns > 1 || !/^(anon|client)-/.test(agent.id));

const gone = new Map(); // agent -> when it was deleted; answers to earlier requests are outdated

export function putAgent(agent, askedAt = Infinity) {
  if ((gone.get(agent.id) ?? 0) > askedAt) return;
  if (isListed(agent)) known.agents.set(agent.id, agent);
  tell("agents");
}

export function forgetAgent(id) {
  gone.set(id, performance.now());
  known.agents.delete(id);
  tell("agents");
}

/** Request an agent again after 150 ms, together with other agents. */
export function refreshAgent(id) {
  stale.add(id);
  refreshing ||= setTimeout(refreshStale, 150);
}

async function refreshStale() {
  const ids = [...stale];
  const askedAt = performance.now();
  stale.clear();
  await Promise.all(
    ids.slice(0, 4).map((id) =>
      get(`v1/agents/${id}`).then((agent) => putAgent(agent, askedAt), (error) => error.status === 404 && forgetAgent(id)),
    ),
  );
  ids.slice(4).forEach((id) => stale.add(id));
  refreshing = stale.size ? setTimeout(refreshStale, 0) : 0;
}

async function loadAgents() {
  const seen = new Set();
  let after = "";
  known.isWhole = false;
  do {
    const query = new URLSearchParams({ limit: PAGE, history: HISTORY, ...(after && { after }) });
    const askedAt = performance.now();
    const page = await get(`v1/agents?${query}`);
    for (const agent of page.data) {
      seen.add(agent.id);
      putAgent(agent, askedAt);
    }
    after = page.next;
    tell("agents");
  } while (after);
  for (const id of known.agents.keys()) if (!seen.has(id)) known.agents.delete(id);
  known.isWhole = true;
  tell("agents");
}

// -- figures -----------------------------------------------------------------------------------

let cacheDue = 0;
let cacheTimer = 0;

export function refreshCache(isUrgent = false) {
  const wait = isUrgent ? 0 : Math.max(0, cacheDue - Date.now());
  cacheTimer ||= setTimeout(async () => {
    const asked = Date.now();
    try {
      known.cache = await get("v1/cache");
      known.cacheFault = "";
    } catch (error) {
      if (error.status) known.cacheFault = error.message;
    }
    // With many agents this request is slow: the longer it takes, the less often the page sends it.
    cacheDue = Date.now() + Math.max(1500, 20 * (Date.now() - asked));
    cacheTimer = 0;
    tell("cache");
  }, wait);
}

export async function refreshModels() {
  const headers = headersOf({});
  const answer = await fetch("health", { headers });
  known.health = await answer.json(); // a 503 response has the same fields
  known.models = (await get("v1/models")).data;
  tell("models");
}

// -- the stream of events ----------------------------------------------------------------------

let stop = new AbortController();
let nap = null;
let hiddenSince = 0;

export function wake() {
  nap?.();
}

const sleep = (ms) =>
  new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    nap = () => {
      clearTimeout(timer);
      resolve();
    };
  });

function setLink(link) {
  if (known.link !== link) {
    known.link = link;
    tell("link");
  }
}

/** Follow the server's events until the page closes. */
export async function follow() {
  let wait = 250;
  for (;;) {
    if (!hiddenSince || Date.now() - hiddenSince < HIDDEN_MS) {
      try {
        stop = new AbortController();
        const answer = await ask("v1/events", { signal: stop.signal });
        wait = 250;
        setLink("live");
        await refreshModels();
        loadAgents().catch(() => {});
        refreshCache(true);
        tell("linked");
        for await (const event of framesOf(answer)) hear(event);
      } catch (error) {
        if (error.status === 503) await refreshModels().catch(() => {});
      }
    }
    if (!known.needsKey) setLink(hiddenSince ? "connecting" : "down");
    await sleep(known.needsKey || hiddenSince ? 60_000 : wait);
    wait = Math.min(wait * 2, 4000);
  }
}

const CHANGES = /^agent\.(created|updated|forked|rewound|imported|evicted)$/;

function hear(event) {
  if (event.type === "cache") {
    refreshCache();
    tell("blocks");
    return;
  }
  known.events.unshift({ ...event, at: Date.now() });
  known.events.length = Math.min(known.events.length, 200);
  const agent = known.agents.get(event.agent_id);
  if (event.type === "missed") loadAgents().catch(() => {});
  else if (event.type === "agent.deleted") forgetAgent(event.agent_id);
  else if (event.type === "turn.started" && agent) {
    known.agents.set(agent.id, { ...agent, busy: true });
    tell("agents");
  } else if (event.type.startsWith("model.")) {
    refreshModels().catch(() => {});
    if (event.type === "model.ready") loadAgents().then(() => refreshCache(true), () => {});
  } else if (event.type === "turn.finished" || CHANGES.test(event.type)) {
    refreshAgent(event.agent_id);
    refreshCache();
  }
  tell("events");
}

document.addEventListener("visibilitychange", () => {
  hiddenSince = document.hidden ? Date.now() : 0;
  if (document.hidden) setTimeout(() => document.hidden && stop.abort(), HIDDEN_MS);
  else wake();
});
setInterval(() => !document.hidden && known.link === "live" && refreshCache(), QUIET_MS);

// -- toasts ------------------------------------------------------------------------------------

let numToasts = 0;

/** Show a message; `undo` reverts what it reports. */
export function say(text, { undo, isFault = false, ms = 7000, onGone } = {}) {
  const toast = { id: ++numToasts, text, isFault, undo };
  const close = () => {
    clearTimeout(timer);
    known.toasts = known.toasts.filter((other) => other !== toast);
    tell("toasts");
  };
  const timer = setTimeout(() => {
    close();
    onGone?.();
  }, ms);
  toast.close = () => {
    close();
    onGone?.();
  };
  toast.takeBack = () => {
    close();
    undo?.();
  };
  known.toasts = [...known.toasts.slice(-3), toast];
  tell("toasts");
  return toast;
}

// While the server does not answer, the banner says so; a toast for each request would only repeat it.
const isKnown = ({ name, status }) => name === "AbortError" || status === 401 || (status === 0 && known.link !== "live");

export const sayFault = (error) => isKnown(error) || say(error.message, { isFault: true });
