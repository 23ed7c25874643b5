// The replies that agents are writing. They go on while the user looks at another view.
import { ask, framesOf, refreshAgent, tell } from "./server.js";
import { attached } from "./pictures.js";

const replies = new Map(); // by agent
export const drafts = new Map(); // unsent text by agent; "" is the new chat

export const replyOf = (id) => replies.get(id);
export const stopReply = (id) => replies.get(id)?.control.abort();
export const said = (role, text, pictures = []) => ({
  role,
  content: [...pictures.map((source) => ({ type: "image", source })), ...(text || !pictures.length ? [{ type: "text", text }] : [])],
});

export function dropReply(id) {
  replies.delete(id);
  tell("replies");
}

/** Send a user's message after turn `parent`; `begun` is the reply so far, which the model continues. */
export async function sendMessage(id, asked, { parent = null, begun = "", options = {}, pictures = [] } = {}) {
  const control = new AbortController();
  const reply = { asked, pictures, parent, begun, options, control, text: begun, thinking: "", calls: [], isOpen: true };
  const show = (more) => {
    Object.assign(reply, more);
    tell("replies");
  };
  replies.set(id, reply);
  show({});
  try {
    await read(id, reply, show);
    if (reply.finished.turn_id) show({ turn: turnOf(id, reply) });
    else dropReply(id);
  } catch (error) {
    if (error.name !== "AbortError") show({ fault: error.message });
    else if (reply.hasBegun) show({ isStopped: true }); // until its turn is shown
    else {
      if (!begun && !drafts.get(id)) {
        attached.set(id, pictures);
        drafts.set(id, asked);
      }
      dropReply(id);
    }
  }
  show({ isOpen: false });
  refreshAgent(id);
}

async function read(id, reply, show) {
  const { asked, pictures, begun, options, control } = reply;
  const messages = [said("user", asked, pictures), ...(begun ? [said("assistant", begun)] : [])];
  const path = `v1/agents/${encodeURIComponent(id)}/generate`;
  const answer = await ask(path, { method: "POST", json: { messages, ...options, stream: true }, signal: control.signal });
  for await (const event of framesOf(answer)) show(changeOf(reply, event));
  if (!reply.finished) throw new Error("The connection to the server was lost during the reply.");
}

function changeOf({ text, thinking, calls }, event) {
  switch (event.type) {
    case "model":
      return { waitsFor: event.detail };
    case "started":
      return { turnId: event.turn_id, prompt: event.usage.prompt_tokens };
    case "prefill":
      return { prefill: event };
    case "text":
      return { hasBegun: true, text: text + event.text };
    case "thinking":
      return { hasBegun: true, thinking: thinking + event.text };
    case "tool_call":
      return { hasBegun: true, calls: [...calls, { id: event.id, name: event.name, written: "" }] };
    case "tool_arguments":
      return { calls: calls.map((call, index) => (index === event.index ? { ...call, written: call.written + event.arguments } : call)) };
    case "finished":
      return { finished: event };
    case "error":
      throw new Error(event.error.message);
    default:
      return {};
  }
}

function turnOf(id, { parent, asked, pictures, finished }) {
  const { turn_id, message, ...rest } = finished;
  return { ...rest, id: turn_id, parent, agent_id: id, created_at: Date.now() / 1000, messages: [said("user", asked, pictures), message] };
}
