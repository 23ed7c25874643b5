// Chat with any agent; below each reply, the sources of its prompt's KV cache.
import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";
import { ask, framesOf, get, known, refreshAgent, sayFault, useTopics } from "./server.js";
import { Bar, Button, Copy, Field, Prose, ReuseBar, Rows, STARTER, STARTER_NOTE, Tier, ago, number, seconds, textOf, thinkingOf } from "./parts.js";
import * as act from "./actions.js";

const PAGE = 30;
const drafts = new Map(); // unsent text by agent

export function Chat({ id, go }) {
  useTopics("agents");
  const [text, setText] = useState("");
  const agents = [...known.agents.values()]
    .filter((agent) => agent.id.toLowerCase().includes(text.toLowerCase()))
    .sort((a, b) => b.last_used - a.last_used);
  const draw = (agent) => html`<a key=${agent.id} class=${`person ${agent.id === id ? "chosen" : ""}`} href=${`#/chat/${agent.id}`}>
    <i class=${`dot tier-${agent.state.tier} ${agent.busy ? "busy" : ""}`} title=${agent.state.tier} /><span class="name">${agent.id}</span><span class="num">${ago(agent.last_used)}</span>
  </a>`;
  return html`<section class=${`chat ${id ? "has-one" : ""}`}>
    <nav class="people">
      <header class="tools">
        <input id="search" type="search" placeholder="Find  ( / )" aria-label="Find an agent" value=${text} onInput=${(event) => setText(event.target.value)} />
        <${Button} icon="plus" kind="main" title="New agent" onClick=${() => act.askNew((made) => go("chat", made))} />
      </header>
      <${Rows} rows=${agents} height=${34} draw=${draw} label="Agents" />
    </nav>
    ${id ? html`<${Conversation} key=${id} id=${id} go=${go} />` : html`<div class="empty"><p>Choose an agent, or create one.</p></div>`}
  </section>`;
}

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
  return { turns, next, load, add: (turn) => setTurns((shown) => [...(shown ?? []), turn]) };
}

function Conversation({ id, go }) {
  const agent = known.agents.get(id);
  const { turns, next, load, add } = useTurns(id, agent?.head);
  const [live, setLive] = useState(null);
  const [options, setOptions] = useState({});
  const running = useRef(null);
  const end = useRef();
  const isNear = useRef(true);
  useEffect(() => () => running.current?.abort(), []);
  useEffect(() => void (agent || refreshAgent(id)), [id]);
  useEffect(() => {
    if (isNear.current) end.current?.scrollIntoView({ block: "end" });
  }, [turns, live]);

  /** Send a message; `begun` is the reply so far, which the model continues. */
  const submit = async (message, begun = "") => {
    const stop = (running.current = new AbortController());
    isNear.current = true;
    const parent = known.agents.get(id)?.head ?? null;
    const reply = { parent, asked: message, text: begun, thinking: "", calls: [], sentAt: performance.now() };
    const show = (more) => setLive({ ...Object.assign(reply, more) });
    show({});
    const messages = [said("user", message), ...(begun ? [said("assistant", begun)] : [])];
    try {
      await stream(id, { messages, ...options }, stop.signal, reply, show);
      if (reply.finished?.turn_id) add(turnOf(id, message, reply));
      setLive(null);
    } catch (error) {
      const isStopped = error.name === "AbortError";
      const isKept = isStopped && reply.firstAt; // until its turn is shown
      setLive(isStopped && !isKept ? null : { ...reply, isStopped, fault: isStopped ? "" : error.message });
      if (isStopped && !isKept && !begun && !drafts.get(id)) drafts.set(id, message);
    }
    running.current = null;
    refreshAgent(id);
  };

  const [edited, setEdited] = useState(null); // the turn whose message is in the composer
  const continueReply = async (turn) => {
    const [asked, reply] = turn.messages;
    if (await act.rewind(id, turn.parent, { isQuiet: true })) await submit(textOf(asked), textOf(reply));
  };
  const regenerate = async (turn) => {
    // The earlier reply becomes a branch of its own.
    if ((await act.fork(id)) && (await act.rewind(id, turn.parent, { isQuiet: true }))) await submit(textOf(turn.messages[0]));
  };
  const sendMessage = async (message) => {
    const turn = edited;
    setEdited(null);
    if (!turn || (await act.rewind(id, turn.parent))) await submit(message);
  };
  useEffect(() => {
    if (live?.isStopped) setLive(null);
  }, [turns]);

  return html`<div class="conversation">
    <header class="tools">
      <${Button} icon="back" kind="quiet narrow" title="All agents" onClick=${() => go("chat")} />
      <h1 title=${id}>${id}</h1>
      ${agent && html`<${Tier} tier=${agent.state.tier} /><span class="note">${number(agent.tokens)} tokens</span>`}
      <span class="gap" />
      <${Options} value=${options} onChange=${setOptions} />
      <${Button} onClick=${() => act.askFork(id, null, (made) => go("chat", made))}>Fork<//>
      <${Button} kind="quiet" onClick=${() => go("agents", id)}>Details<//>
    </header>
    <div class="talk" onScroll=${(event) => (isNear.current = event.target.scrollHeight - event.target.scrollTop - event.target.clientHeight < 80)}>
      ${next && html`<${Button} kind="quiet" onClick=${() => load(next).catch(sayFault)}>Older turns<//>`}
      ${agent?.settings.system && html`<details class="system"><summary>System prompt</summary><pre>${agent.settings.system}</pre></details>`}
      ${turns?.map((turn, index) => html`<${Turn} key=${turn.id} id=${id} turn=${turn} isHead=${index === turns.length - 1} on=${running.current ? null : { continueReply, regenerate, edit: setEdited }} go=${go} />`)}
      ${live && html`<${Live} reply=${live} onRetry=${() => submit(live.asked)} />`}
      ${turns && !turns.length && !live && html`<div class="empty"><p>Send a message to <b>${id}</b>.</p>${known.health?.model === STARTER && html`<p class="note">${STARTER_NOTE}</p>`}</div>`}
      <div ref=${end} />
    </div>
    <${Composer} id=${id} isBusy=${running.current !== null} edited=${edited} onSend=${sendMessage} onStop=${() => running.current?.abort()} onLeave=${() => setEdited(null)} />
  </div>`;
}

/** Show a reply while it is streamed. */
async function stream(id, body, signal, reply, show) {
  const answer = await ask(`v1/agents/${encodeURIComponent(id)}/generate`, { method: "POST", json: { ...body, stream: true }, signal });
  for await (const event of framesOf(answer)) {
    const now = performance.now();
    if (event.type === "started") show({ prompt: event.usage.prompt_tokens });
    else if (event.type === "prefill") show({ prefill: event });
    else if (event.type === "text") show({ firstAt: reply.firstAt ?? now, text: reply.text + event.text });
    else if (event.type === "thinking") show({ firstAt: reply.firstAt ?? now, thinking: reply.thinking + event.text });
    else if (event.type === "tool_call") show({ firstAt: reply.firstAt ?? now, calls: [...reply.calls, event.name] });
    else if (event.type === "error") throw new Error(event.error.message);
    else if (event.type === "finished") show({ finished: event, endAt: now });
  }
  if (!reply.finished) throw new Error("The connection to the server was lost during the reply.");
}

const said = (role, text) => ({ role, content: [{ type: "text", text }] });

/** Whether a turn is one message of the user and its reply: then it can be sent again. */
const isPlain = ({ messages: [asked, reply, ...more] }) => asked?.role === "user" && reply?.role === "assistant" && !more.length;
/** Whether its reply is text alone that was stopped or reached its limit. */
const isUnfinished = ({ finish_reason: reason, messages }) =>
  (reason === "cancelled" || reason === "max_tokens") && messages[1].content.every((part) => part.type === "text");

function turnOf(id, asked, { parent, finished, firstAt, endAt, sentAt }) {
  return {
    id: finished.turn_id,
    parent,
    agent_id: id,
    created_at: Date.now() / 1000,
    messages: [said("user", asked), finished.message],
    finish_reason: finished.finish_reason,
    usage: finished.usage,
    reuse: finished.reuse,
    dropped_messages: finished.dropped_messages,
    timing: { first: (firstAt - sentAt) / 1000, rate: (finished.usage.completion_tokens - 1) / ((endAt - firstAt) / 1000) },
  };
}

const ENDINGS = { cancelled: "stopped", max_tokens: "reached its limit of tokens" };

function Turn({ id, turn, isHead, on, go }) {
  const [isOpen, setOpen] = useState(false);
  const replies = turn.messages.filter((message) => message.role === "assistant");
  const { usage, timing } = turn;
  const right = usage.accepted_prediction_tokens ?? 0;
  const drafted = right + (usage.rejected_prediction_tokens ?? 0);
  return html`<article class="exchange">
    ${turn.messages.map((message) => html`<${Said} message=${message} />`)}
    <footer class="cost">
      <${ReuseBar} reuse=${{ ...turn.reuse, drafted: right }} />
      <span class="note">${number(usage.prompt_tokens)} prompt, ${number(usage.completion_tokens)} reply${drafted ? ` (${number(right)} of ${number(drafted)} draft tokens were accepted)` : ""}${timing && timing.first >= 0 ? `, first token after ${seconds(timing.first)}` : ""}${timing && timing.rate > 0 && Number.isFinite(timing.rate) ? `, ${timing.rate.toFixed(1)} tokens/s` : ""}${turn.finish_reason && turn.finish_reason !== "end_turn" ? `, ${ENDINGS[turn.finish_reason] ?? `finish reason ${turn.finish_reason}`}` : ""}</span>
      <span class="go">
        <${Button} kind="quiet" title="Why: compare the prompt with the stored conversation" aria-expanded=${isOpen} onClick=${() => setOpen(!isOpen)}>Why<//>
        <${Copy} text=${replies.map(textOf).join("\n")} />
        ${on && isPlain(turn) && html`<${Button} kind="quiet" title="Change the message and send it again, in place of this turn and those after it" onClick=${() => on.edit(turn)}>Edit<//>`}
        ${on && isHead && isPlain(turn) && html`<${Button} kind="quiet" title="Write another reply; this one is kept as a fork" onClick=${() => on.regenerate(turn)}>Regenerate<//>`}
        ${on && isHead && isPlain(turn) && isUnfinished(turn) && html`<${Button} kind="quiet" title="Write on where this reply ends" onClick=${() => on.continueReply(turn)}>Continue<//>`}
        ${!isHead && html`<${Button} kind="quiet" title="Remove the turns after this reply" onClick=${() => act.rewind(id, turn.id)}>Rewind here<//>`}
        <${Button} kind="quiet" title="Start a fork from this reply" onClick=${() => act.askFork(id, turn.id, (made) => go("chat", made))}>Fork here<//>
      </span>
    </footer>
    ${turn.miss && html`<p class="miss">${turn.miss.text}</p>`}
    ${isOpen && html`<${Why} id=${id} turnId=${turn.id} />`}
  </article>`;
}

function Said({ message }) {
  const text = textOf(message);
  const thinking = thinkingOf(message);
  if (message.role === "system" || (!text && !thinking)) return null;
  return html`<div class=${`said ${message.role}`}>
    ${thinking && html`<details class="thinking"><summary>Thinking</summary><p>${thinking}</p></details>`}
    ${message.role === "assistant" ? html`<${Prose} text=${text} />` : html`<p>${text}</p>`}
  </div>`;
}

function Why({ id, turnId }) {
  const [told, setTold] = useState(null);
  useEffect(() => void get(`v1/agents/${encodeURIComponent(id)}/explain?turn_id=${turnId}`).then(setTold, sayFault), [turnId]);
  if (!told) return html`<div class="why">…</div>`;
  const left = told.diverged;
  return html`<div class="why">
    <p>${told.summary}</p>
    ${left
      ? html`<div class="sides">
          <p class="note">The prompt and the stored conversation differ after ${number(left.index)} tokens:</p>
          <pre class="same">…${left.before}</pre>
          <pre class="old"><b>stored</b>${left.expected || "(end)"}</pre>
          <pre class="new"><b>prompt</b>${left.actual || "(end)"}</pre>
        </div>`
      : html`<p class="note">The prompt begins with the complete stored conversation.${told.note && ` ${told.note}`}</p>`}
  </div>`;
}

function Live({ reply, onRetry }) {
  const { prefill, firstAt, text, thinking, calls, prompt, fault } = reply;
  const isWaiting = !firstAt && !fault;
  return html`<article class="exchange live" aria-live="polite">
    <div class="said user"><p>${reply.asked}</p></div>
    ${thinking && html`<details class="thinking" open=${!text}><summary>Thinking</summary><p>${thinking}</p></details>`}
    ${text && html`<div class="said assistant"><${Prose} text=${text} /></div>`}
    ${calls.map((name) => html`<code class="call">${name}(…)</code>`)}
    ${isWaiting && html`<div class="waiting">
      ${prefill ? html`<${Bar} parts=${[["computed", prefill.done]]} whole=${prefill.total} label="prompt" /><span class="note">prompt ${number(prefill.done)} of ${number(prefill.total)}</span>` : html`<span class="dots" /><span class="note">${prompt ? `${number(prompt)} prompt tokens` : "waiting"}</span>`}
    </div>`}
    ${fault && html`<p class="fault">${fault} <${Button} onClick=${onRetry}>Try again<//></p>`}
  </article>`;
}

function Options({ value, onChange }) {
  const set = (name) => (event) => onChange({ ...value, [name]: event.target.value === "" ? undefined : Number(event.target.value) });
  return html`<details class="menu"><summary class="button">Options</summary><div class="sheet">
    <${Field} label="Temperature" hint="empty: the model's default"><input type="number" min="0" max="2" step="0.1" value=${value.temperature} onInput=${set("temperature")} /><//>
    <${Field} label="Maximum reply tokens"><input type="number" min="1" value=${value.max_tokens} onInput=${set("max_tokens")} /><//>
    <${Field} label="Seed"><input type="number" value=${value.seed} onInput=${set("seed")} /><//>
  </div></details>`;
}

function Composer({ id, isBusy, edited, onSend, onStop, onLeave }) {
  const [text, setText] = useState(drafts.get(id) ?? "");
  const box = useRef();
  useEffect(() => void box.current.focus({ preventScroll: true }), [id]);
  useEffect(() => {
    if (!isBusy && !text && drafts.get(id)) setText(drafts.get(id));
  }, [isBusy]);
  useEffect(() => {
    drafts.set(id, text);
    box.current.style.height = "auto";
    box.current.style.height = `${Math.min(240, box.current.scrollHeight + 2)}px`;
  }, [text]);
  useEffect(() => {
    if (!edited) return;
    setText((box.current.value = textOf(edited.messages[0])));
    box.current.focus();
    box.current.setSelectionRange(box.current.value.length, box.current.value.length);
  }, [edited]);
  const leave = () => (setText(""), onLeave());
  const go = () => {
    if (isBusy || !text.trim()) return;
    onSend(text.trim());
    setText("");
  };
  const press = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      go();
    } else if (event.key === "Escape" && isBusy) onStop();
    else if (event.key === "Escape" && edited) leave();
  };
  return html`<form class="composer" onSubmit=${(event) => (event.preventDefault(), go())}>
    ${edited && html`<p class="note">Sends in place of the earlier message. <${Button} kind="quiet" onClick=${leave}>Keep the earlier one<//></p>`}
    <textarea ref=${box} rows="1" placeholder=${`Message ${id}`} aria-label="Message" value=${text} onInput=${(event) => setText(event.target.value)} onKeyDown=${press} />
    ${isBusy ? html`<${Button} icon="stop" title="Stop (Esc)" onClick=${onStop} />` : html`<button class="main" aria-label="Send" title="Send (Enter)" disabled=${!text.trim()}>Send</button>`}
  </form>`;
}
