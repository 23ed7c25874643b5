// The composer of a chat, and the options of its next reply.
import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";
import { known, useTopics } from "./server.js";
import { Button, Field, Menu } from "./parts.js";
import { drafts } from "./replies.js";
import { AddPicture, Attached, attached, useAttached } from "./pictures.js";

/** A message to `id`; "" is the new chat. `edited` is the earlier message in whose place it is sent. `isQuiet`: do not take the focus. */
export function Composer({ id, isQuiet, isBusy, edited, onSend, onStop, onLeave, onEditLast, options, onOptions }) {
  useTopics("link");
  const [text, setText] = useState(drafts.get(id) ?? "");
  const { pictures, keep, choose, paste, drop, over } = useAttached(id);
  const box = useRef();
  const isDown = known.link === "down";
  const write = (value) => {
    drafts.set(id, value); // at once: an effect of an earlier text would run after the text is sent
    setText(value);
  };
  useEffect(() => {
    // On a touch screen the keyboard would cover half of the page.
    if (!isQuiet && !matchMedia("(pointer: coarse)").matches) box.current.focus({ preventScroll: true });
  }, [id]);
  useEffect(() => {
    if (isBusy || text || !drafts.get(id)) return;
    setText(drafts.get(id));
    keep(attached.get(id) ?? []);
  }, [isBusy, drafts.get(id)]); // a message that was not sent comes back
  useEffect(() => {
    box.current.style.height = "auto";
    box.current.style.height = `${Math.min(240, box.current.scrollHeight + 2)}px`;
  }, [text]);
  useEffect(() => {
    if (!edited) return;
    write((box.current.value = edited));
    keep(attached.get(id) ?? []);
    box.current.focus();
    box.current.setSelectionRange(box.current.value.length, box.current.value.length);
  }, [edited]);
  const isEmpty = !text.trim() && !pictures.length;
  const leave = () => (write(""), keep([]), onLeave());
  const submit = () => {
    if (isBusy || isDown || isEmpty) return;
    write("");
    keep([]);
    onSend(text.trim(), pictures);
  };
  const press = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      submit();
    } else if (event.key === "ArrowUp" && !text && !isBusy) onEditLast?.();
    else if (event.key !== "Escape") return;
    else if (isBusy) onStop();
    else if (edited) leave();
    else box.current.blur(); // the page's shortcuts work again
  };
  return html`<form class="composer" onSubmit=${(event) => (event.preventDefault(), submit())} onPaste=${paste} onDrop=${drop} onDragOver=${over}>
    ${edited && html`<p class="note">Sends in place of the earlier message. <${Button} kind="quiet" isLocal onClick=${leave}>Keep the earlier one<//></p>`}
    <${Attached} pictures=${pictures} keep=${keep} />
    <textarea ref=${box} rows="1" placeholder=${id ? `Message ${id}` : "Write a message"} aria-label="Message" value=${text} onInput=${(event) => write(event.target.value)} onKeyDown=${press} />
    <div class="under">
      <${AddPicture} onChoose=${choose} />
      <${Options} value=${options} onChange=${onOptions} />
      <span class="note hint">${isDown ? "Your text is kept until the server answers." : isBusy ? "Esc stops" : "Enter sends, Shift+Enter starts a line"}</span>
      ${isBusy ? html`<${Button} icon="stop" title="Stop (Esc)" onClick=${onStop}>Stop<//>` : html`<button class="main" title="Send (Enter)" disabled=${isDown || isEmpty}>Send</button>`}
    </div>
  </form>`;
}

const OPTIONS = [
  { name: "temperature", label: "Temperature", hint: "0 picks the likeliest token; empty: the model's default", min: 0, max: 2, step: 0.1 },
  { name: "top_p", label: "Top P", hint: "keeps the likeliest tokens up to this share; empty: the model's default", min: 0, max: 1, step: 0.05 },
  { name: "max_tokens", label: "Reply length", hint: "tokens at most; empty: as long as the context permits", min: 1, step: 1 },
  { name: "seed", label: "Seed", hint: "the same seed and settings repeat a reply; empty: random", step: 1 },
];

function Options({ value, onChange }) {
  const count = Object.values(value).filter((set) => set !== undefined).length;
  const set = (name) => (event) => onChange({ ...value, [name]: event.target.value === "" ? undefined : Number(event.target.value) });
  return html`<${Menu} label="Options of the reply" icon="options" text=${count ? `Options (${count})` : "Options"} isForm>
    ${OPTIONS.map(({ name, label, hint, ...limits }) => html`<${Field} key=${name} label=${label} hint=${hint}><input type="number" name=${name} ...${limits} value=${value[name] ?? ""} onInput=${set(name)} /><//>`)}
    ${count > 0 && html`<${Button} isLocal onClick=${() => onChange({})}>Use the defaults<//>`}
  <//>`;
}
