// Components and helpers of several views: number formats, icons, bars, dialogs, lists, text.
import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";
import { copyText } from "./clipboard.js";
import { known } from "./server.js";

export { Prose } from "./markdown.js";

export const STARTER = "smollm2-135m-instruct";
export const STARTER_NOTE = "This is a demonstration model: it is fast, but its answers are poor. The view Models lists better ones for this machine.";

// -- numbers -----------------------------------------------------------------------------------

export function bytes(count) {
  if (!count) return "0";
  const unit = Math.min(4, Math.floor(Math.log2(count) / 10));
  const value = count / 2 ** (10 * unit);
  return `${value >= 100 || !unit ? Math.round(value) : value.toFixed(1)} ${["B", "KB", "MB", "GB", "TB"][unit]}`;
}

const plain = new Intl.NumberFormat("en-US");
export const number = (count) => plain.format(Math.round(count));

export function short(count) {
  if (count < 10_000) return number(count);
  return count < 1e6 ? `${(count / 1e3).toFixed(count < 1e5 ? 1 : 0)}k` : `${(count / 1e6).toFixed(1)}M`;
}

export const percent = (part) => (part === null || part === undefined ? "–" : `${Math.round(part * 100)} %`);

export function seconds(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0 ms";
  if (value < 0.01) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  return value < 100 ? `${value.toFixed(value < 10 ? 2 : 1)} s` : `${Math.round(value)} s`;
}

/** The age of a time that is given in seconds since the epoch. */
export function ago(at) {
  const age = Date.now() / 1000 - at;
  if (!at) return "never";
  if (age < 5) return "now";
  if (age < 60) return `${Math.floor(age)} s`;
  if (age < 3600) return `${Math.floor(age / 60)} min`;
  return age < 86_400 ? `${Math.floor(age / 3600)} h` : `${Math.floor(age / 86_400)} d`;
}

// -- icons and bars ----------------------------------------------------------------------------

const PATHS = {
  agents: "M5 3v12M5 9c0-4 9-1 9-6M3 15h4M12 3h4M5 15",
  memory: "M3 3h5v5H3zM10 3h5v5h-5zM3 10h5v5H3zM10 10h5v5h-5z",
  now: "M2 10h3l2-6 4 10 2-4h3",
  chat: "M3 4h12v8H8l-4 3v-3H3z",
  models: "M9 2l6 3.2v7.6L9 16l-6-3.2V5.2zM3 5.2L9 8.5l6-3.3M9 8.5V16",
  connect: "M7 11l4-4M6 8L4 10a2.8 2.8 0 004 4l2-2M12 10l2-2a2.8 2.8 0 00-4-4L8 6",
  pin: "M6 3h6l-1 5 2 2H5l2-2zM9 10v5",
  fork: "M5 4v10M5 8c0 4 8 1 8-4M13 4v0",
  more: "M4 9h.01M9 9h.01M14 9h.01",
  close: "M4 4l10 10M14 4L4 14",
  sun: "M9 6a3 3 0 100 6 3 3 0 000-6zM9 1v2M9 15v2M1 9h2M15 9h2M3.5 3.5l1.4 1.4M13.1 13.1l1.4 1.4M3.5 14.5l1.4-1.4M13.1 4.9l1.4-1.4",
  send: "M3 9h11M10 4l5 5-5 5",
  stop: "M5 5h8v8H5z",
  plus: "M9 3v12M3 9h12",
  image: "M3 4h12v10H3zM3 12l3.5-4 3 3 2-2 3.5 3.5M11.5 7h.01",
  copy: "M6 6h8v9H6zM4 12V3h8",
  back: "M11 4L6 9l5 5",
  compare: "M3 3h5v12H3zM10 3h5v12h-5zM5 6.5h1M5 9.5h1M12 6.5h1M12 9.5h1",
  swap: "M3 6h11M11 3l3 3-3 3M15 12H4M7 9l-3 3 3 3",
  list: "M3 5h12M3 9h12M3 13h12",
  options: "M3 5h6M13 5h2M3 13h2M9 13h6M11 3v4M7 11v4",
  tool: "M11.5 3a4 4 0 00-3.8 5.3L3 13l2 2 4.7-4.7A4 4 0 0015 6.5l-2.5 1-2-2z",
};

