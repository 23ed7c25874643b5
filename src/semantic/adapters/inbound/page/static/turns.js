// The turns of a conversation: messages, thinking, tool calls, figures and what one can do with a reply.
import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";
import { get, known, sayFault } from "./server.js";
import { Bar, Button, Copy, Icon, Menu, ReuseBar, number, percent, seconds, textOf } from "./parts.js";
import { Prose } from "./markdown.js";
import { Picture, picturesOf } from "./pictures.js";
import { branchesAt } from "./graph.js";
import * as act from "./actions.js";

/** The message and the reply of a turn that can be sent again; null if it has other messages too. */
export function plainOf(id, { messages }) {
  const hasSystem = known.agents.get(id)?.settings.system; // then it is sent with every turn
  const [asked, reply, ...more] = messages.filter(({ role }) => role !== "system" || !hasSystem);
  return asked?.role === "user" && reply?.role === "assistant" && !more.length ? { asked, reply } : null;
}

/** Whether a reply is text alone that was stopped or reached its limit. */
const isUnfinished = (reason, reply) =>
  (reason === "cancelled" || reason === "max_tokens") && reply.content.every((part) => part.type === "text");

/** The results of tools by the id of their call, and the ids of the calls that are shown. */
export function toolsOf(turns) {
  const parts = turns.flatMap((turn) => turn.messages).flatMap((message) => message.content);
  return {
    calls: new Set(parts.filter((part) => part.type === "tool_use").map((part) => part.id)),
    results: new Map(parts.filter((part) => part.type === "tool_result").map((part) => [part.tool_use_id, part])),
  };
}

// -- one turn ------------------------------------------------------------------------------------

