// Chat: the list of agents, one conversation with its header and composer, and the new chat.
import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/preact-htm.js";
import { get, known, refreshAgent, sayFault, useTopics } from "./server.js";
import { Button, Menu, Rows, STARTER, STARTER_NOTE, ago, number, textOf } from "./parts.js";
import { drafts, dropReply, replyOf, sendMessage, stopReply } from "./replies.js";
import { Announcer, Live, Turn, plainOf, toolsOf } from "./turns.js";
import { Composer } from "./composer.js";
import { attached, picturesOf, wordsOf } from "./pictures.js";
import * as act from "./actions.js";

const PAGE = 30;
const NEW = ""; // the chat whose agent is made by its first message
const optionsOf = new Map(); // options of replies by agent
const draft = { system: "" }; // system prompt of the new chat

export function Chat({ id, go }) {
  useTopics("agents", "replies");
  const [text, setText] = useState("");
  const [isListOpen, setListOpen] = useState(false); // on a narrow screen
  const stepped = useRef(); // the agent that j or k chose: its composer leaves the next key to the page
  const agents = [...known.agents.values()]
    .filter((agent) => agent.id.toLowerCase().includes(text.toLowerCase()))
    .sort((a, b) => b.last_used - a.last_used);
  useEffect(() => {
    setListOpen(false);
    stepped.current = null; // a click takes the focus again
  }, [id]);
  useLayoutEffect(() => {
    const press = (event) => {
      if (event.target.closest("input,textarea,select,dialog") || event.metaKey || event.ctrlKey || event.altKey) return;
      const step = { j: 1, k: -1 }[event.key];
      const next = agents[agents.findIndex((agent) => agent.id === id) + step];
      if (step && next) go("chat", (stepped.current = next.id));
      else if (event.key === "n") go("chat");
      else if (event.key === "i") document.querySelector(".composer textarea")?.focus();
      else return;
      event.preventDefault();
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  });
  const draw = (agent) => html`<a key=${agent.id} class=${`person ${agent.id === id ? "chosen" : ""}`} aria-current=${agent.id === id ? "true" : null} href=${`#/chat/${agent.id}`}>
    <span class="name" title=${agent.id}>${agent.id}</span>${agent.busy || replyOf(agent.id)?.isOpen ? html`<i class="dot busy" title="writing a reply" />` : html`<span class="num">${ago(agent.last_used)}</span>`}
  </a>`;
  const onList = () => setListOpen(!isListOpen);
  return html`<section class=${`chat ${isListOpen ? "list-open" : ""}`}>
    <nav class="people" aria-label="Conversations">
      <header class="tools">
        <${Button} icon="plus" kind="main" isLocal title="New chat (n)" onClick=${() => (setListOpen(false), go("chat"))}>New chat<//>
        <${Button} icon="close" kind="quiet narrow" isLocal title="Close the list" onClick=${onList} />
        <input id="search" type="search" placeholder="Find  ( / )" aria-label="Find a conversation" value=${text} onInput=${(event) => setText(event.target.value)} />
      </header>
      <${Rows} rows=${agents} height=${34} draw=${draw} label="Conversations" />
    </nav>
    ${id ? html`<${Conversation} key=${id} id=${id} isStepped=${id === stepped.current} go=${go} onList=${onList} />` : html`<${NewChat} go=${go} onList=${onList} />`}
  </section>`;
}

// -- the header ------------------------------------------------------------------------------------

function Header({ name, model, system, onSystem, onList, go, note, children }) {
  return html`<header class="chat-head">
    <div class="line">
      <${Button} icon="list" kind="quiet narrow" isLocal title="Conversations" onClick=${onList} />
      <h1 title=${name}>${name}</h1>
      <span class="gap" />
      ${children}
    </div>
    <div class="line">
      <${ModelPicker} model=${model} go=${go} />
      <${Button} kind="quiet pick" title=${system ? `System prompt: ${system}` : "Tell the model who it is and what to do in all of this chat"} onClick=${onSystem}>
        ${system ? html`<b>System</b> ${system.slice(0, 120)}` : "Add a system prompt"}
      <//>
      <span class="gap" /><span class="note">${note}</span>
    </div>
  </header>`;
}

const MORE = "\n"; // no model has this name

function ModelPicker({ model, go }) {
  useTopics("models", "link");
  const served = known.health?.model ?? "";
  const shown = model ?? served;
  const names = [...new Set([shown, ...known.models.map(({ id }) => id)])].filter(Boolean);
  const choose = (event) => {
    const name = event.target.value;
    event.target.value = shown;
    if (name === MORE) go("models");
    else if (name !== served) act.serveModel(name);
  };
  return html`<select class="pick" aria-label="Model" title="The model that replies" disabled=${known.link === "down"} value=${shown} onChange=${choose}>
    ${names.map((name) => html`<option key=${name} value=${name}>${name}${name === served && known.health.state !== "ready" ? ` (${known.health.state})` : ""}</option>`)}
    <option value=${MORE}>More models…</option>
  </select>`;
}

// -- a conversation --------------------------------------------------------------------------------

/** The turns up to the one with this id; none of them if it is null. */
const upTo = (turns, last) => turns.slice(0, turns.findIndex(({ id }) => id === last) + 1);

/** An agent's turns, oldest first, and a function that loads older ones. */
function useTurns(id, head) {
  const [turns, setTurns] = useState(null);
  const [next, setNext] = useState(null);
  const load = async (before) => {
    const page = await get(`v1/agents/${id}/turns?limit=${PAGE}${before ? `&before=${before}` : ""}`);
    const found = page.data.reverse();
    setTurns((shown) => (before ? [...found, ...(shown ?? [])] : found));
    setNext(page.next);
  };
  useEffect(() => {
    if (turns && turns.at(-1)?.id === head) return;
    load().catch((error) => (error.status === 404 ? setTurns([]) : sayFault(error)));
  }, [id, head]);
  return { turns, next, load, add: (turn) => setTurns((shown) => [...upTo(shown, turn.parent), turn]) };
}

/** The reply of an agent that is being written, until its turn is among the turns. */
function useReply(id, turns, add) {
  const reply = replyOf(id);
  const turn = reply?.turn;
  useLayoutEffect(() => {
    const isShown = turns?.some((shown) => shown.id === reply?.turnId);
    if (turn && turns && !isShown) add(turn);
    if (reply && !reply.isOpen && (turn || isShown)) dropReply(id);
  }, [turn, turns, reply?.isOpen]);
  return reply;
}

function Conversation({ id, isStepped, go, onList }) {
  const agent = known.agents.get(id);
  const { turns, next, load, add } = useTurns(id, agent?.head);
  const reply = useReply(id, turns, add);
  const [options, setOptions] = useState(optionsOf.get(id) ?? {});
  const [edited, setEdited] = useState(null); // the turn whose message is in the composer
  const end = useRef();
  const isNear = useRef(true);
  useEffect(() => void (agent || refreshAgent(id)), [id]);
  useLayoutEffect(() => {
    if (isNear.current) end.current?.scrollIntoView({ block: "end" });
  });
  const lastTop = useRef(0);
  const look = ({ target }) => {
    const isAtEnd = target.scrollHeight - target.scrollTop - target.clientHeight < 80;
    // Only the user scrolls up; a text that grows leaves the position as it is.
    isNear.current = isAtEnd || (isNear.current && target.scrollTop >= lastTop.current);
    lastTop.current = target.scrollTop;
  };

  const head = turns ? turns.at(-1)?.id : agent?.head;
  const submit = (message, { parent = head ?? null, begun, pictures } = {}) => {
    isNear.current = true;
    return sendMessage(id, message, { parent, begun, options, pictures });
  };
  const continueReply = async (turn) => {
    const { asked, reply: begun } = plainOf(id, turn);
    const { parent } = turn;
    if (await act.rewind(id, parent, { isQuiet: true })) await submit(wordsOf(asked), { parent, begun: textOf(begun), pictures: picturesOf(asked) });
  };
  const regenerate = async (turn) => {
    // The earlier reply becomes a branch of its own.
    const { parent } = turn;
    const { asked } = plainOf(id, turn);
    if ((await act.fork(id)) && (await act.rewind(id, parent, { isQuiet: true }))) await submit(wordsOf(asked), { parent, pictures: picturesOf(asked) });
  };
  const edit = (turn) => {
    attached.set(id, picturesOf(plainOf(id, turn).asked));
    setEdited(turn);
  };
  const send = async (message, pictures) => {
    const turn = edited;
    setEdited(null);
    if (!turn) await submit(message, { pictures });
    else if (await act.rewind(id, turn.parent)) await submit(message, { parent: turn.parent, pictures });
  };
  const giveUp = () => {
    drafts.set(id, reply.asked);
    attached.set(id, reply.pictures);
    dropReply(id);
  };

  const system = agent?.settings.system ?? textOf(turns?.[0]?.messages.find(({ role }) => role === "system") ?? { content: [] });
  const context = known.models.find((model) => model.id === known.health?.model)?.max_context;
  const shown = reply && !reply.fault ? upTo(turns ?? [], reply.parent) : turns; // a reply may replace turns
  const tools = toolsOf(shown ?? []);
  const isBusy = reply?.isOpen ?? false;
  return html`<div class="conversation">
    <${Header} name=${id} model=${agent?.settings.model} system=${system} onSystem=${() => act.askSystem(id, system, turns?.length > 0)} onList=${onList} go=${go} note=${agent ? `${number(agent.tokens)}${context ? ` of ${number(context)}` : ""} tokens` : ""}>
      <${Menu} label="More about this agent">
        <${Button} kind="quiet" isLocal onClick=${() => go("agents", id)}>Show it in the graph<//>
        <${Button} kind="quiet" onClick=${() => act.askCompact(id, (made) => go("chat", made))}>Continue from a summary<//>
        <${Button} kind="quiet" onClick=${() => act.pin(id, !agent?.settings.pin)}>${agent?.settings.pin ? "Unpin" : "Pin: keep its KV cache on disk"}<//>
        <${Button} kind="quiet" onClick=${() => act.exportFile(id)}>Export to a file<//>
        <${Button} kind="quiet danger" onClick=${() => act.askRemove(id)}>Delete<//>
      <//>
    <//>
    <div class="talk" tabindex="0" role="region" aria-label=${`Conversation with ${id}`} onScroll=${look}>
      ${next && html`<${Button} kind="quiet" onClick=${() => load(next).catch(sayFault)}>Older turns<//>`}
      ${shown?.map((turn, index) => html`<${Turn} key=${turn.id} id=${id} turn=${turn} tools=${tools} isHead=${index === shown.length - 1 && !reply} on=${isBusy ? null : { continueReply, regenerate, edit }} go=${go} />`)}
      ${reply && !reply.turn && html`<${Live} reply=${reply} onRetry=${() => submit(reply.asked, { begun: reply.begun, pictures: reply.pictures })} onClose=${giveUp} />`}
      ${turns && !turns.length && !reply && html`<div class="empty"><p>Send a message to <b>${id}</b>.</p><${StarterNote} /></div>`}
      <div ref=${end} />
    </div>
    <${Announcer} reply=${reply} />
    <${Composer}
      id=${id} isQuiet=${isStepped} isBusy=${isBusy} edited=${edited && wordsOf(plainOf(id, edited).asked)} options=${options}
      onSend=${send} onStop=${() => stopReply(id)} onLeave=${() => setEdited(null)}
      onEditLast=${() => turns?.length && plainOf(id, turns.at(-1)) && edit(turns.at(-1))}
      onOptions=${(value) => (optionsOf.set(id, value), setOptions(value))}
    />
  </div>`;
}

const StarterNote = () => known.health?.model === STARTER && html`<p class="note">${STARTER_NOTE}</p>`;

// -- the new chat ----------------------------------------------------------------------------------

const IDEAS = ["Explain recursion to a ten-year-old, with an example in Python.", "Write a short, friendly reply that declines a meeting.", "Compare SQLite and PostgreSQL in a table."];

/** A name for the agent of a chat that begins with this message. */
function nameFor(message) {
  const words = message.normalize("NFKD").replace(/\p{Mark}/gu, "").toLowerCase().match(/[a-z0-9]+/g) ?? ["chat"];
  return act.freeName(words.slice(0, 5).join("-").slice(0, 40));
}

function NewChat({ go, onList }) {
  useTopics("models");
  const [system, setSystem] = useState(draft.system);
  const [options, setOptions] = useState(optionsOf.get(NEW) ?? {});
  const [isMaking, setMaking] = useState(false);
  const keepSystem = (text) => setSystem((draft.system = text));
  const keepOptions = (value) => (optionsOf.set(NEW, value), setOptions(value));
  const begin = async (message, pictures = []) => {
    setMaking(true);
    const agent = await act.makeAgent({ id: nameFor(message), ...(system && { system }) });
    setMaking(false);
    if (!agent) return void (attached.set(NEW, pictures), drafts.set(NEW, message));
    optionsOf.set(agent.id, options);
    keepSystem("");
    sendMessage(agent.id, message, { options, pictures });
    go("chat", agent.id);
  };
  const { health } = known;
  return html`<div class="conversation">
    <${Header} name="New chat" system=${system} onSystem=${() => act.askSystem(null, system, false, keepSystem)} onList=${onList} go=${go} />
    <div class="talk">
      <div class="welcome">
        <img src="page/icon.svg" alt="" width="44" height="44" />
        <h2>${health?.model ? `Chat with ${health.model}` : "Chat"}</h2>
        ${health && health.state !== "ready" && html`<p class="note" role="status">The model is not ready: ${health.detail || health.state}. <a href="#/models">Models</a> shows its progress.</p>`}
        <p>Write a message below to start. Every chat is kept as an <b>agent</b>: return to it at any time, edit a message, or fork the chat at any reply and take both ways. What was computed once is not computed again.</p>
        <div class="ideas">${IDEAS.map((idea) => html`<${Button} key=${idea} disabled=${isMaking} onClick=${() => begin(idea)}>${idea}<//>`)}</div>
        <p class="note">To use this model in your editor or terminal, <a href="#/connect">connect a client</a>.</p>
        <${StarterNote} />
      </div>
    </div>
    <${Composer} id=${NEW} isBusy=${isMaking} options=${options} onSend=${begin} onStop=${() => {}} onLeave=${() => {}} onOptions=${keepOptions} />
  </div>`;
}