export const Icon = ({ name }) =>
  html`<svg class="icon" viewBox="0 0 18 18" aria-hidden="true"><path d=${PATHS[name]} /></svg>`;

/** Where an agent's KV cache is, by the API's name for it, and what that means for its next turn. */
export const TIERS = {
  hot: ["in memory", "Its next turn starts at once"],
  warm: ["on disk", "Its next turn reads what is computed from disk, which is much faster than computing it"],
  cold: ["not cached", "Its next turn computes the conversation again"],
};

export const Tier = ({ tier }) => html`<span class="tier ${tier}" title=${TIERS[tier][1]}>${TIERS[tier][0]}</span>`;

/** A bar of `[name, value]` parts relative to `whole`; the name selects the colour. */
export function Bar({ parts, whole, label, isThick }) {
  const total = whole || parts.reduce((sum, [, value]) => sum + value, 0) || 1;
  return html`<span class=${`bar ${isThick ? "tall" : ""}`} role="img" aria-label=${label}>
    ${parts
      .filter(([, value]) => value > 0)
      .map(([name, value]) => html`<i class=${name} style=${{ width: `${Math.min(100, (100 * value) / total)}%` }} />`)}
  </span>`;
}

/** Where tokens came from, by the API's name: a label, and what it means. */
const SOURCES = {
  hot: ["still open", "reused from the conversation, which was still open"],
  pool: ["from memory", "reused from memory"],
  disk: ["from disk", "reused from disk"],
  computed: ["computed", "computed"],
  drafted: ["from drafts", "of the reply drafted from earlier text and confirmed by the model, which is faster"],
};

/** The sources of a prompt's tokens, and the number of accepted draft tokens of the reply. */
export function ReuseBar({ reuse, hasText = true }) {
  const parts = Object.keys(SOURCES).map((name) => [name, reuse[name] ?? 0]).filter(([, count]) => count);
  const said = parts.map(([name, count]) => `${number(count)} ${SOURCES[name][1]}`).join(", ");
  return html`<span class="reuse" title=${`Tokens: ${said}`}>
    <${Bar} parts=${parts} label=${said} />
    ${hasText && html`<span class="key">
      ${parts.map(([name, count]) => html`<span><i class=${`dot ${name}`} />${number(count)} ${SOURCES[name][0]}</span>`)}
    </span>`}
  </span>`;
}

// -- controls ----------------------------------------------------------------------------------

/** A button; while the server does not answer it is disabled, unless it works without (`isLocal`). */
export const Button = ({ icon, children, title, kind = "", isLocal = false, disabled = false, ...rest }) =>
  html`<button type="button" class=${kind} title=${title} aria-label=${children ? null : title} disabled=${disabled || (!isLocal && known.link === "down")} ...${rest}>
    ${icon && html`<${Icon} name=${icon} />`}${children && html`<span>${children}</span>`}
  </button>`;

export function Copy({ text, label = "Copy" }) {
  const [isDone, setDone] = useState(false);
  const copy = async () => {
    await copyText(text);
    setDone(true);
    setTimeout(() => setDone(false), 1200);
  };
  return html`<${Button} icon="copy" kind="quiet" isLocal title="Copy" onClick=${copy}>${isDone ? "Copied" : label}<//>`;
}