export function Turn({ id, turn, isHead, tools, on, go }) {
  const [isOpen, setOpen] = useState(false);
  const replies = turn.messages.filter((message) => message.role === "assistant");
  const plain = on && plainOf(id, turn);
  const others = known.agents.has(id) ? branchesAt([...known.agents.values()], known.agents.get(id), turn.parent) : [];
  return html`<article class=${`exchange ${isHead ? "latest" : ""}`}>
    ${turn.messages.map((message) => html`<${Said} message=${message} tools=${tools} />`)}
    <footer class="cost">
      <${Figures} turn=${turn} />
      <span class="go">
        <${Copy} text=${replies.map(textOf).join("\n")} />
        ${plain && html`<${Button} kind="quiet" title="Change the message and send it again, in place of this turn and those after it" onClick=${() => on.edit(turn)}>Edit<//>`}
        ${plain && isHead && html`<${Button} kind="quiet" title="Write another reply; this one is kept as a fork" onClick=${() => on.regenerate(turn)}>Regenerate<//>`}
        ${plain && isHead && isUnfinished(turn.finish_reason, plain.reply) && html`<${Button} kind="quiet" title="Write on where this reply ends" onClick=${() => on.continueReply(turn)}>Continue<//>`}
        <${Button} kind="quiet" title="Start a second conversation from this reply; this one stays as it is" onClick=${() => act.askFork(id, turn.id, (made) => go("chat", made))}>Fork<//>
        <${Menu} label="More">
          ${others.slice(0, 5).map((other) => html`<${Button} key=${other.id} kind="quiet" onClick=${() => go("compare", id, other.id)}>Compare with ${other.id}<//>`)}
          <${Button} kind="quiet" onClick=${() => setOpen(!isOpen)}>${isOpen ? "Hide what was reused" : "What was reused, and why"}<//>
          ${!isHead && html`<${Button} kind="quiet" onClick=${() => act.rewind(id, turn.id)}>Rewind: remove later turns<//>`}
        <//>
      </span>
    </footer>
    ${turn.miss && html`<p class="miss">${turn.miss.text}</p>`}
    ${isOpen && html`<${Why} id=${id} turn=${turn} />`}
  </article>`;
}

const ENDINGS = { cancelled: "stopped", max_tokens: "reached its limit of tokens", tool_use: "" };

function Figures({ turn }) {
  const { usage, timing, reuse, finish_reason: reason } = turn;
  const rate = timing?.decode_s > 0 ? (usage.completion_tokens - 1) / timing.decode_s : 0;
  const drafted = acceptedOf(usage) + (usage.rejected_prediction_tokens ?? 0);
  const facts = [
    `${number(usage.completion_tokens)} ${usage.completion_tokens === 1 ? "token" : "tokens"}`,
    rate > 0 && `${rate.toFixed(1)} tokens/s`,
    timing && `first after ${seconds(timing.first_token_s)}`,
    usage.prompt_tokens > 0 && `${percent(1 - reuse.computed / usage.prompt_tokens)} of the prompt reused`,
    drafted > 0 && `${number(acceptedOf(usage))} of ${number(drafted)} draft tokens accepted`,
    turn.model && turn.model !== known.health?.model && turn.model,
    reason && reason !== "end_turn" && (ENDINGS[reason] ?? `finish reason ${reason}`),
  ];
  return html`<span class="note figures-of-reply"><${ReuseBar} reuse=${{ ...reuse, drafted: acceptedOf(usage) }} hasText=${false} />${facts.filter(Boolean).join(" · ")}</span>`;
}

const acceptedOf = (usage) => usage.accepted_prediction_tokens ?? 0;

function Why({ id, turn }) {
  const [told, setTold] = useState(null);
  useEffect(() => void get(`v1/agents/${encodeURIComponent(id)}/explain?turn_id=${turn.id}`).then(setTold, sayFault), [turn.id]);
  const left = told?.diverged;
  return html`<div class="why">
    <${ReuseBar} reuse=${{ ...turn.reuse, drafted: acceptedOf(turn.usage) }} />
    <p>${told ? told.summary : "…"}</p>
    ${left &&
    html`<div class="sides">
      <p class="note">The prompt and the stored conversation differ after ${number(left.index)} tokens:</p>
      <pre class="same">…${left.before}</pre>
      <pre class="old"><b>stored</b>${left.expected || "(end)"}</pre>
      <pre class="new"><b>prompt</b>${left.actual || "(end)"}</pre>
    </div>`}
    ${told && !left && html`<p class="note">The prompt begins with the complete stored conversation.${told.note && ` ${told.note}`}</p>`}
  </div>`;
}

// -- messages ------------------------------------------------------------------------------------

const SPEAKERS = { user: "You", assistant: "Reply", tool: "Tool", system: "System" };

export function Said({ message, tools }) {
  const parts = message.content.filter((part) => part.type !== "tool_result" || !tools.calls.has(part.tool_use_id));
  if (message.role === "system" || !parts.length) return null;
  return html`<div class=${`said ${message.role}`}>
    <span class="hidden">${SPEAKERS[message.role]}:</span>
    ${parts.map((part) => html`<${Part} part=${part} role=${message.role} tools=${tools} />`)}
  </div>`;
}

function Part({ part, role, tools }) {
  switch (part.type) {
    case "text":
      return role === "assistant" ? html`<${Prose} text=${part.text} />` : html`<p>${part.text}</p>`;
    case "image":
      return html`<${Picture} source=${picturesOf({ content: [part] })[0]} size=${part.width ? `${part.width}x${part.height}` : ""} />`;
    case "thinking":
      return html`<${Thinking} text=${part.thinking} />`;
    case "tool_use":
      return html`<${ToolCard} name=${part.name} input=${JSON.stringify(part.input, null, 2)} result=${tools.results.get(part.id)} />`;
    case "incomplete_tool_use":
      return html`<${ToolCard} name=${part.name} input=${part.partial_input} state="cut off" />`;
    case "tool_result":
      return html`<${ToolCard} name="Result of a tool" result=${part} />`;
    default:
      return html`<p class="note">[${part.type}]</p>`;
  }
}

export const Thinking = ({ text, isOpen = false }) =>
  text && html`<details class="thinking" open=${isOpen}><summary>${isOpen ? "Thinking…" : "Thinking"}</summary><p>${text}</p></details>`;

/** A call of a tool, folded; its result is the tool message that names the call. */
function ToolCard({ name, input, result, state }) {
  const told = result && (result.is_error ? "failed" : "done");
  return html`<details class=${`tool ${result?.is_error ? "failed" : ""}`}>
    <summary><${Icon} name="tool" /><b>${name}</b><code>${(input ?? "").replace(/\s+/g, " ")}</code><span class="note">${state ?? told ?? "no result"}</span></summary>
    ${input !== undefined && html`<h4>Arguments</h4><pre>${input}</pre>`}
    ${result && html`<h4>Result</h4><pre>${textOf({ content: [result] })}</pre>${picturesOf(result).map((source) => html`<${Picture} key=${source} source=${source} />`)}`}
  </details>`;
}

// -- the reply that is being written -------------------------------------------------------------

export function Live({ reply, onRetry, onClose }) {
  const { asked, pictures, prefill, hasBegun, text, thinking, calls, prompt, waitsFor, fault, isStopped } = reply;
  return html`<article class="exchange live" aria-busy=${reply.isOpen}>
    <div class="said user"><span class="hidden">You:</span>${pictures.map((source) => html`<${Picture} key=${source} source=${source} />`)}<p>${asked}</p></div>
    <div class="said assistant">
      ${thinking && html`<${Thinking} text=${thinking} isOpen=${!text && !calls.length} />`}
      ${text && html`<${Prose} text=${text} />`}
      ${calls.map((call) => html`<${ToolCard} key=${call.id} name=${call.name} input=${call.written} state="…" />`)}
    </div>
    ${!hasBegun && !fault && html`<div class="waiting">
      ${prefill ? html`<${Bar} parts=${[["computed", prefill.done]]} whole=${prefill.total} label="prompt" /><span class="note">reading the prompt: ${number(prefill.done)} of ${number(prefill.total)} tokens</span>` : html`<span class="dots" /><span class="note">${waitsFor ?? (prompt ? `${number(prompt)} prompt tokens` : "waiting")}</span>`}
    </div>`}
    ${isStopped && html`<p class="note">stopped</p>`}
    ${fault && html`<p class="fault" role="alert">${fault} <${Button} onClick=${onRetry}>Try again<//> <${Button} kind="quiet" onClick=${onClose} isLocal>Edit the message<//></p>`}
  </article>`;
}

/** Speaks a reply to screen readers, sentence by sentence: new sentences only are announced. */
export function Announcer({ reply }) {
  const last = useRef("");
  if (reply) last.current = reply.text;
  const sentences = last.current.match(/[^.!?\n]+(?:[.!?\n]+|$)/g) ?? [];
  if (reply?.isOpen && !/[.!?\n]$/.test(last.current)) sentences.pop(); // it is not complete
  return html`<div class="hidden announcer" role="log" aria-live="polite" aria-label="Reply">${sentences.map((sentence, index) => html`<span key=${index}>${sentence}</span>`)}</div>`;
}
