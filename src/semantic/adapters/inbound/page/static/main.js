// The frame around the views: navigation, keyboard shortcuts, status of the server.
import { Component, html, render, useEffect, useLayoutEffect, useState } from "./vendor/preact-htm.js";
import { dropKey, follow, giveKey, hasKey, known, tell, useTopics } from "./server.js";
import { Bar, Button, Dialog, Field, Icon, bytes } from "./parts.js";
import { openDialog } from "./actions.js";
import { Agents } from "./agents.js";
import { Chat } from "./chat.js";
import { Compare } from "./compare.js";
import { Memory } from "./memory.js";
import { Connect } from "./connect.js";
import { Models } from "./models.js";
import { Now } from "./now.js";

const VIEWS = { chat: Chat, agents: Agents, compare: Compare, memory: Memory, now: Now, models: Models, connect: Connect };
const NAMES = Object.keys(VIEWS);
const OF_AGENTS = ["chat", "agents", "compare"]; // views of one agent, which stays chosen between them

function here() {
  const [, view, ...ids] = location.hash.split("/");
  const [id = null, other = null] = ids.filter(Boolean).map(decodeURIComponent);
  return { view: view in VIEWS ? view : "chat", id, other };
}

const go = (view, ...ids) => (location.hash = ["#", view, ...ids.filter(Boolean).map(encodeURIComponent)].join("/"));

function useHere() {
  const [place, setPlace] = useState(here());
  useEffect(() => {
    const move = () => setPlace(here());
    addEventListener("hashchange", move);
    return () => removeEventListener("hashchange", move);
  }, []);
  return place;
}

// -- the frame ---------------------------------------------------------------------------------