/** A button that opens a sheet of further controls; a form stays open until one leaves it. */
export function Menu({ label, icon = "more", text, isForm = false, children }) {
  const box = useRef();
  useEffect(() => {
    const leave = (event) => {
      if (box.current.open && !box.current.contains(event.target)) box.current.open = false;
    };
    for (const kind of ["pointerdown", "focusin"]) addEventListener(kind, leave);
    return () => ["pointerdown", "focusin"].forEach((kind) => removeEventListener(kind, leave));
  }, []);
  const close = () => {
    box.current.open = false;
    box.current.firstElementChild.focus();
  };
  const press = (event) => {
    const items = [...box.current.querySelectorAll(".sheet button")];
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape" && box.current.open) {
      close();
    } else if (step && !isForm && items.length) {
      box.current.open = true;
      const here = items.indexOf(document.activeElement);
      items.at(here < 0 && step < 0 ? -1 : (here + step) % items.length).focus();
    } else return;
    event.stopPropagation();
    event.preventDefault();
  };
  return html`<details class="menu" ref=${box} onKeyDown=${press}>
    <summary class="button" title=${label} aria-label=${label}><${Icon} name=${icon} />${text && html`<span>${text}</span>`}</summary>
    <div class=${`sheet ${isForm ? "" : "list"}`} onClick=${() => isForm || close()}>${children}</div>
  </details>`;
}

/** A dialog with a form; `onDone` receives the form's values. */
export function Dialog({ title, children, onDone, onClose, action = "OK", isLocal = false }) {
  const dialog = useRef();
  useEffect(() => {
    dialog.current.showModal();
    dialog.current.querySelector("input,textarea,select")?.focus();
  }, []);
  const submit = (event) => {
    event.preventDefault();
    onDone(Object.fromEntries(new FormData(event.target)));
  };
  return html`<dialog ref=${dialog} onClose=${onClose} onClick=${(event) => event.target === dialog.current && onClose()}>
    <form onSubmit=${submit}>
      <h2>${title}</h2>
      ${children}
      <footer>
        <${Button} isLocal onClick=${onClose}>Cancel<//>
        <button class="main" disabled=${!isLocal && known.link === "down"}>${action}</button>
      </footer>
    </form>
  </dialog>`;
}

export const Field = ({ label, hint, children }) =>
  html`<label class="field"><span>${label}</span>${children}${hint && html`<small>${hint}</small>`}</label>`;

/** A list of rows of equal height that draws only the visible ones. */
export function Rows({ rows, height, draw, focus = -1, label }) {
  const box = useRef();
  const [view, setView] = useState({ top: 0, size: 800 });
  useEffect(() => {
    const look = () => box.current && setView({ top: box.current.scrollTop, size: box.current.clientHeight });
    const observer = new ResizeObserver(look);
    observer.observe(box.current);
    box.current.addEventListener("scroll", look, { passive: true });
    return () => observer.disconnect();
  }, []);
  useEffect(() => {
    const { scrollTop, clientHeight } = box.current;
    if (focus < 0) return;
    if (focus * height < scrollTop) box.current.scrollTop = focus * height;
    else if ((focus + 1) * height > scrollTop + clientHeight) box.current.scrollTop = (focus + 1) * height - clientHeight;
  }, [focus]);
  const first = Math.max(0, Math.floor(view.top / height) - 6);
  const last = Math.min(rows.length, Math.ceil((view.top + view.size) / height) + 6);
  return html`<div class="rows" ref=${box} role="listbox" aria-label=${label} tabindex="0">
    <div style=${{ height: `${rows.length * height}px` }}>
      <div style=${{ transform: `translateY(${first * height}px)` }}>
        ${rows.slice(first, last).map((row, index) => draw(row, first + index))}
      </div>
    </div>
  </div>`;
}

// -- text --------------------------------------------------------------------------------------

export const textOf = (message) =>
  message.content
    .map((part) => {
      if (part.type === "text") return part.text;
      if (part.type === "tool_use") return `\`${part.name}(${JSON.stringify(part.input)})\``;
      if (part.type === "tool_result") return part.content.map((inner) => inner.text ?? "").join("");
      return part.type === "image" ? "[image]" : "";
    })
    .join("");

export const thinkingOf = (message) =>
  message.content
    .filter((part) => part.type === "thinking")
    .map((part) => part.thinking)
    .join("");
