// Compare: two branches side by side, from the turn at which they part.
import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/preact-htm.js";
import { get, known, sayFault, useTopics } from "./server.js";
import { Button, Dialog, Tier, number, seconds, textOf } from "./parts.js";
import { Said, toolsOf } from "./turns.js";
import { difference, mark } from "./words.js";
import * as act from "./actions.js";

const SIDES = ["first", "second"];
const plural = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
const secondsOf = ({ timing }) => (timing ? timing.first_token_s + timing.decode_s : 0);
const total = (turns, read) => turns.reduce((sum, turn) => sum + (read(turn) ?? 0), 0);

/** Turns that two agents share, as far as the page knows their histories. */
function shared(agent, other) {
  const own = new Set(agent.history);
  const at = other.history.findIndex((turn) => own.has(turn));
  return at < 0 ? 0 : other.turns - at;
}

/** The other agents, those that share the longest beginning first. */
function partnersOf(id) {
  const agent = known.agents.get(id);
  if (!agent) return [];
  return [...known.agents.values()]
    .filter((other) => other.id !== id)
    .map((other) => ({ id: other.id, common: shared(agent, other), isSame: other.head === agent.head, used: other.last_used }))
    .sort((a, b) => a.isSame - b.isSame || b.common - a.common || b.used - a.used);
}

/** The pair to show when fewer are chosen: the agent, or else the latest one, that has a branch. */
function suggested(id) {
  const latest = [...known.agents.values()].sort((a, b) => b.last_used - a.last_used);
  for (const first of id ? [id] : latest.map((agent) => agent.id)) {
    const [partner] = partnersOf(first);
    if (partner?.common && (id || !partner.isSame)) return [first, partner.id];
  }
  return [id, null];
}