function App() {
  const { view, id, other } = useHere();
  const [isHelp, setHelp] = useState(false);
  useTopics("link", "dialog");
  useLayoutEffect(() => {
    const press = (event) => {
      if (event.target.closest("input,textarea,select,dialog") || event.metaKey || event.ctrlKey || event.altKey) return;
      const name = NAMES[Number(event.key) - 1];
      if (name) go(name, OF_AGENTS.includes(name) ? id : null);
      else if (event.key === "?") setHelp(true);
      else if (event.key === "/") {
        document.getElementById("search")?.focus();
        event.preventDefault();
      }
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, [id]);
  const View = VIEWS[view];
  return html`
    <${Rail} view=${view} id=${id} onHelp=${() => setHelp(true)} />
    <main>
      ${known.link === "down" && html`<p class="down" role="alert"><i class="dot" />The server does not answer. This page keeps what it shows and reconnects by itself.</p>`}
      <${ErrorBoundary} key=${view}><${View} id=${id} other=${other} go=${go} /><//>
    </main>
    <${Toasts} />
    ${known.needsKey ? html`<${KeyDialog} />` : openDialog()}
    ${isHelp && html`<${Help} onClose=${() => setHelp(false)} />`}
  `;
}

/** Shows the error of a view that fails; other views still work. */
class ErrorBoundary extends Component {
  componentDidCatch(error) {
    console.error(error);
    this.setState({ error });
  }
  render({ children }, { error }) {
    return error ? html`<div class="empty"><p>This view failed: ${error.message}</p><${Button} isLocal onClick=${() => this.setState({ error: null })}>Retry<//></div>` : children;
  }
}

function Rail({ view, id, onHelp }) {
  useTopics("cache", "models", "link");
  const { cache, health, link } = known;
  const state = link === "live" ? (health?.state ?? "loading") : link;
  return html`<nav class="rail" aria-label="Views">
    <a class="brand" href="#/chat"><img src="page/icon.svg" alt="" width="26" height="26" /><b>Semantic</b></a>
    ${NAMES.map((name, index) => html`<a key=${name} class=${`item ${name === view ? "on" : ""}`} aria-current=${name === view ? "page" : null} title=${`${name} (${index + 1})`} href=${`#/${name}${id && OF_AGENTS.includes(name) ? `/${id}` : ""}`}>
      <${Icon} name=${name} /><span>${name}</span>
    </a>`)}
    <div class="status">
      <a href="#/models" title=${health?.detail ?? ""}><i class=${`dot state-${state}`} /><span class="name">${health?.model ?? "…"}</span></a>
      <small>${link === "live" ? `${state}${health?.backend ? ` on ${health.backend}` : ""}` : link === "down" ? "not reachable" : "connecting"}</small>
      ${cache && html`<a href="#/memory" class="mini" title=${`RAM ${bytes(cache.memory.used)} of ${bytes(cache.memory.budget)}`}><span>RAM</span><${Bar} parts=${[["pool", cache.memory.used - cache.memory.working], ["hot", cache.memory.working]]} whole=${cache.memory.budget} label="RAM" /></a>
      <a href="#/memory" class="mini" title=${`Disk ${bytes(cache.disk.used)} of ${bytes(cache.disk.budget)}`}><span>Disk</span><${Bar} parts=${[["disk", cache.disk.used + cache.disk.other]]} whole=${cache.disk.budget} label="Disk" /></a>`}
      <div class="small">
        <${Button} kind="quiet" isLocal icon="sun" title="Switch between light and dark" onClick=${toggleTheme} />
        <${Button} kind="quiet" isLocal title="Keyboard shortcuts (?)" onClick=${onHelp}>?<//>
        ${hasKey() && html`<${Button} kind="quiet" title="Forget the key" onClick=${dropKey}>Sign out<//>`}
      </div>
    </div>
  </nav>`;
}

function toggleTheme() {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  localStorage.setItem("semantic.theme", root.dataset.theme);
  tell("theme");
}

function Toasts() {
  useTopics("toasts");
  return html`<div class="toasts" role="status" aria-live="polite">
    ${known.toasts.map((toast) => html`<div key=${toast.id} class=${`toast ${toast.isFault ? "bad" : ""}`}>
      <span>${toast.text}</span>
      ${toast.undo && html`<${Button} onClick=${toast.takeBack}>Undo<//>`}
      <${Button} icon="close" kind="quiet" isLocal title="Close" onClick=${toast.close} />
    </div>`)}
  </div>`;
}

function KeyDialog() {
  const done = ({ key }) => giveKey(key.trim());
  return html`<${Dialog} title="This server requires a key" action="Sign in" isLocal onDone=${done} onClose=${() => tell("link")}>
    <p class="note">Create a key with <code>semantic keys add</code>. This page keeps it until you close the tab. With an admin key, this page also shows memory, metrics and models.</p>
    ${known.keyFault && html`<p class="fault">${known.keyFault}</p>`}
    <${Field} label="Key"><input name="key" type="password" autocomplete="off" required /><//>
  <//>`;
}

const KEYS = [
  ["1 … 7", "switch to a view"],
  ["/", "search"],
  ["j k ↓ ↑", "next or previous agent"],
  ["Enter", "chat with the selected agent; in a chat: send"],
  ["f p l e x", "fork, pin, prefetch, evict, export"],
  ["d", "compare the selected agent with another; Enter chooses it"],
  ["x", "in a comparison: swap sides; j and k: next or previous turn"],
  ["Del", "delete the selected agent"],
  ["Esc", "close; in a chat: stop the reply, or leave the composer"],
  ["n i", "in the view Chat: new chat, go to the composer"],
  ["↑", "in an empty composer: edit the last message"],
  ["← → ↑ ↓", "in the map: select a block"],
];

const Help = ({ onClose }) =>
  html`<${Dialog} title="Keyboard shortcuts" action="Close" isLocal onDone=${onClose} onClose=${onClose}>
    <dl class="keys">${KEYS.map(([key, text]) => html`<dt><kbd>${key}</kbd></dt><dd>${text}</dd>`)}</dl>
  <//>`;

const root = document.getElementById("app");
root.textContent = "";
render(html`<${App} />`, root);
follow();
