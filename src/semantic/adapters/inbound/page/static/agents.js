// Agents: the graph of all agents, and one agent with its log beside it.
import { html, useEffect, useLayoutEffect, useMemo, useState } from "./vendor/preact-htm.js";
import { get, known, refreshAgent, sayFault, useTopics } from "./server.js";
import { Bar, Button, ReuseBar, Rows, TIERS, Tier, ago, bytes, number, short, textOf } from "./parts.js";
import { HEIGHT, Line, branchesAt, layOut } from "./graph.js";
import { Volatile } from "./volatile.js";
import * as act from "./actions.js";

const TIMELINE = 40; // turns in the timeline of an agent
const KINDS = ["all", "hot", "warm", "cold", "pinned", "busy"];
const kindName = (kind) => (TIERS[kind]?.[0] ?? kind).replace(/^./, (letter) => letter.toUpperCase());
const isKind = (agent, kind) =>
  kind === "all" || agent.state.tier === kind || (kind === "pinned" && agent.settings.pin) || (kind === "busy" && agent.busy);

function matching(agents, text, kind) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const wanted = (agent) => {
    const labels = Object.entries(agent.settings.labels).flat().join(" ");
    const all = `${agent.id} ${labels} ${agent.settings.system ?? ""}`.toLowerCase();
    return isKind(agent, kind) && words.every((word) => all.includes(word));
  };
  return agents.filter(wanted);
}