export function Compare({ id, other, go }) {
  useTopics("agents");
  const pair = other ? [id, other] : suggested(id);
  const [found, setFound] = useState(null);
  const stage = useRef();
  const agents = pair.map((name) => known.agents.get(name));
  const isWhole = pair.every(Boolean);
  const choose = (side, name) => go("compare", ...(side ? [pair[0], name] : [name, pair[1] === name ? null : pair[1]]));
  const swap = () => isWhole && go("compare", pair[1], pair[0]);

  useEffect(() => {
    if (isWhole && !other) location.replace(["#/compare", ...pair.map(encodeURIComponent)].join("/"));
  }, pair);
  useEffect(() => {
    if (!isWhole) return setFound(null);
    let isOver = false;
    const path = `v1/agents/${encodeURIComponent(pair[0])}/compare?with=${encodeURIComponent(pair[1])}`;
    get(path).then((told) => isOver || setFound(told), (error) => isOver || (setFound(null), sayFault(error)));
    return () => void (isOver = true);
  }, [...pair, ...agents.map((agent) => agent?.head)]);

  useLayoutEffect(() => {
    const press = (event) => {
      if (event.target.closest("input,textarea,select,dialog") || event.metaKey || event.ctrlKey || event.altKey) return;
      const step = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1 }[event.key];
      if (step) {
        const stops = [...stage.current.querySelectorAll(".pair")];
        stops[Math.min(stops.length - 1, Math.max(0, stops.indexOf(document.activeElement) + step))]?.focus();
        event.preventDefault();
      } else if (event.key === "x") swap();
      else if (event.key === "Escape") go("agents", pair[0]);
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, pair);

  return html`<section class="compare">
    <header class="tools">
      <h1>Compare</h1>
      <${Picker} side="first" value=${pair[0]} onChange=${(name) => choose(0, name)} />
      <${Button} icon="swap" kind="quiet" title="Swap sides (x)" disabled=${!isWhole} onClick=${swap} />
      <${Picker} side="second" value=${pair[1]} of=${pair[0]} onChange=${(name) => choose(1, name)} />
    </header>
    <div class="stage" ref=${stage}>
      ${!isWhole && html`<${Nothing} id=${pair[0]} go=${go} />`}
      ${isWhole && found && html`<${Branches} found=${found} agents=${agents} go=${go} />`}
    </div>
  </section>`;
}

const Picker = ({ side, value, of, onChange }) => {
  const partners = of ? partnersOf(of) : [...known.agents.values()].sort((a, b) => b.last_used - a.last_used).map((agent) => ({ id: agent.id }));
  const groups = [["Branches of the same conversation", (one) => one.common], ["Other agents", (one) => !one.common]];
  const option = (one) => html`<option key=${one.id} value=${one.id} selected=${one.id === value}>${one.id}</option>`;
  return html`<select class=${`picker ${side}`} aria-label=${`The ${side} branch`} onChange=${(event) => onChange(event.target.value)}>
    ${!value && html`<option value="" selected disabled>Choose an agent</option>`}
    ${of ? groups.map(([label, has]) => partners.some(has) && html`<optgroup label=${label}>${partners.filter(has).map(option)}</optgroup>`) : partners.map(option)}
  </select>`;
};

function Nothing({ id, go }) {
  const agent = known.agents.get(id) ?? [...known.agents.values()].find((one) => one.turns);
  return html`<div class="empty">
    <p>See two branches of a conversation side by side, with the words that differ marked.</p>
    <p class="note">A branch starts with <b>Fork</b> or <b>Regenerate</b>. The turns before it are stored and computed once for both.</p>
    ${agent && html`<${Button} kind="main" icon="fork" onClick=${() => act.askFork(agent.id, null, (made) => go("chat", made))}>Fork ${agent.id}<//>`}
  </div>`;
}

// -- the branches ------------------------------------------------------------------------------

function Branches({ found, agents, go }) {
  const length = Math.max(found.first.length, found.second.length);
  const more = Math.max(found.first_turns - found.first.length, found.second_turns - found.second.length);
  return html`
    <${Trunk} found=${found} />
    <svg class="parting" viewBox="0 0 100 40" preserveAspectRatio="none" aria-hidden="true">
      <path class="first" d="M50 0C50 26 25 12 25 40" /><path class="second" d="M50 0C50 26 75 12 75 40" />
    </svg>
    <div class="branches">${SIDES.map((side, index) => html`<${Head} key=${side} side=${side} turns=${found[side]} count=${found[`${side}_turns`]} id=${found[`${side}_agent`]} other=${found[`${SIDES[1 - index]}_agent`]} agent=${agents[index]} go=${go} />`)}</div>
    <${SystemPrompts} agents=${agents} />
    ${!length && html`<p class="note alike">Both branches are the same so far. Send a message to one of them.</p>`}
    ${Array.from({ length }, (_, index) => html`<${Pair} key=${index} number=${found.common_turns + index + 1} names=${agents.map((agent) => agent?.id)} turns=${SIDES.map((side) => found[side][index])} />`)}
    ${more > 0 && html`<p class="note alike">${plural(more, "later turn")} not shown. Open a branch in the chat to see all of it.</p>`}
  `;
}

/** The common beginning, folded. */
function Trunk({ found }) {
  const [turns, setTurns] = useState(null);
  const { common_turns: count, common_tokens: tokens, fork } = found;
  useEffect(() => setTurns(null), [fork]);
  if (!count) return html`<p class="trunk none">No turns in common: two conversations of their own</p>`;
  const open = (event) => {
    if (!event.target.open || turns) return;
    const next = found.first[0]?.id;
    const path = `v1/agents/${encodeURIComponent(found.first_agent)}/turns?limit=100${next ? `&before=${next}` : ""}`;
    get(path).then((page) => setTurns(page.data.reverse()), sayFault);
  };
  return html`<details class="trunk" onToggle=${open}>
    <summary><span class="beads" aria-hidden="true">${Array.from({ length: Math.min(count, 12) }, () => html`<i />`)}</span><span><b>${plural(count, "turn")} in common</b>, ${number(tokens)} tokens computed once</span></summary>
    ${turns?.map((turn) => html`<div class="past" key=${turn.id}>${turn.messages.filter((message) => message.role !== "system" && textOf(message)).map((message) => html`<p class=${message.role}>${textOf(message)}</p>`)}</div>`)}
    ${turns && turns.length < count && html`<p class="note">${plural(count - turns.length, "earlier turn")} not shown.</p>`}
  </details>`;
}

function Head({ side, id, other, agent, turns, count, go }) {
  const spent = total(turns, secondsOf);
  const facts = [
    plural(count, "turn"),
    `${number(total(turns, (turn) => turn.usage.completion_tokens))} tokens written`,
    spent > 0 && seconds(spent),
  ];
  const prompt = total(turns, (turn) => turn.usage.prompt_tokens);
  const computed = total(turns, (turn) => turn.reuse.computed);
  return html`<header class=${`branch-head ${side}`}>
    <div><h2 title=${id}>${id}</h2>${agent?.settings.pin && html`<i class="pinned" title="pinned" />`}${agent && html`<${Tier} tier=${agent.state.tier} />`}</div>
    <p class="note">${facts.filter(Boolean).join(" · ")}</p>
    ${prompt > 0 && html`<p class="note">computed ${number(computed)} of ${number(prompt)} prompt tokens; the rest was reused</p>`}
    <div class="go">
      <${Button} kind="main" onClick=${() => act.open(html`<${KeepDialog} id=${id} other=${other} go=${go} />`)} title=${`Keep this one: pin ${id} and continue it`}>Keep this one<//>
      <${Button} onClick=${() => go("chat", id)} title=${`Open ${id} in the chat`}>Open in chat<//>
    </div>
  </header>`;
}

function KeepDialog({ id, other, go }) {
  const close = () => act.open(null);
  const done = async ({ remove }) => {
    close();
    await act.pin(id, true);
    if (remove) act.remove(other);
    go("chat", id);
  };
  return html`<${Dialog} title=${`Keep ${id}`} action="Keep" onDone=${done} onClose=${close}>
    <p class="note">${id} is pinned: it never expires, and its cache stays on disk. You continue with it in the chat.</p>
    <label class="check"><input type="checkbox" name="remove" /> Delete ${other}; you have a few seconds to undo this</label>
  <//>`;
}

// -- one pair of turns -------------------------------------------------------------------------

function SystemPrompts({ agents }) {
  const prompts = agents.map((agent) => agent?.settings.system ?? "");
  if (prompts[0] === prompts[1]) return null;
  const draw = (text) => html`<div class="said prompt"><p>${text || "none"}</p></div>`;
  return html`<${Texts} label="System prompt" names=${agents.map((agent) => agent?.id)} sides=${prompts.map(draw)} stamp=${prompts.join("\0")} />`;
}

function Pair({ number: place, names, turns }) {
  const draw = (turn) => turn.messages.map((message) => html`<${Said} message=${message} tools=${toolsOf([turn])} />`);
  return html`<${Texts} label=${`Turn ${place}`} names=${names} sides=${turns.map((turn) => turn && draw(turn))} stamp=${turns.map((turn) => turn?.id).join()} turns=${turns} />`;
}

/** Two columns of text, with the words that differ marked again when `stamp` changes. */
function Texts({ label, names, sides, stamp, turns = [] }) {
  const columns = [useRef(), useRef()];
  const [found, setFound] = useState(null);
  const isPair = sides.every(Boolean);
  useEffect(() => {
    if (!isPair) return setFound(null);
    const told = difference(columns[0].current, columns[1].current);
    setFound(told);
    return mark(told);
  }, [stamp]);
  return html`<article class="pair" tabindex="-1" aria-label=${`${label}: ${found ? likeness(found) : "in one branch only"}`}>
    <header><b>${label}</b><span class="note">${found ? likeness(found) : !isPair ? "in one branch only" : ""}</span></header>
    ${SIDES.map((side, index) => html`<div key=${side} class=${`cell ${side} ${sides[index] ? "" : "none"}`}>
      <span class="who">${names[index]}</span>
      ${sides[index] ? html`<div class="texts" ref=${columns[index]}>${sides[index]}</div>` : html`<p class="note">This branch ends before this turn.</p>`}
      ${turns[index] && html`<${Cost} turn=${turns[index]} />`}
      ${found?.[side].length > 0 && html`<p class="hidden">Only here: ${found[side].map(String).join("; ")}</p>`}
    </div>`)}
  </article>`;
}

function likeness({ isSame, isOther, alike }) {
  if (isSame) return "the same in both";
  return isOther ? "different throughout" : `${Math.round(alike * 100)} % of the words are the same`;
}

function Cost({ turn }) {
  const { usage, reuse, finish_reason: reason } = turn;
  const facts = [
    `${plural(usage.completion_tokens, "token")} written`,
    `${number(usage.prompt_tokens - reuse.computed)} of ${number(usage.prompt_tokens)} prompt tokens reused`,
    secondsOf(turn) > 0 && seconds(secondsOf(turn)),
    reason === "cancelled" && "stopped",
  ];
  return html`<footer class="note">${facts.filter(Boolean).join(" · ")}</footer>`;
}