export function Agents({ id, go }) {
  useTopics("agents");
  const [text, setText] = useState("");
  const [kind, setKind] = useState("all");
  const [compared, setCompared] = useState(null); // the agent for which another one is chosen
  const compare = (name) => {
    setCompared(name);
    go("agents");
  };
  const agents = [...known.agents.values()];
  const rows = useMemo(() => layOut(matching(agents, text, kind)), [known.agents.size, text, kind, stamp(agents)]);
  const focus = rows.findIndex((line) => line.agent.id === id);
  const counts = useMemo(() => KINDS.map((name) => [name, agents.filter((agent) => isKind(agent, name)).length]), [stamp(agents)]);

  // Keys act on what is shown: an ordinary effect would wait until after the paint.
  useLayoutEffect(() => {
    const press = (event) => {
      if (event.target.closest("input,textarea,dialog,select") || event.metaKey || event.ctrlKey || event.altKey) return;
      const step = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1 }[event.key];
      if (step && rows.length) {
        const next = focus < 0 ? 0 : Math.min(rows.length - 1, Math.max(0, focus + step));
        go("agents", rows[next].agent.id);
        event.preventDefault();
      }
      if (compared && event.key === "Escape") setCompared(null);
      else if (compared && event.key === "Enter" && id) go("compare", compared, id);
      else if (event.key === "d" && id) compare(id);
      const deed = compared ? null : DEEDS[event.key];
      if (deed && known.agents.has(id)) {
        deed(id, go);
        event.preventDefault();
      }
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, [rows, focus, id, compared]);

  const draw = (line) => html`<${Row} key=${line.agent.id} line=${line} chosen=${id} compared=${compared} go=${go} />`;
  return html`<section class=${`agents ${id ? "has-one" : ""}`}>
    <div class="list">
      <header class="tools">
        <h1>Agents</h1>
        <input id="search" type="search" placeholder="Find by name, label, prompt  ( / )" aria-label="Find agents" value=${text} onInput=${(event) => setText(event.target.value)} />
        <${Button} onClick=${() => act.askImport((made) => go("agents", made))}>Import<//>
        <${Button} kind="main" icon="plus" onClick=${() => act.askNew((made) => go("chat", made))}>New<//>
      </header>
      <div class="chips" role="group" aria-label="Filter by state">
        ${counts.map(([name, count]) => html`<button type="button" class=${name === kind ? "on" : ""} aria-pressed=${name === kind} title=${TIERS[name]?.[1]} onClick=${() => setKind(name)}>${kindName(name)} <b>${short(count)}</b></button>`)}
        ${!known.isWhole && html`<span class="note">loading…</span>`}
      </div>
      ${compared && html`<p class="choosing" role="status">Compare <b>${compared}</b> with: choose another line. <${Button} kind="quiet" onClick=${() => setCompared(null)}>Cancel<//></p>`}
      <div class="row heads" aria-hidden="true"><span>turns</span><span>name</span><span>cache</span><span class="wide">tokens</span><span class="wide">memory</span><span class="wide">disk</span><span>used</span></div>
      ${rows.length
        ? html`<${Rows} rows=${rows} height=${HEIGHT} draw=${draw} focus=${focus} label="Agents" />`
        : html`<div class="empty"><p>${known.agents.size ? "No agent matches." : "No agents yet. An agent is a conversation that this server keeps, with what the model computed for it. Create one, or connect a client to this server."}</p></div>`}
    </div>
    ${id && html`<${Agent} key=${id} id=${id} go=${go} onCompare=${() => compare(id)} />`}
  </section>`;
}

// A number that changes when the graph needs a new layout.
const stamp = (agents) => agents.reduce((sum, agent) => sum + agent.last_used + agent.turns + agent.history.length, 0) + known.agents.size;

function Row({ line, chosen, compared, go }) {
  const agent = known.agents.get(line.agent.id) ?? line.agent;
  const { state } = agent;
  const isChosen = agent.id === chosen || agent.id === compared;
  const pick = (event) => {
    const first = compared ?? (event.shiftKey ? chosen : null);
    if (!first || first === agent.id) return;
    event.preventDefault();
    go("compare", first, agent.id);
  };
  return html`<a class=${`row ${isChosen ? "chosen" : ""}`} role="option" aria-selected=${isChosen} href=${`#/agents/${agent.id}`} onClick=${pick} onDblClick=${() => go("chat", agent.id)}>
    <${Line} line=${{ ...line, agent }} isChosen=${isChosen} />
    <span class="name" title=${agent.id}>${agent.id}${agent.settings.pin && html`<i class="pinned" title="pinned" />`}</span>
    <span><${Tier} tier=${state.tier} /></span>
    <span class="num wide">${short(agent.tokens)}</span>
    <span class="num wide">${state.memory_bytes ? bytes(state.memory_bytes) : "–"}</span>
    <span class="num wide">${state.disk_bytes ? bytes(state.disk_bytes) : "–"}</span>
    <span class="num">${ago(agent.last_used)}</span>
  </a>`;
}

const DEEDS = {
  Enter: (id, go) => go("chat", id),
  c: (id, go) => go("chat", id),
  f: (id, go) => act.askFork(id, null, (made) => go("agents", made)),
  p: (id) => act.pin(id, !known.agents.get(id).settings.pin),
  l: (id) => act.prefetch(id),
  e: (id) => act.evict(id, "disk"),
  x: (id) => act.exportFile(id),
  Delete: (id) => act.askRemove(id),
  Escape: (id, go) => go("agents"),
};

// -- one agent -----------------------------------------------------------------------------------

function Agent({ id, go, onCompare }) {
  useTopics("agents");
  const agent = known.agents.get(id);
  useEffect(() => void (agent || refreshAgent(id)), [id]);
  if (!agent) return html`<aside class="detail"><div class="empty"><p>${act.isLeaving(id) ? "Deleted." : "Agent not found."}</p></div></aside>`;
  const { state, settings } = agent;
  return html`<aside class="detail" aria-label=${id}>
    <header>
      <${Button} icon="close" kind="quiet" isLocal title="Close (Esc)" onClick=${() => go("agents")} />
      <h2 title=${id}>${id}</h2>
      <${Button} kind="main" icon="chat" onClick=${() => go("chat", id)} title="Chat (Enter)">Chat<//>
    </header>
    <div class="deeds">
      <${Button} onClick=${() => act.askFork(id, null, (made) => go("agents", made))} title="Fork (f)">Fork<//>
      <${Button} onClick=${onCompare} title="Compare with another branch (d)">Compare<//>
      <${Button} onClick=${() => act.askCompact(id, (made) => go("agents", made))} title="Continue from a summary">Compact<//>
      <${Button} onClick=${() => act.pin(id, !settings.pin)} title="Pin (p)">${settings.pin ? "Unpin" : "Pin"}<//>
      <${Button} onClick=${() => act.prefetch(id)} title="Read its cache from disk into memory, so that its next turn starts at once (l)">Prefetch<//>
      <${Button} onClick=${() => act.evict(id, "disk")} title="Free its memory; its cache stays on disk (e)">Evict<//>
      <${Button} onClick=${() => act.evict(id, "cold")} title="Delete its cache from memory and disk; its next turn computes it again">Drop cache<//>
      <${Button} onClick=${() => act.exportFile(id)} title="Export (x)">Export<//>
      <${Button} kind="danger" onClick=${() => act.askRemove(id)} title="Delete (Del)">Delete<//>
    </div>
    <div class="facts">
      <${Where} agent=${agent} />
      <dl>
        <dt>Created</dt><dd>${ago(agent.created_at)}${agent.created_at && Date.now() / 1000 - agent.created_at > 5 ? " ago" : ""}</dd>
        <dt>Priority</dt><dd>${settings.class}${settings.weight !== 1 ? `, weight ${settings.weight}` : ""}</dd>
        ${settings.ttl_s && html`<dt>Expires</dt><dd>${Math.round(settings.ttl_s / 3600)} h after its last turn</dd>`}
        ${settings.tools.length > 0 && html`<dt>Tools</dt><dd>${settings.tools.map((tool) => tool.name).join(", ")}</dd>`}
        ${Object.entries(settings.labels).map(([name, value]) => html`<dt>${name}</dt><dd>${value}</dd>`)}
      </dl>
      ${settings.system && html`<details class="system"><summary>System prompt</summary><pre>${settings.system}</pre></details>`}
      <${Timeline} agent=${agent} />
      <${Volatile} agent=${agent} />
      <${Log} agent=${agent} go=${go} />
    </div>
  </aside>`;
}

function Where({ agent }) {
  const { state, tokens } = agent;
  const disk = Math.max(0, state.disk_tokens - state.memory_tokens);
  const cold = Math.max(0, tokens - Math.max(state.memory_tokens, state.disk_tokens));
  const parts = [["pool", state.memory_tokens], ["disk", disk], ["cold", cold]];
  return html`<div class="where">
    <div><${Tier} tier=${state.tier} /> <b>${number(tokens)}</b> tokens in <b>${agent.turns}</b> ${agent.turns === 1 ? "turn" : "turns"}</div>
    <${Bar} parts=${parts} whole=${tokens} isThick label="location of its KV cache" />
    <p class="note">Its KV cache: what the model computed for this conversation. What is kept is not computed again.</p>
    <div class="key">
      <span><i class="dot pool" />${number(state.memory_tokens)} tokens in memory, ${bytes(state.memory_bytes)}</span>
      <span><i class="dot disk" />${number(state.disk_tokens)} tokens on disk, ${bytes(state.disk_bytes)}</span>
      ${cold > 1 && html`<span><i class="dot cold" />${number(cold)} to recompute</span>`}
    </div>
  </div>`;
}

function Log({ agent, go }) {
  const [turns, setTurns] = useState(null);
  const [next, setNext] = useState(null);
  const load = async (before) => {
    const page = await get(`v1/agents/${agent.id}/turns?limit=20${before ? `&before=${before}` : ""}`);
    setTurns((known) => (before ? [...known, ...page.data] : page.data));
    setNext(page.next);
  };
  useEffect(() => void load().catch(sayFault), [agent.head]);
  if (!turns) return null;
  return html`<div class="log">
    <h3>Turns</h3>
    ${!turns.length && html`<p class="note">No turns yet.</p>`}
    ${turns.map((turn, index) => html`<${LogEntry} key=${turn.id} agent=${agent} turn=${turn} isHead=${index === 0} go=${go} />`)}
    ${next && html`<${Button} onClick=${() => load(next).catch(sayFault)}>Older turns<//>`}
    ${turns.length > 0 && !next && html`<${Button} kind="quiet" onClick=${() => act.rewind(agent.id, null)}>Rewind to the beginning<//>`}
  </div>`;
}

function Timeline({ agent }) {
  const [turns, setTurns] = useState([]);
  useEffect(() => void get(`v1/agents/${agent.id}/timeline?limit=${TIMELINE}`).then((page) => setTurns(page.data.reverse()), sayFault), [agent.head]);
  if (!turns.length) return null;
  const most = Math.max(...turns.map((turn) => turn.prompt_tokens));
  const missed = turns.filter((turn) => turn.miss).reverse();
  return html`<div class="timeline">
    <h3>What each turn reused</h3>
    <ol aria-label="Tokens reused and computed in each turn, oldest first">${turns.map((turn) => html`<${Column} key=${turn.turn_id} turn=${turn} most=${most} />`)}</ol>
    <div class="key"><span><i class="dot hot" />reused</span><span><i class="dot computed" />computed</span>${missed.length > 0 && html`<span><i class="dot missed" />cache miss</span>`}</div>
    ${missed.map((turn) => html`<p class="miss" key=${turn.turn_id} title=${turn.miss.changed_tools.join(", ")}><time>${ago(turn.created_at)}</time> ${turn.miss.text}</p>`)}
  </div>`;
}

function Column({ turn, most }) {
  const reused = turn.prompt_tokens - turn.reuse.computed;
  const said = `${number(reused)} reused, ${number(turn.reuse.computed)} computed${turn.miss ? `: ${turn.miss.text}` : ""}`;
  const height = (count) => ({ height: `${(100 * count) / most}%` });
  return html`<li class=${turn.miss ? "missed" : ""} title=${`${ago(turn.created_at)}: ${said}`}>
    <span class="hidden">${said}</span><i class="computed" style=${height(turn.reuse.computed)} /><i class="hot" style=${height(reused)} />
  </li>`;
}

function LogEntry({ agent, turn, isHead, go }) {
  const asked = turn.messages.filter((message) => !["assistant", "system"].includes(message.role)).map(textOf).join(" ");
  const reply = turn.messages.filter((message) => message.role === "assistant").map(textOf).join(" ");
  return html`<article class=${isHead ? "turn head" : "turn"}>
    <header>
      <time title=${new Date(turn.created_at * 1000).toLocaleString()}>${ago(turn.created_at)}</time>
      <span class="note">${number(turn.new_tokens)} new tokens${turn.agent_id !== agent.id ? `, by ${turn.agent_id}` : ""}</span>
      <span class="go">
        ${!isHead && html`<${Button} kind="quiet" title="Rewind to this turn" onClick=${() => act.rewind(agent.id, turn.id)}>Rewind<//>`}
        <${Button} kind="quiet" title="Fork from this turn" onClick=${() => act.askFork(agent.id, turn.id, (made) => go("agents", made))}>Fork<//>
      </span>
    </header>
    <p class="asked">${asked.slice(0, 240)}</p>
    <p class="said">${reply.slice(0, 240)}</p>
    <${ReuseBar} reuse=${turn.reuse} />
    ${branchesAt([...known.agents.values()], agent, turn.id).slice(0, 3).map((other) => html`<${Button} key=${other.id} kind="quiet branch" icon="fork" title=${`Compare with ${other.id}, which branches off here`} onClick=${() => go("compare", agent.id, other.id)}>Compare with ${other.id}<//>`)}
    ${turn.miss && html`<p class="miss">${turn.miss.text}</p>`}
  </article>`;
}
